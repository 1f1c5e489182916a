package xprt

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit/hostile"
)

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

// An attackTarget adapts a transport to the tests of the hostile server.
type attackTarget struct{ *Transport }

func (a attackTarget) Stats() hostile.Stats {
	s := a.Transport.Stats()
	return hostile.Stats{Connects: s.Connects, Refused: s.RemoteAccessErrors, MRsFailed: s.MRsFailed,
		MRsRecovered: s.MRsRecovered + s.MRsRecycled + s.MRsOrphaned}
}

// TestAttacks runs a server that accesses memory without permission. The device must refuse each
// attempt, and the attempt must be counted and end the connection. The memory and the data of the
// next call must be intact.
func TestAttacks(t *testing.T) {
	hostile.Attacks(t, hostile.Config{
		Provider: func(testing.TB) verbs.Provider { return softiwarp.New(softiwarp.Config{}) },
		Addr:     loopback,
		Dial: func(t testing.TB, server netip.AddrPort) hostile.Client {
			return attackTarget{dial(t, server,
				nil)}
		},
		Unanswered: true,
		Counted:    true,
	})
}
