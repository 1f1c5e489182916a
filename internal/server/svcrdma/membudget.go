package svcrdma

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
)

// A memBudget limits the message buffers of all connections. A client address gets more buffers
// only while it has no more than are left for others, so clients that do not answer RDMA Reads, or
// do not accept replies, leave memory to others.
//
// A connection keeps its unused buffers, because a new buffer costs a system call and page faults.
// When a call waits for memory, every connection frees its unused buffers.
//
// A call takes all its buffers in one step and holds none while it waits, so calls cannot deadlock.
// Config.TransferTimeout and Config.CallTimeout limit how long a call holds its buffers.
type memBudget struct {
	room    *fair.Pool // one unit per buffer
	waiters atomic.Int32

	mu struct { // guards its fields; not taken while conn.messages is locked
		sync.Mutex
		conns  map[*conn]struct{}
		shares map[netip.Addr]*memShare
	}
}

// A memShare counts the message buffers of one client address.
type memShare struct {
	user  fair.User
	conns int // guarded by memBudget.mu
}

func newMemBudget(buffers int) *memBudget {
	m := &memBudget{room: fair.NewPool(int64(buffers))}
	m.mu.conns, m.mu.shares = make(map[*conn]struct{}), make(map[netip.Addr]*memShare)
	return m
}

// join adds a connection whose unused buffers reclaim frees. leave removes the connection.
func (m *memBudget) join(c *conn) {
	m.mu.Lock()
	m.mu.conns[c] = struct{}{}
	if c.share = m.mu.shares[c.addr]; c.share == nil {
		c.share = new(memShare)
		m.mu.shares[c.addr] = c.share
	}
	c.share.conns++
	m.mu.Unlock()
}

func (m *memBudget) leave(c *conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.mu.conns[c]; !ok {
		return
	}
	delete(m.mu.conns, c)
	if c.share.conns--; c.share.conns == 0 {
		delete(m.mu.shares, c.addr)
	}
}

// take waits for memory for n buffers of c. The caller holds no buffer.
func (m *memBudget) take(ctx context.Context, c *conn, n int) error {
	if m.room.TryTake(&c.share.user, int64(n)) {
		return nil
	}
	// The count must increase before the reclaim. A buffer that is returned later is then freed by
	// putBufs, and a buffer that was returned before is freed by reclaim.
	m.waiters.Add(1)
	defer m.waiters.Add(-1)
	m.reclaim()
	return m.room.Take(ctx, &c.share.user, int64(n))
}

func (m *memBudget) give(c *conn, n int) {
	if n > 0 {
		m.room.Give(&c.share.user, int64(n))
	}
}

// short reports whether a call waits for memory.
func (m *memBudget) short() bool { return m.waiters.Load() > 0 }

// reclaim frees the unused buffers of every connection.
func (m *memBudget) reclaim() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.mu.conns {
		c.freeUnused()
	}
}
