package nlm

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// An interrupted is a file about which an earlier process had requests without results. Its turn is
// taken until they are settled.
type interrupted struct {
	f        *file
	requests []*request
}

// restoreState restores what an earlier process recorded. It precedes all requests.
func (c *Client) restoreState() {
	if c.cfg.State == nil {
		c.cfg.State = c.cfg.Service.newState()
	}
	s := c.cfg.State
	if s == nil {
		return
	}
	r, err := newClient(c.instance, c.cfg.Caller)
	if err == nil {
		r, err = s.identity(r)
	}
	if err != nil {
		c.log.Error("locks fail with ENOLCK: cannot record the identity of this client", "error", err)
		return
	}
	c.instance, c.cfg.Caller = r.instance, text(r.caller[:])
	s.copy = c.cfg.Service.claimOwners(&c.cfg, r)
	kept, invalid, err := s.load()
	if err != nil || invalid > 0 {
		c.log.Error("some locks are not restored: records are not valid", "server", c.cfg.Host, "records", invalid,
			"error", err)
	}
	for _, k := range kept {
		c.restoreHolder(k)
	}
	if len(kept) > 0 {
		c.link.expect()
		c.restored = true
		c.restoring.Add(1)
		c.log.Info("locks restored", "server", c.cfg.Host, "locks", c.Counters.Held.Load(),
			"lost", c.Counters.Lost.Load(), "files_with_requests", len(c.interrupted))
	}
}

// restoreHolder restores the locks and the requests of one owner of a file.
func (c *Client) restoreHolder(k *keptHolder) {
	id, svid, cred := k.key.id, k.h.rec.svid, bytes.Clone(k.h.rec.credential())
	if c.mu.owners[id] == nil {
		c.mu.svids[svid] = struct{}{}
		c.mu.owners[id] = c.newOwner(svid)
	}
	o, f := c.getOwner(id), c.getFile(k.key.fh)
	defer c.putOwner(id)
	defer c.putFile(f)
	_ = c.change(f, &tableChange{id: id, end: maxOffset, cred: cred, all: true, do: func() {
		for _, r := range k.rows {
			switch l := r.rec.lock(id); r.rec.kind {
			case rangeHeld:
				f.lost.Clear(id, l.Start, l.End)
				f.locks.Set(l)
			case rangeLost:
				f.locks.Clear(id, l.Start, l.End)
				f.lost.Set(l)
			case rangeUnlock: // the program asked for it
				f.locks.Clear(id, l.Start, l.End)
				f.lost.Clear(id, l.Start, l.End)
			}
		}
	}})
	if f.has(id) {
		f.creds[id] = cred
	}
	for _, l := range slices.Concat(f.locks.Owned(id, 0, maxOffset), f.lost.Owned(id, 0, maxOffset)) {
		c.kept[openKey{f.fh, l.Open}] = struct{}{}
	}
	if f.lost.Has(id) {
		c.Counters.Lost.Add(uint64(len(f.lost.Owned(id, 0, maxOffset))))
	}
	for _, r := range k.rows {
		if r.rec.kind.intent() {
			c.getOwner(id)
			x := c.interrupt(f)
			x.requests = append(x.requests, &request{f: x.f, o: o, cred: cred, l: r.rec.lock(id),
				wait: r.rec.wait == 1, in: &intent{key: k.key, h: k.h, row: r}})
		}
	}
}

// interrupt takes the turn of a file until its requests are settled.
func (c *Client) interrupt(f *file) *interrupted {
	x := c.interrupted[f]
	if x == nil {
		x = &interrupted{f: c.getFile(f.fh)}
		_ = f.acquire(context.Background()) // it is free before the first request
		c.interrupted[f] = x
	}
	return x
}

// finishRestore reclaims the restored locks as after a lost connection, and then settles the
// requests of the earlier process.
func (c *Client) finishRestore() {
	if !c.restored {
		return
	}
	c.reclaimAll(restart{reason: "restart of this daemon"}, c.interrupted)
	for _, x := range c.interrupted {
		c.restoring.Add(1)
		c.work.Go(func() {
			defer c.restoring.Done()
			c.settleKept(x)
		})
	}
	c.interrupted = nil
	c.restoring.Done()
}

// settleKept makes the state of the server that of the tables for requests of an earlier process.
func (c *Client) settleKept(x *interrupted) {
	defer c.putFile(x.f)
	defer x.f.release()
	for _, req := range x.requests {
		if !c.settleNow(req) {
			c.settleLater(req, c.times.settle)
		}
		c.putOwner(req.l.Owner)
	}
}

// parts divides a lock at the ends of the interrupted requests of its owner: the server may have
// another lock there, and another client may have got a part.
func (x *interrupted) parts(l Lock) []Lock {
	parts := []Lock{l}
	if x == nil {
		return parts
	}
	for _, r := range x.requests {
		if r.l.Owner != l.Owner {
			continue
		}
		var next []Lock
		for _, part := range parts {
			for _, from := range []uint64{r.l.Start, r.l.End + 1} {
				if part.Start < from && from <= part.End {
					left := part
					left.End, part.Start = from-1, from
					next = append(next, left)
				}
			}
			next = append(next, part)
		}
		parts = next
	}
	return parts
}

// ReleaseStale releases, in the background, the restored locks of open files for which isOpen
// returns false, lost ones too. Call ReleaseStale once, after all open files are known and before
// new requests. It calls isOpen before it returns.
func (c *Client) ReleaseStale(isOpen func(fh nfs3.FH, open uint64) bool) {
	kept := c.kept
	c.kept = nil
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for key := range kept {
		if !isOpen(key.fh, key.open) {
			_ = c.ReleaseOpen(ended, key.fh, key.open)
		}
	}
}

// Detach ends the client without a call to the server and without a change of its State, as the end
// of the process would. Calls in progress return EINTR. The next client with the State has the
// locks. Detach replaces Close. Afterwards the file of the State may be closed.
func (c *Client) Detach() {
	if c.isClosed() {
		return
	}
	c.cfg.State.end()
	c.end(func(s *Service, c *Client) { s.leave(c) })
}

// begin records a request that is about to be sent. The error is ENOLCK when there is no room for
// the record, or EINTR after Detach.
func (c *Client) begin(f *file, o *owner, cred []byte, l *Lock, kind rangeKind, wait bool) (*intent, error) {
	rec := newRange(kind, l)
	rec.wait = asByte(wait)
	in, err := c.cfg.State.begin(keyOf(f, l.Owner), o, cred, rec)
	return in, c.recordError(err)
}

// recordError converts an error of the State, which it logs once.
func (c *Client) recordError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errStateEnded):
		return syscall.EINTR
	}
	if !c.stateLogged.Swap(true) {
		c.log.Error("some locks fail with ENOLCK: cannot record them for a restart of this daemon", "error", err)
	}
	return syscall.ENOLCK
}

// unlockIntent records an UNLOCK. Without room for the record, UNLOCK is sent nevertheless if it
// only removes records: an earlier lock is better restored than kept forever.
func (c *Client) unlockIntent(f *file, o *owner, cred []byte, l *Lock) (*intent, error) {
	in, err := c.begin(f, o, cred, l, rangeUnlock, false)
	splits := f.locks.Splits(l.Owner, l.Start, l.End) || f.lost.Splits(l.Owner, l.Start, l.End)
	if err == syscall.ENOLCK && !splits {
		return nil, nil
	}
	return in, err
}
