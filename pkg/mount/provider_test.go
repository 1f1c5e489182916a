package mount

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// TestChooseProvider chooses on a host without RDMA devices, and on a host with the device
// "softiwarp". The lab tests the choice with rdma-core.
func TestChooseProvider(t *testing.T) {
	none := func(rdmacore.Config) (verbs.Provider, error) { return nil, &rdmacore.UnavailableError{Reason: "test"} }
	one := func(rdmacore.Config) (verbs.Provider, error) { return softiwarp.New(softiwarp.Config{}), nil }
	const route = "the route to the server uses the RDMA device softiwarp"
	server := netip.MustParseAddrPort("127.0.0.1:20049")
	var unavailable *rdmacore.UnavailableError
	for _, c := range []struct {
		o    Options
		card func(rdmacore.Config) (verbs.Provider, error)
		name string // "" if chooseProvider must fail
		want string // prefix of the reason or of the error
	}{
		{Options{Provider: "softiwarp"}, none, "softiwarp", "selected by option"},
		{Options{Provider: "softiwarp"}, one, "softiwarp", "selected by option"},
		{Options{Provider: "auto"}, none, "softiwarp", "no RDMA device: test"},
		{Options{Provider: "auto"}, one, "softiwarp", route},
		{Options{Provider: "rdmacore"}, none, "", ""},
		{Options{Provider: "rdmacore"}, one, "softiwarp", "selected by option"},
		{Options{Provider: "auto", Device: "rxe0"}, none, "", `option "device=rxe0"`},
		{Options{Provider: "auto", Device: "rxe0"}, one, "softiwarp", route},
	} {
		p, reason, err := chooseProvider(context.Background(), &c.o, server, hclog.NewNullLogger(), c.card)
		switch {
		case c.name == "" && (!errors.As(err, &unavailable) || !strings.HasPrefix(err.Error(), c.want)):
			t.Errorf("%+v: got error %v, want an UnavailableError that begins with %q", c.o, err, c.want)
		case c.name != "" && (err != nil || p.Name() != c.name || !strings.HasPrefix(reason, c.want)):
			t.Errorf("%+v: got %v, reason %q, error %v; want %s, reason %q", c.o, p, reason, err, c.name, c.want)
		}
	}
}
