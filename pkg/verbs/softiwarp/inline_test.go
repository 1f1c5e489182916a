package softiwarp

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// writerIdle waits until the writer has no work.
func (v *endpoint) writerIdle() {
	v.t.Helper()
	eventually(v.t, "the writer is idle", func() bool {
		v.qp.mu.Lock()
		defer v.qp.mu.Unlock()
		return v.qp.mu.txOpen && !v.qp.mu.txBusy && v.qp.mu.sq.sent == v.qp.mu.sq.Tail
	})
}

// TestPosterSendsSmallRequests checks that a small chain is sent when PostSend returns, and that
// PostSend leaves a large request to the writer.
func TestPosterSendsSmallRequests(t *testing.T) {
	for _, crc := range []bool{false, true} {
		p, v := connectRaw(t, Config{CRC: crc})
		p.send(zeroWrite())
		v.writerIdle()
		done := func(*verbs.WorkCompletion) {}
		send := &verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true, Done: done,
			SGList: []verbs.SGE{{Buf: make([]byte, 100)}}}
		write := &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Done: done,
			SGList: []verbs.SGE{{Buf: make([]byte, 1000)}}, Next: send}
		v.qp.mu.Lock()
		from := v.qp.mu.sq.sent
		v.qp.mu.Unlock()
		if _, err := v.qp.PostSend(write); err != nil {
			t.Fatal(err)
		}
		v.qp.mu.Lock()
		sent := v.qp.mu.sq.sent - from
		v.qp.mu.Unlock()
		if sent != 2 {
			t.Errorf("CRC %v: requests sent when PostSend returns: got %d, want 2", crc, sent)
		}
		for _, want := range []uint8{opWrite, opSend} {
			if h, _ := p.mustNext(); h.op != want {
				t.Errorf("CRC %v: got opcode %d, want %d", crc, h.op, want)
			}
		}
	}
	_, v := connectRaw(t, defaultConfig)
	if v.qp.tx.fitsWhole(&sqe{op: verbs.OpRDMAWrite, length: inlineBytes + 1}) {
		t.Errorf("a request of %d bytes is sent by its poster", inlineBytes+1)
	}
}

// TestFullSocketStopsPoster posts small requests to a peer that does not read. PostSend returns,
// and the writer sends what the posters left when the peer reads again.
func TestFullSocketStopsPoster(t *testing.T) {
	const size = 4000
	for _, crc := range []bool{false, true} {
		cfg := smallBuffers
		cfg.CRC, cfg.MaxFPDU = crc, 1500
		p, v := connectRaw(t, cfg)
		p.send(zeroWrite())
		v.writerIdle()
		done := make(chan verbs.Status, 10000)
		posted := 0
		full := func() bool { // the send queue is full of requests that wait for the socket
			v.qp.mu.Lock()
			defer v.qp.mu.Unlock()
			return v.qp.mu.txBusy && v.qp.mu.sq.Len() == v.qp.attr.MaxSendWR
		}
		eventually(t, "the socket is full", func() bool {
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
				t.Fatalf("CRC %v: got opcode %d at offset %d, want an RDMA Write at %d with the posted data", crc, h.op,
					h.to, at)
			}
			at += uint64(len(b))
		}
		for range posted {
			if st := <-done; st != verbs.StatusSuccess {
				t.Errorf("CRC %v: RDMA Write: got %v, want success", crc, st)
			}
		}
	}
}

// TestPostersShareSendQueue posts from several goroutines. Each message must be whole, and the
// Sends must have consecutive MSNs.
func TestPostersShareSendQueue(t *testing.T) {
	const posters, each = 4, 200
	p, v := connectRaw(t, Config{MaxFPDU: 300})
	p.send(zeroWrite())
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range posters {
		wg.Go(func() {
			b := bytes.Repeat([]byte{byte(i)}, 700)
			for range each {
				wr := &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: b}},
					Done: func(*verbs.WorkCompletion) {}}
				for {
					_, err := v.qp.PostSend(wr)
					if err == nil {
						break
					}
					if !errors.Is(err, verbs.ErrQueueFull) {
						t.Errorf("post: %v", err)
						return
					}
					runtime.Gosched()
				}
			}
		})
	}
	for msn := uint32(1); msn <= posters*each; msn++ {
		var msg []byte
		for last := false; !last; {
			h, b := p.mustNext()
			if h.msn != msn || h.mo != uint32(len(msg)) {
				t.Fatalf("got MSN %d offset %d, want MSN %d offset %d", h.msn, h.mo, msn, len(msg))
			}
			msg, last = append(msg, b...), h.last
		}
		if len(msg) != 700 || !bytes.Equal(msg, bytes.Repeat(msg[:1], 700)) {
			t.Fatalf("message %d: got %d bytes of different posters", msn, len(msg))
		}
	}
}

// TestInlineHandlers checks on which goroutine the handler of a Receive runs.
func TestInlineHandlers(t *testing.T) {
	for _, inline := range []bool{false, true} {
		p, v := connectRaw(t, defaultConfig)
		v.qp.attr.InlineHandlers = inline // the reader has not received anything yet
		stacks := make(chan string, 1)
		v.qp.rq.Lock()
		v.qp.rq.At(v.qp.rq.Head).done = func(*verbs.WorkCompletion) {
			b := make([]byte, 64<<10)
			stacks <- string(b[:runtime.Stack(b, false)])
		}
		v.qp.rq.Unlock()
		p.send(untagged(opSend, true, 0, qnSend, 1, 0, []byte("x")))
		if s := <-stacks; strings.Contains(s, "(*receiver).run(") != inline {
			t.Errorf("InlineHandlers %v: the handler ran on\n%s", inline, s)
		}
	}
}

// TestReaderLeavesLongQueue checks that a reader does not serve a completion queue for ever, and
// that the dispatcher continues.
func TestReaderLeavesLongQueue(t *testing.T) {
	const n = runBatches*dispatchBatch + 5
	synctest.Test(t, func(t *testing.T) {
		c := newCQ(nil, n)
		synctest.Wait() // the dispatcher waits for a completion
		q := &qp{}
		var onReader, total int // the handlers run one after the other
		all := make(chan struct{})
		for range n {
			q.inflight.Add(1)
			c.push(q, true, func(*verbs.WorkCompletion) {
				b := make([]byte, 64<<10)
				if !strings.Contains(string(b[:runtime.Stack(b, false)]), "(*completionQueue).dispatch(") {
					onReader++
				}
				if total++; total == n {
					close(all)
				}
			}, &verbs.WorkCompletion{})
		}
		c.run()
		<-all
		q.inflight.Wait()
		if want := runBatches * dispatchBatch; onReader != want {
			t.Errorf("handlers on the reader: got %d of %d, want %d", onReader, n, want)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
}
