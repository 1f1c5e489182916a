package mount

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// The lab tests the choice on hosts with RDMA devices.
func TestChooseProvider(t *testing.T) {
	if devices, err := rdmacore.Devices(); err == nil && len(devices) > 0 {
		t.Skip("this host has RDMA devices; the test needs a host without")
	}
	server := netip.MustParseAddrPort("127.0.0.1:20049")
	var unavailable *rdmacore.UnavailableError
	for _, c := range []struct {
		o    Options
		name string // "" if chooseProvider must fail
		want string // prefix of the reason or of the error
	}{
		{Options{Provider: "softiwarp"}, "softiwarp", "selected by option"},
		{Options{Provider: "auto"}, "softiwarp", "no RDMA device: "},
		{Options{Provider: "rdmacore"}, "", ""},
		{Options{Provider: "auto", Device: "rxe0"}, "", `option "device=rxe0"`},
	} {
		p, reason, err := chooseProvider(context.Background(), &c.o, server, hclog.NewNullLogger())
		switch {
		case c.name == "" && (!errors.As(err, &unavailable) || !strings.HasPrefix(err.Error(), c.want)):
			t.Errorf("%+v: got error %v, want an UnavailableError that begins with %q", c.o, err, c.want)
		case c.name != "" && (err != nil || p.Name() != c.name || !strings.HasPrefix(reason, c.want)):
			t.Errorf("%+v: got %v, reason %q, error %v; want %s, reason %q", c.o, p, reason, err, c.name, c.want)
		}
	}
}
