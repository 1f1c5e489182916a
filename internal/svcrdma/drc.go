package svcrdma

import (
	"container/list"
	"context"
	"hash/maphash"
	"net/netip"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// drcPrefix is how many octets of a call its checksum covers; the length of the whole is compared too.
const drcPrefix = 256

// drcMaxReply is the largest reply that is kept. Replies of non-idempotent procedures are a few hundred octets (RFC 8267 §3).
const drcMaxReply = 4096

// drcKey tells calls apart. The client's port is not in it: a replay comes over a new connection.
type drcKey struct {
	addr             netip.Addr
	xid              uint32
	prog, vers, proc uint32
	sum              uint64
	length           int
}

// A drcEntry is one call: running until done is closed, answered after. reply is nil when the call came to no answer.
type drcEntry struct {
	key   drcKey
	done  chan struct{}
	reply []byte
	elem  *list.Element
}

// drc is the duplicate request cache: bounded, shared by all connections, least recently answered out first. A replayed
// call that is not idempotent is answered with the first reply, framed anew for its connection and chunks (RFC 8881 §2.9.2 on credits).
type drc struct {
	seed maphash.Seed
	max  int

	mu      sync.Mutex
	entries map[drcKey]*drcEntry // guarded by mu
	answers list.List            // guarded by mu; of *drcEntry, newest in front
}

func newDRC(max int) *drc {
	return &drc{seed: maphash.MakeSeed(), max: max, entries: make(map[drcKey]*drcEntry)}
}

// cacheable tells which calls must not run twice (RFC 1813 §4.6): those that change something.
func cacheable(c *sunrpc.CallHeader) bool {
	switch {
	case c.Prog == progNFS && c.Vers == versNFS3:
		switch c.Proc {
		case 2, 7, 8, 9, 10, 11, 12, 13, 14, 15: // SETATTR, WRITE, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK
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

func (d *drc) key(addr netip.Addr, c *sunrpc.CallHeader, msg []byte) drcKey {
	return drcKey{addr: addr, xid: c.XID, prog: c.Prog, vers: c.Vers, proc: c.Proc,
		sum: maphash.Bytes(d.seed, msg[:min(len(msg), drcPrefix)]), length: len(msg)}
}

// begin returns the cached reply, or the entry that the caller must run and then finish. It waits while the same
// call is running elsewhere, until ctx ends.
func (d *drc) begin(ctx context.Context, k drcKey) (reply []byte, run *drcEntry, err error) {
	for {
		d.mu.Lock()
		e := d.entries[k]
		if e == nil {
			e = &drcEntry{key: k, done: make(chan struct{})}
			d.entries[k] = e
			d.mu.Unlock()
			return nil, e, nil
		}
		if e.elem != nil {
			d.answers.MoveToFront(e.elem)
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

// finish ends a call that begin gave to the caller. A nil reply, or one too large to keep, leaves no trace.
func (d *drc) finish(e *drcEntry, reply []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer close(e.done)
	if reply == nil || len(reply) > drcMaxReply {
		delete(d.entries, e.key)
		return
	}
	e.reply = append([]byte(nil), reply...)
	e.elem = d.answers.PushFront(e)
	for d.answers.Len() > d.max {
		oldest := d.answers.Back()
		delete(d.entries, oldest.Value.(*drcEntry).key)
		d.answers.Remove(oldest)
	}
}
