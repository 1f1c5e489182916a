package svcrdma

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// A memBudget bounds the message buffers of all connections together. A connection keeps the
// buffers that it has done with, because making them costs a system call and page faults, until
// somebody has to wait for memory: then every connection gives back what it does not use.
//
// A call takes all that it needs in one step and waits for memory while it holds none, so that
// calls cannot wait for each other; each holder has a time limit (Config.TransferTimeout,
// Config.CallTimeout).
type memBudget struct {
	room    *semaphore.Weighted // one unit for each buffer that may be made
	waiters atomic.Int32

	mu    sync.Mutex
	conns map[*conn]struct{} // guarded by mu; never locked inside conn.mu
}

func newMemBudget(buffers int) *memBudget {
	return &memBudget{room: semaphore.NewWeighted(int64(buffers)), conns: make(map[*conn]struct{})}
}

// join makes c known as a keeper of unused buffers, leave ends that.
func (m *memBudget) join(c *conn) {
	m.mu.Lock()
	m.conns[c] = struct{}{}
	m.mu.Unlock()
}

func (m *memBudget) leave(c *conn) {
	m.mu.Lock()
	delete(m.conns, c)
	m.mu.Unlock()
}

// take waits until n buffers may be made. The caller holds none.
func (m *memBudget) take(ctx context.Context, n int) error {
	if m.room.TryAcquire(int64(n)) {
		return nil
	}
	// First the count, then the reclaim: a buffer is either put back after the count was seen, or
	// found by the reclaim.
	m.waiters.Add(1)
	defer m.waiters.Add(-1)
	m.reclaim()
	return m.room.Acquire(ctx, int64(n))
}

func (m *memBudget) give(n int) { m.room.Release(int64(n)) }

// short tells whether somebody waits for memory.
func (m *memBudget) short() bool { return m.waiters.Load() > 0 }

// reclaim has every connection give up its unused buffers.
func (m *memBudget) reclaim() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		c.freeUnused()
	}
}
