package softiwarp

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
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

// A completionQueue is a bounded ring and the goroutine that calls handlers. The ring cannot
// overflow: creating a QP reserves entries for both its queues, and a slot of a queue
// becomes free only after the dispatcher took the completion.
type completionQueue struct {
	dev     *device
	depth   int
	entries *base.CQEntries
	done    chan struct{} // closed when the dispatcher has ended

	mu      sync.Mutex
	work    sync.Cond
	ring    []cqe // guarded by mu, as all below
	head, n int
	closing bool // the dispatcher ends when the ring is empty

	batch [dispatchBatch]cqe // used only by the dispatcher
}

func newCQ(dev *device, depth int) *completionQueue {
	c := &completionQueue{dev: dev, depth: depth, entries: base.NewCQEntries(Name, depth, 0),
		done: make(chan struct{}), ring: make([]cqe, depth)}
	c.work.L = &c.mu
	leakcheck.Track(leakcheck.CQ, 1)
	go c.dispatch()
	return c
}

// push queues a completion. The caller may hold QP locks, because the dispatcher takes none of them
// while it holds mu.
func (c *completionQueue) push(q *qp, recv bool, done func(*verbs.WorkCompletion), wc *verbs.WorkCompletion) {
	c.mu.Lock()
	i := c.head + c.n
	if i >= c.depth {
		i -= c.depth
	}
	e := &c.ring[i]
	e.wc, e.done, e.qp, e.recv = *wc, done, q, recv
	c.n++
	c.mu.Unlock()
	c.work.Signal()
}

func (c *completionQueue) dispatch() {
	defer close(c.done)
	for {
		n := c.take()
		if n == 0 {
			return
		}
		for i := range c.batch[:n] {
			e := &c.batch[i]
			e.qp.releaseSlot(e.recv)
			e.done(&e.wc)
			e.qp.inflight.Done()
			*e = cqe{}
		}
	}
}

// take waits for completions, moves up to dispatchBatch of them to batch, and returns how many. 0
// means that the queue is closed.
func (c *completionQueue) take() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.n == 0 {
		if c.closing {
			return 0
		}
		c.work.Wait()
	}
	n := min(c.n, dispatchBatch)
	for i := range n {
		e := &c.ring[c.head]
		c.batch[i] = *e
		*e = cqe{}
		if c.head++; c.head == c.depth {
			c.head = 0
		}
	}
	c.n -= n
	return n
}

// Close stops the dispatcher and waits for its end. Close must not be called from a handler.
func (c *completionQueue) Close() error {
	first, err := c.entries.Close()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()
	c.work.Signal()
	<-c.done
	if first {
		leakcheck.Track(leakcheck.CQ, -1)
	}
	return nil
}
