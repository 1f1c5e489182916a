//go:build rdmacore && cgo && linux

package rdmacore

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/hostile"
)

const (
	wholeWindow = "a memory window gives the peer access to all memory that it is bound to"
	anyWindow   = "the kernel accepts any memory window of the machine in a peer's Send With Invalidate"
)

// allowed lists the attacks that the kernel's soft devices permit with every provider.
var allowed = map[verbs.Transport]map[string]string{
	verbs.TransportIB: { // rxe
		"write beyond the end, call pending":          wholeWindow,
		"read beyond the end, call pending":           wholeWindow,
		"invalidation of a key of another connection": anyWindow,
	},
	verbs.TransportIWARP: { // siw
		"read of a write chunk, call pending": "the kernel requires a valid key for a Read, but no access right",
	},
}

// attacked is a transport in the form that the tests of package hostile need.
type attacked struct{ *xprt.Transport }

func (a attacked) Stats() hostile.Stats {
	s := a.Transport.Stats()
	return hostile.Stats{Connects: s.Connects, MRsFailed: uint64(s.MRsFailed),
		MRsRecovered: uint64(s.MRsRecovered + s.MRsRecycled + s.MRsOrphaned)}
}

// TestAttacks plays a server that accesses memory without permission, on a soft device of the
// kernel.
func TestAttacks(t *testing.T) {
	addr := netip.AddrPortFrom(inGuest(t), 0)
	kind := mustResolve(t).Attrs().Transport
	hostile.Attacks(t, hostile.Config{
		Provider:   func(t testing.TB) verbs.Provider { return devices(t) },
		Addr:       addr,
		Dial:       dialAttacked,
		Unanswered: kind == verbs.TransportIWARP,
		Except:     allowed[kind],
	})
}

// dialAttacked connects a transport to the hostile server.
func dialAttacked(t testing.TB, server netip.AddrPort) hostile.Client {
	t.Helper()
	tr, err := xprt.New(xprt.Config{Provider: devices(t), Addr: server, Slots: 16,
		ReconnectMin: 20 * time.Millisecond, ReconnectMax: time.Second,
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: t.Output()})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for try := 0; ; try++ {
		err := tr.Connect(ctx)
		if err == nil {
			return attacked{tr}
		}
		// On siw now and then: the connection manager chose a port that is in use.
		if try == 10 || !errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
