package svcrdma

import (
	"container/list"
	"context"
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Bounds of the duplicate request cache, beside Config.CachedReplies.
const (
	// drcMaxReply is the largest reply in octets that is kept. Replies of non-idempotent procedures
	// are a few hundred (RFC 8267 §3).
	drcMaxReply = 4096
	// drcMaxAge is how long a reply is kept: longer than any client takes to connect again, short
	// enough that one that begins with the same XIDs after a restart is not answered out of its
	// former life.
	drcMaxAge = 10 * time.Minute
)

// drcKey tells calls apart. The client's port is not in it: a replay comes over a new connection.
// The checksum covers the whole call, data and credential included, so that no call is ever
// answered for one that says something else.
type drcKey struct {
	addr   netip.Addr
	xid    uint32
	sum    uint64
	length int
}

// A drcEntry is one call: running until done is closed, answered after. reply is nil when the call
// came to no answer.
type drcEntry struct {
	key   drcKey
	done  chan struct{}
	reply []byte
	at    time.Time     // when it was answered
	elem  *list.Element // in drc.answers
	own   *list.Element // in the client's own list
}

// drc is the duplicate request cache, shared by all connections: bounded by number, size and age,
// least recently answered out first. One client address fills at most half of it, so that it cannot
// push out what the others may still ask for. A replayed call that is not idempotent is answered
// with the first reply, framed anew for its connection and chunks (RFC 8881 §2.9.2 on credits).
type drc struct {
	seed   maphash.Seed
	max    int
	maxOwn int
	maxAge time.Duration

	mu      sync.Mutex
	entries map[drcKey]*drcEntry      // guarded by mu
	answers list.List                 // guarded by mu; of *drcEntry, newest in front
	own     map[netip.Addr]*list.List // guarded by mu; the same by client, none empty
}

func newDRC(size int) *drc {
	return &drc{seed: maphash.MakeSeed(), max: size, maxOwn: max(1, size/2), maxAge: drcMaxAge,
		entries: make(map[drcKey]*drcEntry), own: make(map[netip.Addr]*list.List)}
}

// cacheable tells which calls must not run twice (RFC 1813 §4.6): those that change something.
func cacheable(c *sunrpc.CallHeader) bool {
	switch {
	case c.Prog == progNFS && c.Vers == versNFS3:
		switch c.Proc {
		// SETATTR, WRITE, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK
		case 2, 7, 8, 9, 10, 11, 12, 13, 14, 15:
			return true
		}
	case c.Prog == progMount:
		switch c.Proc {
		case 1, 3, 4: // MNT, UMNT, UMNTALL
			return true
		}
	}
	return false
}

func (d *drc) key(addr netip.Addr, xid uint32, msg []byte) drcKey {
	return drcKey{addr: addr, xid: xid, sum: maphash.Bytes(d.seed, msg), length: len(msg)}
}

// begin returns the cached reply, or the entry that the caller must run and then finish. It waits
// while the same call is running elsewhere, until ctx ends.
func (d *drc) begin(ctx context.Context, k drcKey) (reply []byte, run *drcEntry, err error) {
	for {
		d.mu.Lock()
		e := d.entries[k]
		if e != nil && e.elem != nil && time.Since(e.at) > d.maxAge {
			d.remove(e)
			e = nil
		}
		if e == nil {
			e = &drcEntry{key: k, done: make(chan struct{})}
			d.entries[k] = e
			d.mu.Unlock()
			return nil, e, nil
		}
		if e.elem != nil {
			d.answers.MoveToFront(e.elem)
			d.own[k.addr].MoveToFront(e.own)
			d.mu.Unlock()
			return e.reply, nil, nil
		}
		d.mu.Unlock()
		select {
		case <-e.done:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// finish ends a call that begin gave to the caller. A nil reply, or one too large to keep, leaves
// no trace.
func (d *drc) finish(e *drcEntry, reply []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer close(e.done)
	if reply == nil || len(reply) > drcMaxReply {
		delete(d.entries, e.key)
		return
	}
	e.reply, e.at = append([]byte(nil), reply...), time.Now()
	e.elem = d.answers.PushFront(e)
	own := d.own[e.key.addr]
	if own == nil {
		own = list.New()
		d.own[e.key.addr] = own
	}
	e.own = own.PushFront(e)
	if own.Len() > d.maxOwn {
		d.remove(own.Back().Value.(*drcEntry))
	}
	if d.answers.Len() > d.max {
		d.remove(d.answers.Back().Value.(*drcEntry))
	}
}

// remove drops an answered entry. Caller holds mu.
func (d *drc) remove(e *drcEntry) {
	delete(d.entries, e.key)
	d.answers.Remove(e.elem)
	own := d.own[e.key.addr]
	own.Remove(e.own)
	if own.Len() == 0 {
		delete(d.own, e.key.addr)
	}
}
