package base

import (
	"fmt"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// CQEntries records how many entries of one completion queue are reserved for work queues, and
// whether the queue is closed. A completion queue cannot overflow because every QP reserves an
// entry for each request that it can hold. CQEntries is safe for concurrent use.
type CQEntries struct {
	provider  string // named in errors
	depth     int
	maxQueues int // 0: no limit

	mu       sync.Mutex
	reserved int  // guarded by mu, as all below
	queues   int  // work queues with a reservation
	closed   bool // no reservation is possible any more
}

// NewCQEntries makes the accounts of a completion queue of depth entries that serves at most
// maxQueues work queues; 0 means no limit.
func NewCQEntries(provider string, depth, maxQueues int) *CQEntries {
	return &CQEntries{provider: provider, depth: depth, maxQueues: maxQueues}
}

// reserve sets n entries aside for one work queue.
func (c *CQEntries) reserve(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return fmt.Errorf("%s: reserve %d entries of a completion queue: it is closed: %w", c.provider, n,
			verbs.ErrInvalid)
	case c.reserved+n > c.depth:
		return fmt.Errorf("%s: reserve %d entries of a completion queue of depth %d: only %d are free: %w; "+
			"create a deeper completion queue", c.provider, n, c.depth, c.depth-c.reserved, verbs.ErrNoResources)
	case c.maxQueues > 0 && c.queues >= c.maxQueues:
		return fmt.Errorf("%s: reserve %d entries of a completion queue: it already serves %d work queues: %w",
			c.provider, n, c.queues, verbs.ErrNoResources)
	}
	c.reserved += n
	c.queues++
	return nil
}

func (c *CQEntries) unreserve(n int) {
	c.mu.Lock()
	c.reserved -= n
	c.queues--
	c.mu.Unlock()
}

// Close marks the completion queue as closed, and reports whether this is the first call that did.
// Close fails with verbs.ErrBusy while a work queue uses the completion queue.
func (c *CQEntries) Close() (first bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.queues > 0 {
		return false, fmt.Errorf("%s: close completion queue: %d work queues use it: %w", c.provider, c.queues,
			verbs.ErrBusy)
	}
	first = !c.closed
	c.closed = true
	return first, nil
}

// Closed reports whether Close has succeeded.
func (c *CQEntries) Closed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}
