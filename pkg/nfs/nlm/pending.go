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

// addPending registers a request for GRANTED. It precedes the call, because the callback may come
// before the reply.
func (c *Client) addPending(f *file, o *owner, l *Lock) *pending {
	p := &pending{fh: f.fh, excl: l.Exclusive, wake: make(chan struct{}, 1),
		region: nlmwire.Region{OH: o.oh, SVID: o.svid}}
	p.region.SetRange(l.Start, l.End)
	c.mu.Lock()
	c.mu.pending[p] = struct{}{}
	c.mu.Unlock()
	return p
}

func (c *Client) removePending(p *pending) {
	c.mu.Lock()
	delete(c.mu.pending, p)
	c.mu.Unlock()
}

func (p *pending) poke() {
	select {
	case p.wake <- struct{}{}:
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
	mine := func(svid uint32, oh []byte) bool { return svid == a.Region.SVID && bytes.Equal(oh, a.Region.OH) }
	c.mu.Lock()
	for p := range c.mu.pending {
		pStart, pEnd := p.region.Range()
		if p.fh == fh && p.excl == a.Exclusive && mine(p.region.SVID, p.region.OH) && pStart == start && pEnd == end {
			p.poke()
			c.mu.Unlock()
			c.called.Store(true)
			return nlmwire.Granted
		}
	}
	var id Owner
	var o *owner
	for candidate, known := range c.mu.owners {
		if mine(known.svid, known.oh) {
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
