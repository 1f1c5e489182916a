package xprt

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/hostile"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

// attacked is a transport as the hostile server's tests see it.
type attacked struct{ *Transport }

func (a attacked) Stats() hostile.Stats {
	s := a.Transport.Stats()
	return hostile.Stats{Connects: s.Connects, Refused: s.RemoteAccessErrors, MRsFailed: uint64(s.MRsFailed),
		MRsRecovered: uint64(s.MRsRecovered + s.MRsRecycled + s.MRsOrphaned)}
}

// TestAttacks plays a server that reaches for memory it has no right to. Each attempt must be
// refused by the device, end the connection, be counted, and leave the memory and the next call's
// data alone.
func TestAttacks(t *testing.T) {
	hostile.Attacks(t, hostile.Config{
		Provider:   func(testing.TB) verbs.Provider { return softiwarp.New(softiwarp.Config{}) },
		Addr:       loopback,
		Dial:       func(t testing.TB, server netip.AddrPort) hostile.Client { return attacked{dial(t, server, nil)} },
		Unanswered: true,
		Counted:    true,
	})
}
