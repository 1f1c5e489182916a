package verbstest_test

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestConformance runs the suite over IPv6. The tests of softiwarp run the suite in each
// configuration.
func TestConformance(t *testing.T) {
	verbstest.Conformance(t, func(testing.TB) verbs.Provider { return softiwarp.New(softiwarp.Config{}) },
		netip.MustParseAddrPort("[::1]:0"))
}
