package softiwarp

import (
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestOnWriteFollowsTheSocket checks when OnWrite is called: not before the Send may go to the
// socket, not for a Send that was taken back, and before PostSend returns if the poster writes the
// Send.
func TestOnWriteFollowsTheSocket(t *testing.T) {
	p, v := connectRaw(t, defaultConfig) // sends nothing before an FPDU of the peer
	var written [3]atomic.Int64
	post := func(i int) *verbs.WorkRequest {
		wr := &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: []byte("message")}},
			Done: func(*verbs.WorkCompletion) {}, OnWrite: func() { written[i].Add(1) }}
		if _, err := v.qp.PostSend(wr); err != nil {
			t.Fatal(err)
		}
		return wr
	}
	want := func(when string, counts ...int64) {
		t.Helper()
		for i, n := range counts {
			if got := written[i].Load(); got != n {
				t.Errorf("%s: calls of OnWrite of Send %d: got %d, want %d", when, i, got, n)
			}
		}
	}
	post(0)
	if !v.qp.Withdraw(post(1)) {
		t.Fatal("Withdraw failed")
	}
	want("before the first FPDU of the peer", 0, 0)
	p.send(zeroWrite())
	p.mustNext()
	v.writerIdle()
	want("after the first FPDU of the peer", 1, 0)
	post(2)
	want("after the post of a small Send", 1, 0, 1)
	// The poster executes a registration, and the writer then sends something else.
	reg := newCall(v, make([]byte, 100), nil).reg
	reg.Next = nil
	if _, err := v.qp.PostSend(&reg); err != nil {
		t.Fatal(err)
	}
	v.writerIdle()
	v.qp.mu.Lock()
	v.qp.tx.claim()
	v.qp.mu.Unlock()
	v.qp.tx.attempt()
	want("at the write of a Read Response", 1, 0, 1)
}
