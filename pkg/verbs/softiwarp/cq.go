package softiwarp

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// A cqe is one completion on its way to its handler.
type cqe struct {
	wc   verbs.WorkCompletion
	done func(*verbs.WorkCompletion)
	qp   *qp
	recv bool
}

// dispatchBatch is how many completions the dispatcher takes at once.
const dispatchBatch = 16

// runBatches is how many batches run takes before it leaves the rest to the dispatcher, so that
// the goroutine of one connection does not serve a shared queue for ever.
const runBatches = 4

// A completionQueue is a bounded ring. One goroutine at a time takes completions from the ring and
// calls their handlers: the reader of a connection that has pushed one (run), or the dispatcher.
// The ring cannot overflow: creating a QP reserves entries for both its queues, and a slot of a
// queue becomes free only after its completion was taken.
type completionQueue struct {
	dev     *device
	depth   int
	entries *base.CQEntries
	done    chan struct{} // closed when the dispatcher has ended

	work sync.Cond // with mu
	mu   struct {  // guards its fields
		sync.Mutex
		ring    []cqe
		head, n int
		busy    bool // a goroutine calls handlers
		closing bool // the dispatcher ends when the ring is empty
	}

	batch [dispatchBatch]cqe // used only by the goroutine that calls handlers
}

func newCQ(dev *device, depth int) *completionQueue {
	c := &completionQueue{dev: dev, depth: depth, entries: base.NewCQEntries(Name, depth, 0),
		done: make(chan struct{})}
	c.mu.ring = make([]cqe, depth)
	c.work.L = &c.mu
	selfcheck.Track(selfcheck.CQ, 1)
	go c.dispatch()
	return c
}

// push queues a completion. The caller may hold QP locks, because no QP lock is taken while mu is
// held. After push the caller releases its locks and calls wake or run.
func (c *completionQueue) push(q *qp, recv bool, done func(*verbs.WorkCompletion), wc *verbs.WorkCompletion) {
	c.mu.Lock()
	i := c.mu.head + c.mu.n
	if i >= c.depth {
		i -= c.depth
	}
	e := &c.mu.ring[i]
	e.wc, e.done, e.qp, e.recv = *wc, done, q, recv
	c.mu.n++
	c.mu.Unlock()
}

// wake makes the dispatcher call the handlers of queued completions, unless another goroutine is
// calling handlers: that one takes them too.
func (c *completionQueue) wake() {
	c.mu.Lock()
	idle := c.mu.n > 0 && !c.mu.busy
	c.mu.Unlock()
	if idle {
		c.work.Signal()
	}
}

// run calls the handlers of queued completions on the goroutine of the caller, which saves a
// switch to the dispatcher. run returns at once when another goroutine is calling handlers. The
// caller holds no lock.
func (c *completionQueue) run() {
	c.mu.Lock()
	if c.mu.busy {
		c.mu.Unlock()
		return
	}
	c.mu.busy = true
	for range runBatches {
		if c.mu.n == 0 {
			break
		}
		c.callHandlers()
	}
	c.mu.busy = false
	more := c.mu.n > 0
	c.mu.Unlock()
	if more {
		c.work.Signal()
	}
}

// dispatch is the dispatcher goroutine.
func (c *completionQueue) dispatch() {
	defer close(c.done)
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for c.mu.busy || c.mu.n == 0 {
			if c.mu.closing {
				return
			}
			c.work.Wait()
		}
		c.mu.busy = true
		for c.mu.n > 0 {
			c.callHandlers()
		}
		c.mu.busy = false
	}
}

// callHandlers takes up to dispatchBatch completions and calls their handlers. The caller holds mu
// and has set busy. callHandlers releases mu while it calls the handlers.
func (c *completionQueue) callHandlers() {
	n := c.take()
	c.mu.Unlock()
	for i := range c.batch[:n] {
		e := &c.batch[i]
		e.qp.releaseSlot(e.recv)
		e.done(&e.wc)
		e.qp.inflight.Done()
		*e = cqe{}
	}
	c.mu.Lock()
}

// take moves up to dispatchBatch completions to batch and returns how many. The caller holds mu.
func (c *completionQueue) take() int {
	n := min(c.mu.n, dispatchBatch)
	for i := range n {
		e := &c.mu.ring[c.mu.head]
		c.batch[i] = *e
		*e = cqe{}
		if c.mu.head++; c.mu.head == c.depth {
			c.mu.head = 0
		}
	}
	c.mu.n -= n
	return n
}

// Close stops the dispatcher and waits for its end. Close must not be called from a handler. No QP
// uses the queue any more, so no reader calls handlers.
func (c *completionQueue) Close() error {
	first, err := c.entries.Close()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.mu.closing = true
	c.mu.Unlock()
	c.work.Signal()
	<-c.done
	if first {
		selfcheck.Track(selfcheck.CQ, -1)
	}
	return nil
}
