package verbstest

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A conformanceTest is one rule that every provider keeps.
type conformanceTest struct {
	name string
	need verbs.Caps // what the device must be able to do; without it the rule does not apply
	run  func(t *testing.T, s *suite)
}

// A suite is what the tests are run on.
type suite struct {
	newProvider NewProvider
	laddr       netip.AddrPort
}

// pair connects two fresh endpoints.
func (s *suite) pair(t *testing.T, o options) *pair {
	t.Helper()
	return newPair(t, s.newProvider(t), s.laddr, o)
}

// Conformance runs the rules that hold for every provider, through the verbs interfaces alone.
// Connections go through laddr (port 0 for any), both ends in this process.
func Conformance(t *testing.T, newProvider NewProvider, laddr netip.AddrPort) {
	s := &suite{newProvider: newProvider, laddr: laddr}
	caps := s.caps(t)
	for _, group := range [][]conformanceTest{connectionTests, messageTests, memoryTests, accessTests, endingTests,
		resourceTests, sharingTests, failureTests} {
		for _, c := range group {
			t.Run(c.name, func(t *testing.T) {
				if !caps.Has(c.need) {
					t.Skipf("the device lacks the capabilities %#x", c.need&^caps)
				}
				c.run(t, s)
			})
		}
	}
}

// caps asks the device that reaches laddr for its abilities.
func (s *suite) caps(t *testing.T) verbs.Caps {
	t.Helper()
	return s.attrs(t).Caps
}

// attrs asks the device that reaches laddr for its limits and abilities.
func (s *suite) attrs(t *testing.T) verbs.DeviceAttrs {
	t.Helper()
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	id, err := p.Resolve(within(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer id.Close()
	defer l.Close()
	return id.Device().Attrs()
}
