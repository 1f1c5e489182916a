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

	"github.com/nfsrdmad/nfsrdmad/internal/hostile"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// allowed are the attacks that the kernel's soft devices allow by themselves, whoever uses them.
var allowed = map[verbs.Transport]map[string]string{
	verbs.TransportIB: { // rxe
		"write beyond the end, in time":               "a window lets the peer reach all of the memory that it is bound to",
		"overlong read, in time":                      "a window lets the peer reach all of the memory that it is bound to",
		"invalidation of a key of another connection": "the kernel lets the peer's Send With Invalidate name any window of the machine",
	},
	verbs.TransportIWARP: { // siw
		"read of a write chunk, in time": "the kernel asks for no right of a Read, only for a good key",
	},
}

// attacked is a transport as the hostile server's tests see it.
type attacked struct{ *xprt.Transport }

func (a attacked) Stats() hostile.Stats {
	s := a.Transport.Stats()
	return hostile.Stats{Connects: s.Connects, MRsFailed: uint64(s.MRsFailed),
		MRsRecovered: uint64(s.MRsRecovered + s.MRsRecycled + s.MRsOrphaned)}
}

// TestAttacks plays a server that reaches for memory it has no right to, on a device of the
// kernel's.
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

// dialAttacked connects a transport of ours.
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
		// siw, now and then: the connection manager's choice of a port was taken
		if try == 10 || !errors.Is(err, syscall.EADDRNOTAVAIL) {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
