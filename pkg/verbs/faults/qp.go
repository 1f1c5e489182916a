package faults

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A queuePair is a decorated QP.
//
//	         fault               inner queues     unposted requests
//	┌──────┐ ──────────▶ ┌─────┐ drained ───────▶ completed ────────▶ OnDisconnect
//	│ open │             │ended│
//	└──────┘ ──────────▶ └─────┘ inner Drain ───▶ unposted requests ▶ delayed messages
//	         Drain, Close                         completed           delivered
type queuePair struct {
	p              *Provider
	inner          verbs.QP
	sendCQ, recvCQ *completionQueue
	onDisconnect   func(error)
	notifyOnce     sync.Once
	delayed        timers
	attack         *attackInjector // nil when the plan has no attacks

	adjust struct { // difference from the inner counters
		chains, sendWRs, sendComps, recvs atomic.Int64
	}

	mu       sync.Mutex
	ended    bool              // guarded by mu, as the fields below
	unposted []unpostedRequest // accepted by PostSend but not posted to the device
	// flushed is closed when the unposted requests have completed. flushed is nil unless a fault
	// ended the connection.
	flushed chan struct{}
}

// An unpostedRequest was accepted by PostSend and completes without reaching the device.
type unpostedRequest struct {
	opcode verbs.Opcode
	status verbs.Status
	done   func(*verbs.WorkCompletion)
}

// newQP creates a queue pair. create creates the inner queue pair.
func newQP(p *Provider, pd *protectionDomain, attr verbs.QPInitAttr,
	create func(verbs.QPInitAttr) (verbs.QP, error)) (*queuePair, error) {
	q := &queuePair{p: p, onDisconnect: attr.OnDisconnect}
	// The inner provider refuses completion queues of other providers.
	if cq, ok := attr.SendCQ.(*completionQueue); ok {
		q.sendCQ, attr.SendCQ = cq, cq.inner
	}
	if cq, ok := attr.RecvCQ.(*completionQueue); ok {
		q.recvCQ, attr.RecvCQ = cq, cq.inner
	}
	attr.OnDisconnect = q.disconnected
	if p.plan.attacks() && attr.MaxSendWR > 0 {
		attr.MaxSendWR += maxAttacks
	}
	var err error
	if q.inner, err = create(attr); err != nil {
		return nil, err
	}
	if p.plan.attacks() {
		a, err := NewAttacker(pd.inner)
		if err != nil {
			// Closing the connection also closes the inner queue pair.
			return nil, fmt.Errorf("faults: create QP: %w", err)
		}
		q.attack = &attackInjector{Attacker: a, q: q}
	}
	return q, nil
}

// release frees the queue pair's memory. Call it after Drain and the inner Close.
func (q *queuePair) release() {
	if q.attack == nil {
		return
	}
	if err := q.attack.Close(); err != nil {
		q.p.log.Error("deregister memory of fault injector", "error", err)
	}
}

// disconnected calls the consumer's OnDisconnect once.
func (q *queuePair) disconnected(cause error) {
	q.mu.Lock()
	q.ended = true
	q.mu.Unlock()
	q.notifyOnce.Do(func() {
		if q.onDisconnect != nil {
			q.onDisconnect(cause)
		}
	})
}

// disconnect ends the connection by a fault. The inner queue pair enters the error state, and its
// requests complete. Then the unposted requests complete, and OnDisconnect is called. The caller
// holds mu, and q must not have ended.
func (q *queuePair) disconnect(cause error) {
	q.ended = true
	q.flushed = make(chan struct{})
	go func() {
		q.inner.Drain()
		q.mu.Lock()
		list := q.unposted
		q.unposted = nil
		q.mu.Unlock()
		for _, d := range list {
			q.adjust.sendComps.Add(1)
			q.sendCQ.deliver(q, d.done, &verbs.WorkCompletion{Opcode: d.opcode, Status: d.status})
		}
		close(q.flushed)
		q.disconnected(cause)
	}()
}

// Drain waits for the completions of the inner queues and of the decorator. Drain delivers delayed
// messages at once.
func (q *queuePair) Drain() {
	q.mu.Lock()
	q.ended = true
	flushed := q.flushed
	q.mu.Unlock()
	q.inner.Drain()
	if flushed != nil {
		<-flushed
	}
	q.delayed.flush()
}

// Stats returns the inner counters without the attacks and with the unposted requests.
func (q *queuePair) Stats() verbs.QPStats {
	s := q.inner.Stats()
	a := &q.adjust
	s.PostedChains += uint64(a.chains.Load())
	s.PostedSendWRs += uint64(a.sendWRs.Load())
	s.SendCompletions += uint64(a.sendComps.Load())
	s.PostedRecvWRs += uint64(a.recvs.Load())
	s.RecvCompletions += uint64(a.recvs.Load())
	return s
}

// An injection is the effect of a fault on a chain.
type injection struct {
	kind  kind
	event uint64
	at    int // number of requests that are posted
	// PostSend's error; if nil, the remaining requests are accepted and flushed
	postErr    error
	status     verbs.Status // status of the first remaining request
	disconnect error        // cause of the disconnect; nil if the connection does not end
}

// PostSend posts a copy of the chain, or the part of it that a fault leaves.
func (q *queuePair) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	n := 0
	for wr := first; wr != nil; wr = wr.Next {
		n++
	}
	copies, originals := make([]verbs.WorkRequest, n), make([]*verbs.WorkRequest, n)
	for i, wr := 0, first; wr != nil; i, wr = i+1, wr.Next {
		originals[i] = wr
		q.copySend(&copies[i], wr)
	}
	q.mu.Lock()
	defer q.mu.Unlock() // the inner PostSend does not block
	if q.ended {
		return first, verbs.ErrQPState
	}
	c, fired := q.decide(originals)
	if !fired {
		return q.postWhole(copies, originals)
	}
	if bad, err := q.postInner(copies[:c.at], originals); err != nil {
		return bad, err
	}
	q.p.count(c.kind, c.event)
	if c.disconnect != nil {
		defer q.disconnect(c.disconnect) // runs before the deferred unlock
	}
	if c.postErr != nil {
		return originals[c.at], c.postErr
	}
	return q.acceptUnposted(originals[c.at:], c)
}

// postWhole posts a chain without a fault, and its attacks. The caller holds mu.
func (q *queuePair) postWhole(copies []verbs.WorkRequest, originals []*verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if q.attack == nil {
		return q.postInner(copies, originals)
	}
	attacks := q.attack.plan(originals)
	bad, err := q.postInner(copies, originals)
	if err != nil {
		for _, at := range attacks {
			at.Drop()
		}
		return bad, err
	}
	q.attack.launch(attacks)
	return nil, nil
}

// copySend sets dst to a copy of wr for the inner provider, without Next.
func (q *queuePair) copySend(dst, wr *verbs.WorkRequest) {
	*dst = *wr
	dst.Next = nil
	if wr.MR != nil {
		dst.MR = innerMR(wr.MR)
	}
	if done := wr.Done; done != nil {
		dst.Done = func(wc *verbs.WorkCompletion) { q.sendCQ.deliver(q, done, wc) }
	}
}

// postInner posts the copies as one chain. The caller holds mu.
func (q *queuePair) postInner(copies []verbs.WorkRequest, originals []*verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if len(copies) == 0 {
		return nil, nil
	}
	for i := range len(copies) - 1 {
		copies[i].Next = &copies[i+1]
	}
	bad, err := q.inner.PostSend(&copies[0])
	for i := range copies {
		if bad == &copies[i] {
			return originals[i], err
		}
	}
	return nil, err
}

// acceptUnposted accepts requests that complete as c says. The caller holds mu.
func (q *queuePair) acceptUnposted(wrs []*verbs.WorkRequest, c injection) (*verbs.WorkRequest, error) {
	if c.at == 0 && len(wrs) > 0 {
		q.adjust.chains.Add(1)
	}
	status := c.status
	for _, wr := range wrs {
		if wr.Done == nil {
			return wr, fmt.Errorf("faults: post %v: completion handler is missing: %w", wr.Opcode, verbs.ErrInvalid)
		}
		q.adjust.sendWRs.Add(1)
		q.unposted = append(q.unposted, unpostedRequest{opcode: wr.Opcode, status: status, done: wr.Done})
		status = verbs.StatusWRFlushErr
	}
	return nil, nil
}

// PostRecv posts copies whose completions pass through the faults for received messages.
func (q *queuePair) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	var head, tail *recvRequest
	for rr := first; rr != nil; rr = rr.Next {
		r := &recvRequest{q: q, original: rr, done: rr.Done}
		r.wr.SGE = rr.SGE
		if rr.Done != nil {
			r.wr.Done = r.complete
		}
		if head == nil {
			head = r
		} else {
			tail.wr.Next, tail.next = &r.wr, r
		}
		tail = r
	}
	if head == nil {
		return nil, nil
	}
	bad, err := q.inner.PostRecv(&head.wr)
	if err == nil {
		return nil, nil
	}
	for r := head; r != nil; r = r.next {
		if bad == &r.wr {
			return r.original, err
		}
	}
	return nil, err
}

// A recvRequest is one posted Receive.
type recvRequest struct {
	q        *queuePair
	wr       verbs.RecvRequest // for the inner provider
	next     *recvRequest      // in the chain; set before the post
	original *verbs.RecvRequest
	done     func(*verbs.WorkCompletion)
}

// complete handles the inner completion.
func (r *recvRequest) complete(wc *verbs.WorkCompletion) {
	q, p := r.q, r.q.p
	if wc.Status != verbs.StatusSuccess {
		q.recvCQ.deliver(q, r.done, wc)
		return
	}
	if n, fires := p.event(loseReply); fires && r.lose(n) {
		return
	}
	limitCredits(p, r.wr.SGE.Buf[:wc.ByteLen])
	if n, fires := p.event(delayReply); fires {
		p.count(delayReply, n)
		delayed := *wc
		q.delayed.after(p.plan.rules[delayReply].delay, func(bool) { q.recvCQ.deliver(q, r.done, &delayed) })
		return
	}
	q.recvCQ.deliver(q, r.done, wc)
}

// lose drops a message and posts its Receive again. lose reports whether that was possible.
func (r *recvRequest) lose(event uint64) bool {
	q := r.q
	r.wr.Next = nil
	_, err := q.inner.PostRecv(&r.wr)
	switch {
	case err == nil:
		q.adjust.recvs.Add(-1)
	case errors.Is(err, verbs.ErrQPState): // the Receive is flushed like the others
		q.recvCQ.deliver(q, r.done, &verbs.WorkCompletion{Status: verbs.StatusWRFlushErr, Opcode: verbs.OpRecv})
	default:
		return false
	}
	q.p.count(loseReply, event)
	return true
}
