package xprt

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A boundedQueue is a send queue of a device: requests stand on it in order until they are executed
// and a completion at or behind them has been seen.
type boundedQueue struct {
	t    *testing.T
	size int

	mu      sync.Mutex
	entries []queued
	most    int
}

type queued struct{ done func() } // nil: unsignaled

func (q *boundedQueue) post(n int, done func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range n - 1 {
		q.entries = append(q.entries, queued{})
	}
	q.entries = append(q.entries, queued{done})
	q.most = max(q.most, len(q.entries))
	if len(q.entries) > q.size {
		q.t.Errorf("%d requests on a queue of %d", len(q.entries), q.size)
	}
}

// complete delivers the first completion on the queue, which frees the places up to it.
func (q *boundedQueue) complete() bool {
	q.mu.Lock()
	for i, e := range q.entries {
		if e.done != nil {
			q.entries = q.entries[i+1:]
			q.mu.Unlock()
			e.done()
			return true
		}
	}
	q.mu.Unlock()
	return false
}

// TestSendQueueNeverOverflows drives the accounting from many goroutines against a queue of the
// same size, as small as it may be and with completions as late as they may be: it never overflows,
// and everybody gets through.
func TestSendQueueNeverOverflows(t *testing.T) {
	const perRPC, callers, rounds = 7, 16, 3000
	for _, size := range []int{2 * perRPC, 3*perRPC + 1, 20 * perRPC} {
		q := &boundedQueue{t: t, size: size}
		var sq sendQueue
		sq.init(size, 3)
		stop := make(chan struct{})
		var device, all sync.WaitGroup
		device.Go(func() {
			for {
				if q.complete() {
					continue
				}
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Microsecond):
				}
			}
		})
		waits := 0
		var mu sync.Mutex
		for c := range callers {
			rng := rand.New(rand.NewPCG(1, uint64(c)))
			all.Go(func() {
				for range rounds {
					for !sq.take(perRPC) {
						room := sq.full()
						if sq.take(perRPC) {
							break
						}
						mu.Lock()
						waits++
						mu.Unlock()
						<-room
					}
					regs := rng.IntN(4)
					sq.giveBack(perRPC - 2*regs - 1)
					mark := sq.mark(regs + 1)
					sent := make(chan struct{})
					if sq.signalNow(regs + 1) {
						q.post(regs+1, func() { sq.retire(mark); close(sent) })
					} else {
						q.post(regs+1, nil)
						close(sent)
					}
					sq.posted.Add(int64(regs + 1))
					invs := rng.IntN(regs + 1) // the rest was invalidated by the server
					sq.giveBack(regs - invs)
					fenced := make(chan struct{})
					if invs > 0 {
						mark := sq.mark(invs)
						q.post(invs, func() { sq.retire(mark); close(fenced) })
						sq.posted.Add(int64(invs))
					} else {
						close(fenced)
					}
					<-fenced
					<-sent
				}
			})
		}
		all.Wait()
		close(stop)
		device.Wait()
		if left := sq.taken.Load() - sq.retired.Load(); left < int64(len(q.entries)) || left > int64(size) {
			t.Errorf("size %d: %d places are accounted for, %d requests stand", size, left, len(q.entries))
		}
		if size == 2*perRPC && waits == 0 {
			t.Error("nobody ever waited")
		}
		t.Logf("size %d: at most %d requests at a time, %d waits", size, q.most, waits)
	}
}

// TestFullSendQueueMakesCallsWait gives a connection a send queue for little more than one RPC
// (docs/features.md S8, empty_sendctx).
func TestFullSendQueueMakesCallsWait(t *testing.T) {
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), nil)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // the connection is up
		t.Fatal(err)
	}
	tr.conn.Load().sq.size = int64(tr.conn.Load().params.WRsPerRPC) + 3
	fh, ctx := testFH(t), testContext(t)
	c := nfs3.NewClient(tr, nfs3.Options{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			buf := make([]byte, 9000)
			var r nfs3.ReadResult
			for range 50 {
				if err := c.Read(ctx, noCred, fh, 3, buf, &r); err != nil || !bytes.Equal(buf, fill(3, len(buf))) {
					t.Error("read:", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if s := tr.Stats(); s.EmptySendCtx == 0 || s.Connects != 1 {
		t.Errorf("%d waits for the send queue, %d connects", s.EmptySendCtx, s.Connects)
	}
}

// slowSends is a provider whose Sends complete later than they are executed.
type slowSends struct {
	verbs.Provider
	after time.Duration
}

type slowID struct {
	verbs.ActiveID
	after time.Duration
}

type slowQP struct {
	verbs.QP
	after time.Duration
	late  sync.WaitGroup
}

func (p *slowSends) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	return &slowID{id, p.after}, err
}

func (i *slowID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	qp, err := i.ActiveID.CreateQP(pd, attr)
	return &slowQP{QP: qp, after: i.after}, err
}

func (q *slowQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	var head, last *verbs.WorkRequest
	for wr := first; wr != nil; wr = wr.Next {
		c := *wr
		c.Next = nil
		done, send := wr.Done, wr.Opcode == verbs.OpSend
		c.Done = func(wc *verbs.WorkCompletion) {
			w := *wc
			w.QP = q
			if !send || wc.Status != verbs.StatusSuccess {
				done(&w)
				return
			}
			q.late.Go(func() {
				time.Sleep(q.after)
				done(&w)
			})
		}
		if head == nil {
			head = &c
		} else {
			last.Next = &c
		}
		last = &c
	}
	return q.QP.PostSend(head)
}

func (q *slowQP) Drain() {
	q.QP.Drain()
	q.late.Wait()
}

// TestReplyWaitsForSend sends data straight from the caller's memory: the call does not end before
// the Send has let go of it, though the reply is there (docs/features.md S8, reply_waits_for_send).
func TestReplyWaitsForSend(t *testing.T) {
	const after = 30 * time.Millisecond
	addr := serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true, InlineBytes: 65536})
	for _, slow := range []bool{false, true} {
		tr := dial(t, addr, func(c *Config) {
			c.InlineBytes = 65536
			if slow {
				c.Provider = &slowSends{c.Provider, after}
			}
		})
		c := nfs3.NewClient(tr, nfs3.Options{})
		for _, n := range []int{4097, 5000, 30001, 60000} {
			before := tr.Stats()
			began := time.Now()
			var r nfs3.WriteResult
			if err := c.Write(testContext(t), noCred, testFH(t), 7, fill(7, n), nfs3.FileSync, &r); err != nil {
				t.Fatal(err)
			}
			s := tr.Stats()
			if s.PullupCopyBytes != before.PullupCopyBytes || s.ReadChunks != before.ReadChunks {
				t.Errorf("%d octets were copied or sent as a chunk", n)
			}
			if s.SendCompletions == before.SendCompletions {
				t.Errorf("the Send of %d octets was not signaled", n)
			}
			if slow && (time.Since(began) < after || s.ReplyWaitsForSend == before.ReplyWaitsForSend) {
				t.Errorf("the write of %d octets did not wait for its Send", n)
			}
		}
	}
}
