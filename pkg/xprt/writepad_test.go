package xprt

import (
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestPadOutlivesItsRegistration ends a connection with a write pad. The memory of the pad must be
// freed only after its MR is destroyed.
func TestPadOutlivesItsRegistration(t *testing.T) {
	var buffers atomic.Int64 // when the first MR is destroyed
	p := hooked(&hookedProvider{dereg: func() { buffers.CompareAndSwap(0, selfcheck.Count(selfcheck.Buffer)) }})
	tr := dial(t, startServerProcess(t), func(c *Config) { c.WritePad, c.Provider = true, p })
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	connected := selfcheck.Count(selfcheck.Buffer)
	tr.conn.Load().fail(errIdle)
	kit.Eventually(t, "deregistration of the pad", func() bool { return buffers.Load() != 0 })
	if n := buffers.Load(); n < connected {
		t.Errorf("buffers when the MR is destroyed: got %d, want at least %d", n, connected)
	}
}

// TestWritePadIsOfferedForOddLengths reads different lengths with and without the option writepad.
// The call must offer the pad only with the option, and only if the length is no multiple of 4. The
// server must be permitted to write it (docs/features.md S20).
func TestWritePadIsOfferedForOddLengths(t *testing.T) {
	for _, option := range []bool{false, true} {
		var pad verbs.Access
		var segments atomic.Int64
		hooks := svcrdma.Hooks{Reply: func(h *rpcrdma.Header) svcrdma.Verdict {
			segments.Store(int64(len(h.Writes[0])))
			return svcrdma.Send
		}}
		tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}), func(c *Config) {
			c.WritePad = option
			c.Provider = hooked(&hookedProvider{open: func() qpHooks {
				return qpHooks{post: func(first *verbs.WorkRequest, _ int) (int, error) {
					if first.Opcode == verbs.OpFastReg && len(first.Segs[0]) == 4 {
						pad = first.Access
					}
					return 0, nil
				}}
			}})
		})
		for _, n := range []int{40000, 40001, 40002, 40003, 40004} {
			var r nfs3.ReadResult
			if err := nfs3.NewClient(tr).Read(testContext(t), noCred, testFH(t), 0, make([]byte, n),
				&r); err != nil {
				t.Fatal(err)
			}
			want := int64(1)
			if option && n%4 != 0 {
				want = 2
			}
			if got := segments.Load(); got != want {
				t.Errorf("write pad %v, READ of %d bytes: got %d segments, want %d", option, n, got, want)
			}
		}
		tr.Close()
		if writable := pad&verbs.AccessRemoteWrite != 0; writable != option {
			t.Errorf("write pad %v: got a pad that the server may write %v, want %v", option, writable, option)
		}
	}
}
