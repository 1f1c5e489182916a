package xprt

import (
	"bytes"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestSlotsFitTheMRsOfTheDevice runs the calls that need most MRs in all slots of a device with few
// MRs, with a write pad. Every call must find its MRs at once.
func TestSlotsFitTheMRsOfTheDevice(t *testing.T) {
	const payload = 1<<20 + 15<<10
	for _, c := range []struct{ depth, perCall, limit, slots int }{
		{64, 10, 1 + 5*10, 5},
		{64, 10, 5 * 10, 4}, // the write pad needs one MR
		{257, 4, 1 + 5*4, 5},
	} {
		inBubble(t, func(cfg *Config, _ *stepServer) {
			dev := cfg.Provider.(*stepDevice)
			dev.maxMR, dev.attrs = c.limit, func(a *verbs.DeviceAttrs) {
				a.MaxFastRegPageListLen, a.MaxMR = c.depth, c.limit
				a.Caps &^= verbs.CapGaps
			}
			cfg.WritePad, cfg.Slots = true, 32
		}, func(t *testing.T, b *bubble) {
			b.handleWith(drop)
			for range 8 {
				b.start(echo(1, make([]byte, payload), payload))
			}
			s := b.tr.Stats()
			used := uint64(1 + c.slots*c.perCall)
			if len(b.calls) != c.slots || s.MapErrors != 0 ||
				s.FailedMarshal != 0 || s.MRsTotal != used {
				t.Errorf("depth %d, limit %d: got %d calls at the server, %d map errors, %d failed marshals, %d MRs; "+
					"want %d, 0, 0, %d", c.depth, c.limit, len(b.calls), s.MapErrors, s.FailedMarshal, s.MRsTotal,
					c.slots, used)
			}
		})
	}
}

// TestFailedUnmapEndsConnection has a device that cannot unregister the memory of a call that was
// not sent. The call must not return, and its buffers must not be used again, before the connection
// is taken down. Then the call is sent again, or returns the error that prevented it.
func TestFailedUnmapEndsConnection(t *testing.T) {
	const payload = 1 << 20
	for _, c := range []struct {
		name string
		call *sunrpc.Message
		// noMR makes the second allocation fail.
		noMR bool
		long int64 // buffers for long messages that the call uses
		want error
	}{
		{"no memory: the call is sent again", echo(1, fill(0, payload), payload), true, 2, nil},
		{"final error", &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 1, Cred: noCred, ArgData: fill(0, payload),
			MaxResult: payload}, false, 1, memreg.ErrForeignMemory},
	} {
		t.Run(c.name, func(t *testing.T) {
			var broken, drained atomic.Bool
			var long atomic.Int64 // buffers for long messages in use when the connection is taken down
			var tr *Transport
			p := hooked(&hookedProvider{
				attrs: func(a *verbs.DeviceAttrs) {
					a.Caps |= verbs.CapPerIOReg
					a.Caps &^= verbs.CapGaps | verbs.CapRegisterAny
				},
				alloc: func() error {
					if c.noMR && broken.Load() && tr.Stats().MRsTotal > 0 {
						return syscall.ENOMEM
					}
					return nil
				},
				unregister: func() error {
					if broken.Load() {
						return syscall.EBUSY
					}
					return nil
				},
				open: func() qpHooks {
					return qpHooks{drain: func() {
						if broken.CompareAndSwap(true, false) {
							long.Store(int64(tr.long.Out()))
							drained.Store(true)
						}
					}}
				},
			})
			tr = dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(cfg *Config) { cfg.Provider = p })
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Fatal(err)
			}
			broken.Store(true)
			err := tr.Call(testContext(t), c.call)
			if !errors.Is(err, c.want) || c.want == nil && !bytes.Equal(c.call.Result, fill(0, payload)) {
				t.Errorf("Call: got %v and %d bytes, want %v", err, len(c.call.Result), c.want)
			}
			if !drained.Load() || long.Load() != c.long {
				t.Fatalf("when the call returns: connection taken down: %v, with %d buffers in use; want true, %d",
					drained.Load(), long.Load(), c.long)
			}
			const reason = "release memory: unregister MR 1: device or resource busy"
			kit.Eventually(t, "next connection", func() bool { return tr.Stats().Connects == 2 })
			if s := tr.Stats(); s.LastError != reason {
				t.Errorf("last error of the connection: got %q, want %q", s.LastError, reason)
			}
			if n := tr.long.Out(); n != 0 {
				t.Errorf("buffers for long messages in use: got %d, want 0", n)
			}
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Error(err)
			}
		})
	}
}
