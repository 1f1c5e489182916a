package faults

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A completionQueue runs handlers one at a time, on the inner queue's goroutine or on the
// decorator's.
type completionQueue struct {
	inner verbs.CQ

	mu sync.Mutex           // held while a handler runs
	wc verbs.WorkCompletion // argument of the handler; guarded by mu
}

func (c *completionQueue) Close() error { return c.inner.Close() }

// deliver calls the handler of a request of q.
func (c *completionQueue) deliver(q *queuePair, done func(*verbs.WorkCompletion), wc *verbs.WorkCompletion) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wc = *wc
	c.wc.QP = q
	done(&c.wc)
}
