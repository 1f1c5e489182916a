package softiwarp

import (
	"bytes"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// writerIdle waits until the writer has no work.
func (v *endpoint) writerIdle() {
	v.t.Helper()
	kit.Eventually(v.t, "the writer is idle", func() bool {
		v.qp.mu.Lock()
		defer v.qp.mu.Unlock()
		return v.qp.mu.txOpen && !v.qp.mu.txBusy && v.qp.mu.sq.sent == v.qp.mu.sq.Tail
	})
}

// TestFullSocketStopsPoster posts small requests to a peer that does not read. PostSend returns,
// and the writer sends what the posters left when the peer reads again.
func TestFullSocketStopsPoster(t *testing.T) {
	const size = 4000
	p, v := connectRaw(t, Config{SocketBuffer: 16 << 10, MaxFPDU: 1500, CRC: true})
	p.send(zeroWrite())
	v.writerIdle()
	done := make(chan verbs.Status, 10000)
	posted := 0
	full := func() bool { // the send queue is full of requests that wait for the socket
		v.qp.mu.Lock()
		defer v.qp.mu.Unlock()
		return v.qp.mu.txBusy && v.qp.mu.sq.Len() == v.qp.attr.MaxSendWR
	}
	kit.Eventually(t, "the socket is full", func() bool {
		for {
			b := bytes.Repeat([]byte{byte(posted)}, size)
			_, err := v.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, RKey: 1,
				RemoteAddr: uint64(posted) * size, SGList: []verbs.SGE{{Buf: b}},
				Done: func(wc *verbs.WorkCompletion) { done <- wc.Status }})
			if err != nil {
				return full()
			}
			posted++
		}
	})
	for at := uint64(0); at < uint64(posted)*size; {
		h, b := p.mustNext()
		if h.op != opWrite || h.to != at || !bytes.Equal(b, bytes.Repeat([]byte{byte(at / size)}, len(b))) {
			t.Fatalf("got opcode %d at offset %d, want an RDMA Write at %d with the posted data", h.op, h.to, at)
		}
		at += uint64(len(b))
	}
	for range posted {
		if st := <-done; st != verbs.StatusSuccess {
			t.Errorf("RDMA Write: got %v, want success", st)
		}
	}
}

// TestOnWriteFollowsTheSocket checks when OnWrite is called: not before the Send may go to the
// socket, not for a Send that was taken back, and before PostSend returns if the poster writes the
// Send.
func TestOnWriteFollowsTheSocket(t *testing.T) {
	p, v := connectRaw(t, defaultConfig) // sends nothing before an FPDU of the peer
	var written [3]atomic.Int64
	post := func(i int) *verbs.WorkRequest {
		wr := &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: []byte("message")}},
			Done: func(*verbs.WorkCompletion) {}, OnWrite: func() { written[i].Add(1) }}
		_, err := v.qp.PostSend(wr)
		kit.Must(t, err)
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
}
