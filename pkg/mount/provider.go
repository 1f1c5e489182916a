package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// Providers by the names that the option has for them.
const (
	providerAuto      = "auto"
	providerSoftiwarp = "softiwarp"
	providerRdmacore  = rdmacore.Name
)

// routeTimeout bounds the question whether a route goes through an RDMA device.
const routeTimeout = 3 * time.Second

// chooseProvider makes the provider that o asks for, and says why it is the one. "auto" is
// rdma-core where the route to the server goes through an RDMA device, else softiwarp. The server
// is sent nothing.
func chooseProvider(ctx context.Context, o *Options, server netip.AddrPort, log hclog.Logger) (p verbs.Provider,
	why string, err error) {
	soft := func() verbs.Provider { return softiwarp.New(softiwarp.Config{CRC: o.MPACRC}) }
	if o.Provider == providerSoftiwarp {
		return soft(), "as asked for", nil
	}
	card, err := rdmacore.New(rdmacore.Config{Device: o.Device, Logger: log})
	if o.Provider == providerRdmacore {
		return card, "as asked for", err
	}
	if err == nil {
		var name string
		if name, err = routeDevice(ctx, card, server); err == nil {
			return card, "the route to the server goes through the RDMA device " + name, nil
		}
	}
	if o.Device != "" {
		return nil, "", fmt.Errorf("option \"device=%s\": %w", o.Device, err)
	}
	return soft(), "no RDMA device: " + shortly(err), nil
}

// shortly is why rdma-core is not used, without what to do about it: it may be meant so.
func shortly(err error) string {
	var missing *rdmacore.UnavailableError
	if errors.As(err, &missing) {
		return missing.Reason + " (see nfsrdmad doctor)"
	}
	return err.Error()
}

// routeDevice is the name of the device that the route to the server goes through.
func routeDevice(ctx context.Context, p verbs.Provider, server netip.AddrPort) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, routeTimeout)
	defer cancel()
	id, err := p.Resolve(ctx, server)
	if err != nil {
		return "", err
	}
	defer id.Close()
	return id.Device().Attrs().Name, nil
}
