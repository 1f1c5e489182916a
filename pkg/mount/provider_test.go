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

// TestChooseProvider runs on machines without RDMA devices and says so where it does not.
func TestChooseProvider(t *testing.T) {
	if devices, err := rdmacore.Devices(); err == nil && len(devices) > 0 {
		t.Skipf("this machine has RDMA devices: the lab chooses on such")
	}
	server := netip.MustParseAddrPort("127.0.0.1:20049")
	var missing *rdmacore.UnavailableError
	for _, c := range []struct {
		o    Options
		name string // "" for an error
		why  string
	}{
		{Options{Provider: "softiwarp"}, "softiwarp", "as asked for"},
		{Options{Provider: "auto"}, "softiwarp", "no RDMA device: "},
		{Options{Provider: "rdmacore"}, "", ""},
		{Options{Provider: "auto", Device: "rxe0"}, "", `option "device=rxe0"`},
	} {
		p, why, err := chooseProvider(context.Background(), &c.o, server, hclog.NewNullLogger())
		switch {
		case c.name == "" && !errors.As(err, &missing):
			t.Errorf("%+v: error %v", c.o, err)
		case c.name == "" && !strings.HasPrefix(err.Error(), c.why):
			t.Errorf("%+v: error %v, want %s...", c.o, err, c.why)
		case c.name != "" && (err != nil || p.Name() != c.name || !strings.HasPrefix(why, c.why)):
			t.Errorf("%+v: %v, because %q, error %v", c.o, p, why, err)
		}
	}
}
