package verbstest

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A conformanceTest is one rule for all providers.
type conformanceTest struct {
	name string
	need verbs.Caps // required capabilities; without them the test is skipped
	run  func(t *testing.T, s *suite)
}

// A suite creates the connections of the tests.
type suite struct {
	newProvider NewProvider
	laddr       netip.AddrPort
}

// pair connects two new endpoints.
func (s *suite) pair(t *testing.T, o options) *pair {
	t.Helper()
	return newPair(t, s.newProvider(t), s.laddr, o)
}

// Conformance runs the tests that every provider must pass. The tests use only the verbs
// interfaces. Both ends of each connection are in this process and use laddr (port 0: any port).
//
// A test that does not apply to the device is skipped. maySkip has the names of the tests for which
// that may be so. A skip of another test is an error, because the test would never run.
func Conformance(t *testing.T, newProvider NewProvider, laddr netip.AddrPort, maySkip ...string) {
	s := &suite{newProvider: newProvider, laddr: laddr}
	caps := s.caps(t)
	tests := slices.Concat(connectionTests, messageTests, memoryTests, accessTests, disconnectTests, resourceTests,
		sharingTests, errorTests)
	for _, name := range maySkip {
		if !slices.ContainsFunc(tests, func(c conformanceTest) bool { return c.name == name }) {
			t.Errorf("maySkip names an unknown test %q", name)
		}
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			t.Cleanup(func() {
				if t.Skipped() && !slices.Contains(maySkip, c.name) {
					t.Error("this provider may not skip the test")
				}
			})
			if !caps.Has(c.need) {
				t.Skipf("the device lacks the capabilities %#x", c.need&^caps)
			}
			c.run(t, s)
		})
	}
}

// caps returns the capabilities of the device for laddr.
func (s *suite) caps(t *testing.T) verbs.Caps {
	t.Helper()
	return s.attrs(t).Caps
}

// attrs returns the attributes of the device for laddr.
func (s *suite) attrs(t *testing.T) verbs.DeviceAttrs {
	t.Helper()
	return s.unconnected(t).Device().Attrs()
}

// listen returns a new provider and its listener.
func (s *suite) listen(t *testing.T) (verbs.Provider, verbs.Listener) {
	t.Helper()
	p := s.newProvider(t)
	return p, listen(t, p, s.laddr)
}

// unconnected returns a ConnID of a new provider, without a queue pair.
func (s *suite) unconnected(t *testing.T) verbs.ActiveID {
	t.Helper()
	p, l := s.listen(t)
	id, err := p.Resolve(Context(t), l.Addr())
	kit.Must(t, err)
	t.Cleanup(func() { id.Close() })
	return id
}
