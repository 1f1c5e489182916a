package svcrdma

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// A memBudget limits the message buffers of all connections. A connection keeps its unused buffers,
// because a new buffer costs a system call and page faults. When a call waits for memory, every
// connection frees its unused buffers.
//
// A call takes all its buffers in one step and holds none while it waits, so calls cannot deadlock.
// Config.TransferTimeout and Config.CallTimeout limit how long a call holds its buffers.
type memBudget struct {
	room    *semaphore.Weighted // one unit per buffer
	waiters atomic.Int32

	mu    sync.Mutex // guards conns; not taken while conn.messages is locked
	conns map[*conn]struct{}
}

func newMemBudget(buffers int) *memBudget {
	return &memBudget{room: semaphore.NewWeighted(int64(buffers)), conns: make(map[*conn]struct{})}
}

// join adds a connection whose unused buffers reclaim frees. leave removes the connection.
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

// take waits for memory for n buffers. The caller holds no buffer.
func (m *memBudget) take(ctx context.Context, n int) error {
	if m.room.TryAcquire(int64(n)) {
		return nil
	}
	// The count must increase before the reclaim. A buffer that is returned later is then freed by
	// putBufs, and a buffer that was returned before is freed by reclaim.
	m.waiters.Add(1)
	defer m.waiters.Add(-1)
	m.reclaim()
	return m.room.Acquire(ctx, int64(n))
}

func (m *memBudget) give(n int) { m.room.Release(int64(n)) }

// short reports whether a call waits for memory.
func (m *memBudget) short() bool { return m.waiters.Load() > 0 }

// reclaim frees the unused buffers of every connection.
func (m *memBudget) reclaim() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.conns {
		c.freeUnused()
	}
}
