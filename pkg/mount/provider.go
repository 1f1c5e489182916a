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

// Values of the option provider.
const (
	providerAuto      = "auto"
	providerSoftiwarp = "softiwarp"
	providerRdmacore  = rdmacore.Name
)

// routeTimeout bounds the lookup of the RDMA device of a route.
const routeTimeout = 3 * time.Second

// ChooseProvider returns the provider that o selects, and the reason for the choice. See
// chooseProvider.
func ChooseProvider(ctx context.Context, o *Options, server netip.AddrPort,
	log hclog.Logger) (p verbs.Provider, reason string, err error) {
	return chooseProvider(ctx, o, server, log, rdmacore.New)
}

// chooseProvider returns the provider that o selects, and the reason for the choice. For "auto" it
// chooses rdma-core if the route to the server uses an RDMA device, and softiwarp otherwise. It
// sends nothing to the server. newCard is rdmacore.New.
func chooseProvider(ctx context.Context, o *Options, server netip.AddrPort, log hclog.Logger,
	newCard func(rdmacore.Config) (verbs.Provider, error)) (p verbs.Provider, reason string, err error) {
	const selected = "selected by option"
	soft := func() verbs.Provider {
		return softiwarp.New(softiwarp.Config{CRC: o.MPACRC, AnySourcePort: o.NoResvPort})
	}
	if o.Provider == providerSoftiwarp {
		return soft(), selected, nil
	}
	card, err := newCard(rdmacore.Config{Device: o.Device, Logger: log})
	if o.Provider == providerRdmacore {
		return card, selected, err
	}
	if err == nil {
		var name string
		if name, err = routeDevice(ctx, card, server); err == nil {
			return card, "the route to the server uses the RDMA device " + name, nil
		}
	}
	if o.Device != "" {
		return nil, "", fmt.Errorf("option \"device=%s\": %w", o.Device, err)
	}
	return soft(), "no RDMA device: " + unavailableReason(err), nil
}

// unavailableReason returns why rdma-core is not used. It leaves out the advice of the error,
// because a host without rdma-core is not an error.
func unavailableReason(err error) string {
	var unavailable *rdmacore.UnavailableError
	if errors.As(err, &unavailable) {
		return unavailable.Reason + " (see nfsrdmad doctor)"
	}
	return err.Error()
}

// routeDevice returns the name of the device that the route to the server uses.
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
