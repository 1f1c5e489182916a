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
//	          fault (kill)                inner queues drained       made-up completions delivered
//	┌──────┐ ─────────────▶ ┌──────┐ ───────────────────────────▶ ─────────────────────────────────▶ OnDisconnect
//	│ open │                │ dead │
//	└──────┘ ─────────────▶ └──────┘ ──▶ inner Drain ──▶ killer done ──▶ what was put off delivered
//	          Drain, Close
type queuePair struct {
	p              *Provider
	inner          verbs.QP
	sendCQ, recvCQ *completionQueue
	onDisconnect   func(error)
	told           sync.Once
	late           timers
	attack         *attacker // nil when the plan has no attacks

	adjust struct { // what the inner counters lack, or have too much
		chains, sendWRs, sendComps, recvs atomic.Int64
	}

	mu     sync.Mutex
	dead   bool     // guarded by mu, as all below
	doomed []doomed // accepted, never posted
	// closed when doomed have completed; nil while no fault ended the connection
	killed chan struct{}
}

// A doomed request was accepted and will complete without the device having seen it.
type doomed struct {
	opcode verbs.Opcode
	status verbs.Status
	done   func(*verbs.WorkCompletion)
}

// newQP makes a queue pair whose inner one create makes.
func newQP(p *Provider, pd *protectionDomain, attr verbs.QPInitAttr,
	create func(verbs.QPInitAttr) (verbs.QP, error)) (*queuePair, error) {
	q := &queuePair{p: p, onDisconnect: attr.OnDisconnect}
	// What is not ours stays, for the inner provider to refuse.
	if cq, ok := attr.SendCQ.(*completionQueue); ok {
		q.sendCQ, attr.SendCQ = cq, cq.inner
	}
	if cq, ok := attr.RecvCQ.(*completionQueue); ok {
		q.recvCQ, attr.RecvCQ = cq, cq.inner
	}
	attr.OnDisconnect = q.disconnected
	if p.plan.attacks() && attr.MaxSendWR > 0 {
		attr.MaxSendWR += attackRoom
	}
	var err error
	if q.inner, err = create(attr); err != nil {
		return nil, err
	}
	if p.plan.attacks() {
		if q.attack, err = newAttacker(q, pd.inner); err != nil {
			// the inner one goes with its connection
			return nil, fmt.Errorf("faults: create QP: %w", err)
		}
	}
	return q, nil
}

// release frees what the queue pair has, once drained and its inner one closed.
func (q *queuePair) release() {
	if q.attack != nil {
		q.attack.release()
	}
}

// disconnected tells the consumer, once.
func (q *queuePair) disconnected(cause error) {
	q.mu.Lock()
	q.dead = true
	q.mu.Unlock()
	q.told.Do(func() {
		if q.onDisconnect != nil {
			q.onDisconnect(cause)
		}
	})
}

// kill ends the connection as a fault: the inner queue pair goes to the error state, the doomed
// complete behind all that the device had, and OnDisconnect is called. Caller holds mu, and q was
// not dead.
func (q *queuePair) kill(cause error) {
	q.dead = true
	q.killed = make(chan struct{})
	go func() {
		q.inner.Drain()
		q.mu.Lock()
		list := q.doomed
		q.doomed = nil
		q.mu.Unlock()
		for _, d := range list {
			q.adjust.sendComps.Add(1)
			q.sendCQ.deliver(q, d.done, &verbs.WorkCompletion{Opcode: d.opcode, Status: d.status})
		}
		close(q.killed)
		q.disconnected(cause)
	}()
}

// Drain waits for the inner queues, then for the completions of the decorator: what was delayed is
// delivered at once.
func (q *queuePair) Drain() {
	q.mu.Lock()
	q.dead = true
	killed := q.killed
	q.mu.Unlock()
	q.inner.Drain()
	if killed != nil {
		<-killed
	}
	q.late.flush()
}

// Stats are the inner counters with the decorator's requests taken out, and those that it made up
// put in.
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

// A cut is what a fault makes of a chain.
type cut struct {
	kind   kind
	event  uint64
	at     int          // requests before it are posted
	refuse error        // PostSend's error; nil: the rest is accepted and flushed
	status verbs.Status // of the first that is flushed
	kill   error        // cause of the connection's end, if it ends
}

// PostSend posts a copy of the chain, or what a fault leaves of it.
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
	defer q.mu.Unlock() // the inner PostSend never waits
	if q.dead {
		return first, verbs.ErrQPState
	}
	c, struck := q.decide(originals)
	if !struck {
		return q.postWhole(copies, originals)
	}
	if bad, err := q.postInner(copies[:c.at], originals); err != nil {
		return bad, err
	}
	q.p.count(c.kind, c.event)
	if c.kill != nil {
		defer q.kill(c.kill) // still under mu: deferred later than the unlock, run before it
	}
	if c.refuse != nil {
		return originals[c.at], c.refuse
	}
	return q.doom(originals[c.at:], c)
}

// postWhole posts a chain that no fault struck, and the attacks behind it. Caller holds mu.
func (q *queuePair) postWhole(copies []verbs.WorkRequest, originals []*verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if q.attack == nil {
		return q.postInner(copies, originals)
	}
	attacks := q.attack.plan(originals)
	bad, err := q.postInner(copies, originals)
	if err != nil {
		q.attack.drop(attacks)
		return bad, err
	}
	q.attack.launch(attacks)
	return nil, nil
}

// copySend makes to a copy of wr, alone, as the inner provider is to see it.
func (q *queuePair) copySend(to, wr *verbs.WorkRequest) {
	*to = *wr
	to.Next = nil
	if wr.MR != nil {
		to.MR = innerMR(wr.MR)
	}
	if done := wr.Done; done != nil {
		to.Done = func(wc *verbs.WorkCompletion) { q.sendCQ.deliver(q, done, wc) }
	}
}

// postInner posts the copies as one chain. Caller holds mu.
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

// doom accepts requests that will complete as c says. Caller holds mu.
func (q *queuePair) doom(wrs []*verbs.WorkRequest, c cut) (*verbs.WorkRequest, error) {
	if c.at == 0 && len(wrs) > 0 {
		q.adjust.chains.Add(1)
	}
	status := c.status
	for _, wr := range wrs {
		if wr.Done == nil {
			return wr, fmt.Errorf("faults: post %v: no completion handler: %w", wr.Opcode, verbs.ErrInvalid)
		}
		q.adjust.sendWRs.Add(1)
		q.doomed = append(q.doomed, doomed{opcode: wr.Opcode, status: status, done: wr.Done})
		status = verbs.StatusWRFlushErr
	}
	return nil, nil
}

// PostRecv posts copies that pass through the faults of incoming messages.
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

// A recvRequest is one Receive on its way.
type recvRequest struct {
	q        *queuePair
	wr       verbs.RecvRequest // the inner provider's
	next     *recvRequest      // of the chain; set before it is posted
	original *verbs.RecvRequest
	done     func(*verbs.WorkCompletion)
}

// complete is called with the inner completion.
func (r *recvRequest) complete(wc *verbs.WorkCompletion) {
	q, p := r.q, r.q.p
	if wc.Status != verbs.StatusSuccess {
		q.recvCQ.deliver(q, r.done, wc)
		return
	}
	if n, strikes := p.event(loseReply); strikes && r.lose(n) {
		return
	}
	cutCredits(p, r.wr.SGE.Buf[:wc.ByteLen])
	if n, strikes := p.event(delayReply); strikes {
		p.count(delayReply, n)
		kept := *wc
		q.late.after(p.plan.rules[delayReply].delay, func(bool) { q.recvCQ.deliver(q, r.done, &kept) })
		return
	}
	q.recvCQ.deliver(q, r.done, wc)
}

// lose swallows a message, and reports whether it could.
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
