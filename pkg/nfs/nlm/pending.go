package nlm

import (
	"bytes"
	"context"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
)

// grantedTimeout bounds the reply to a GRANTED call.
const grantedTimeout = 5 * time.Second

// setPending registers a request for GRANTED, or removes it. This precedes the call, because the
// callback may come before the reply.
func (c *Client) setPending(req *request, waits bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if waits {
		c.mu.pending[req] = struct{}{}
	} else {
		delete(c.mu.pending, req)
	}
}

// poke makes a pending request ask the server again.
func (req *request) poke() {
	select {
	case req.called <- struct{}{}:
	default:
	}
}

// granted handles a GRANTED call of the server. It wakes the request that the call names, which
// then asks the server again. A forged call changes no lock. The result tells the server whether
// this client has or wants the lock.
func (c *Client) granted(a *nlmwire.Args) nlmwire.Stat {
	fh, err := nfs3.NewFH(a.Region.FH)
	if err != nil {
		return nlmwire.Denied
	}
	start, end := a.Region.Range()
	mine := func(o *owner) bool { return o.svid == a.Region.SVID && bytes.Equal(o.oh, a.Region.OH) }
	c.mu.Lock()
	for req := range c.mu.pending {
		l := &req.l
		if req.f.fh == fh && mine(req.o) && l.Exclusive == a.Exclusive && l.Start == start && l.End == end {
			req.poke()
			c.mu.Unlock()
			c.called.Store(true)
			return nlmwire.Granted
		}
	}
	var id Owner
	var o *owner
	for candidate, known := range c.mu.owners {
		if mine(known) {
			id, o = candidate, known
		}
	}
	f := c.mu.files[fh]
	if f == nil || o == nil {
		c.mu.Unlock()
		return nlmwire.Denied
	}
	f.users++
	o.users++
	c.mu.Unlock()
	defer c.putFile(f)
	defer c.putOwner(id)
	// A poll may have taken the lock before the callback came.
	ctx, cancel := context.WithTimeout(c.ctx, grantedTimeout)
	defer cancel()
	if f.acquire(ctx) != nil {
		return nlmwire.DeniedGracePeriod // the server calls again
	}
	defer f.release()
	if !f.locks.Has(id) {
		return nlmwire.Denied
	}
	c.called.Store(true)
	l := Lock{Start: start, End: end, Exclusive: a.Exclusive, Owner: id}
	if f.locks.Holds(&l) {
		return nlmwire.Granted
	}
	// The owner has unlocked a part after the lock was granted. If the client refused the callback,
	// the server would also release the other parts.
	cred := f.creds[id]
	if c.restore(ctx, f, o, cred, &l, func(part Lock) error {
		_, err := c.callLock(ctx, f, o, cred, &part, false, false)
		return err
	}) != nil {
		return nlmwire.DeniedGracePeriod
	}
	return nlmwire.Granted
}
