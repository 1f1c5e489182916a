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

// Limits of the duplicate request cache in addition to Config.CachedReplies.
const (
	// drcMaxReply is the maximum size of a cached reply in bytes. Replies of non-idempotent
	// procedures have a few hundred bytes (RFC 8267 §3).
	drcMaxReply = 1024
	// drcMaxAge limits the age of a cached reply. It exceeds the time a client needs to reconnect.
	// A client that restarts with the same XIDs must not get replies from before the restart.
	drcMaxAge = 10 * time.Minute
)

// drcKey identifies a call. It excludes the port of the client, because a retransmission uses a new
// connection. The checksum covers the complete call with data and credential, so a different call
// with the same XID has a different key.
type drcKey struct {
	addr   netip.Addr
	xid    uint32
	sum    uint64
	length int
}

// A drcEntry is one call. The call is in progress until done is closed.
type drcEntry struct {
	key       drcKey
	done      chan struct{}
	reply     []byte
	repliedAt time.Time
	elem      *list.Element // in drc.replied; nil while the call is in progress
	own       *list.Element // in the list of the client
}

// drc is the duplicate request cache of all connections. A retransmitted non-idempotent call gets
// the first reply again, with a new transport header for the connection and chunks (RFC 8881 §2.9.2
// on credits).
//
// The cache limits number, size and age of replies, and evicts the least recently used reply. One
// client address can use at most half of the cache, so it cannot evict all replies of others.
type drc struct {
	seed   maphash.Seed
	max    int
	maxOwn int
	maxAge time.Duration

	mu struct { // guards its fields
		sync.Mutex
		entries map[drcKey]*drcEntry
		replied list.List                 // of *drcEntry, most recently used first
		own     map[netip.Addr]*list.List // replied by client; no list is empty
	}
}

func newDRC(size int) *drc {
	d := &drc{seed: maphash.MakeSeed(), max: size, maxOwn: max(1, size/2), maxAge: drcMaxAge}
	d.mu.entries, d.mu.own = make(map[drcKey]*drcEntry), make(map[netip.Addr]*list.List)
	return d
}

// cacheable reports whether a call must not run twice because it changes something (RFC 1813 §4.6).
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

// begin returns the cached reply, or an entry for a call that the caller must execute and finish.
// It waits while the same call is in progress on another connection, until ctx ends.
func (d *drc) begin(ctx context.Context, k drcKey) (reply []byte, run *drcEntry, err error) {
	for {
		d.mu.Lock()
		e := d.mu.entries[k]
		if e != nil && e.elem != nil && time.Since(e.repliedAt) > d.maxAge {
			d.remove(e)
			e = nil
		}
		if e == nil {
			e = &drcEntry{key: k, done: make(chan struct{})}
			d.mu.entries[k] = e
			d.mu.Unlock()
			return nil, e, nil
		}
		if e.elem != nil {
			d.mu.replied.MoveToFront(e.elem)
			d.mu.own[k.addr].MoveToFront(e.own)
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

// finish ends a call for which begin returned an entry. It does not cache a nil reply or a reply of
// more than drcMaxReply bytes.
func (d *drc) finish(e *drcEntry, reply []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer close(e.done)
	if reply == nil || len(reply) > drcMaxReply {
		delete(d.mu.entries, e.key)
		return
	}
	e.reply, e.repliedAt = append([]byte(nil), reply...), time.Now()
	e.elem = d.mu.replied.PushFront(e)
	own := d.mu.own[e.key.addr]
	if own == nil {
		own = list.New()
		d.mu.own[e.key.addr] = own
	}
	e.own = own.PushFront(e)
	if own.Len() > d.maxOwn {
		d.remove(own.Back().Value.(*drcEntry))
	}
	if d.mu.replied.Len() > d.max {
		d.remove(d.mu.replied.Back().Value.(*drcEntry))
	}
}

// remove removes the entry of a completed call. The caller holds mu.
func (d *drc) remove(e *drcEntry) {
	delete(d.mu.entries, e.key)
	d.mu.replied.Remove(e.elem)
	own := d.mu.own[e.key.addr]
	own.Remove(e.own)
	if own.Len() == 0 {
		delete(d.mu.own, e.key.addr)
	}
}
