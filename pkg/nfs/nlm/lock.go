package nlm

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Lock sets a lock for its owner. Conflicts with locks of this mount are decided without the
// server. With wait set, Lock waits until the lock is free or ctx ends; otherwise it returns
// EAGAIN. During the grace period of the server it waits in both cases, as Linux's client does.
//
// Other errors: EINTR when ctx ends, EDEADLK, ENOLCK when the server has no lock service or no
// resources or when the user of cred has its share of the locks or of the requests that wait, EIO
// while the owner has a lost lock of the file, and on a soft mount GiveUpErr when the server does
// not reply in time.
func (c *Client) Lock(ctx context.Context, cred []byte, fh nfs3.FH, l Lock, wait bool) error {
	o, f := c.getOwner(l.Owner), c.getFile(fh)
	defer c.putOwner(l.Owner)
	defer c.putFile(f)
	req := &request{f: f, o: o, cred: cred, l: l, wait: wait, waiter: newWaiter(&l)}
	if wait {
		req.called = make(chan struct{}, 1)
		c.setPending(req, true)
		defer c.setPending(req, false)
	}
	err := c.lockLoop(ctx, req)
	f.waiters.leave(req.waiter, err == nil)
	if err != nil && req.sent {
		c.settle(req)
	}
	return err
}

// A request is one call of Lock.
type request struct {
	f      *file
	o      *owner
	cred   []byte
	l      Lock
	wait   bool
	called chan struct{} // with wait: GRANTED came; capacity 1
	waiter *waiter
	in     *intent
	// sent means that the server may have the lock or a blocked request for it although Lock did
	// not get it
	sent bool
	// afterPoll and afterCall say what preceded the present attempt
	afterPoll, afterCall bool
}

func (c *Client) lockLoop(ctx context.Context, req *request) error {
	// A request of a soft mount may wait forever for a lock, but not for a reply or for the end of
	// the grace period.
	bounded, done := c.bound(ctx)
	defer func() { done() }()
	var poll time.Duration
	for waits := false; ; {
		retry, err := c.lockOnce(bounded, req)
		if retry == nil {
			return c.result(bounded, err)
		}
		if !waits {
			uid := sunrpc.CredUID(req.cred)
			if c.waiting.Take(uid) != nil {
				return syscall.ENOLCK
			}
			defer c.waiting.Release(uid)
			waits = true
		}
		wait, delay := bounded, retry.delay
		if retry.blocked {
			times := c.times.silent
			if c.called.Load() {
				times = c.times.called
			}
			poll = min(max(2*poll, times.first), times.longest)
			delay = poll
		}
		if !retry.grace() {
			done()
			wait = ctx
		}
		c.Counters.Pending.Add(1)
		err = c.pause(wait, req, retry, delay)
		c.Counters.Pending.Add(-1)
		if err != nil {
			if err = c.result(wait, err); errors.Is(err, syscall.EINTR) {
				c.Counters.Canceled.Add(1)
			}
			return err
		}
		if !retry.grace() {
			bounded, done = c.bound(ctx)
		}
	}
}

// A retry says what a request waits for.
type retry struct {
	local   bool          // a lock of this mount
	blocked bool          // a lock of another client
	delay   time.Duration // until another attempt; the only reason in the grace period
}

// grace reports whether the request waits for the server only.
func (r *retry) grace() bool { return !r.local && !r.blocked }

// pause waits until another attempt makes sense. The error is EINTR.
func (c *Client) pause(ctx context.Context, req *request, r *retry, delay time.Duration) error {
	var released chan struct{}
	if r.local {
		released = req.waiter.wake
	} else {
		req.f.waiters.leave(req.waiter, false)
	}
	var timer <-chan time.Time
	if delay > 0 {
		t := time.NewTimer(delay)
		defer t.Stop()
		timer = t.C
	}
	req.afterCall, req.afterPoll = false, false
	select {
	case <-req.called:
		req.afterCall = true
	case <-timer:
		req.afterPoll = r.blocked
	case <-released:
	case <-ctx.Done():
		return syscall.EINTR
	case <-c.ctx.Done():
		return syscall.EINTR
	}
	return nil
}

// lockOnce makes one attempt. A nil retry ends the request with err.
func (c *Client) lockOnce(ctx context.Context, req *request) (*retry, error) {
	f := req.f
	if err := f.acquire(ctx); err != nil {
		return nil, err
	}
	defer f.release()
	c.attempts.Add(1)
	if f.lost.Has(req.l.Owner) {
		return nil, syscall.EIO // its owner has not noticed yet
	}
	if conflict := f.locks.Conflict(&req.l); conflict != nil {
		switch {
		case !req.wait:
			return nil, syscall.EAGAIN
		case !f.waiters.sleep(req.waiter, conflict.Owner):
			return nil, syscall.EDEADLK
		}
		// On a soft mount, ask again for the turn: it may be stuck in a release of that lock.
		return &retry{local: true, delay: c.cfg.GiveUp}, nil
	}
	f.waiters.run(req.waiter)
	uid := c.payer(req.o, req.cred)
	if c.locks.Take(uid) != nil {
		return nil, syscall.ENOLCK
	}
	defer c.locks.Release(uid) // set counts the lock
	if req.in == nil {
		var err error
		if req.in, err = c.begin(f, req.o, req.cred, &req.l, rangeLock, req.wait); err != nil {
			return nil, err
		}
	}
	req.sent = true
	stat, err := c.callLock(ctx, req.f, req.o, req.cred, &req.l, req.wait, false)
	if err != nil {
		c.countNoService(err)
		if !c.link.wasConnected() {
			c.refused(req)
		}
		return nil, err
	}
	switch stat {
	case nlmwire.Granted:
		req.sent = false
		if err := c.set(f, req.l, req.cred, req.in); err != nil {
			return nil, err
		}
		c.countGrant(req)
		return nil, nil
	case nlmwire.Blocked:
		if req.wait {
			return &retry{blocked: true}, nil
		}
	case nlmwire.DeniedGracePeriod:
		return &retry{delay: c.times.grace}, nil
	case nlmwire.Denied:
		if req.wait { // the server does not queue requests
			return &retry{blocked: true}, nil
		}
		c.Counters.Denied.Add(1)
	}
	c.refused(req)
	return nil, stat.Errno()
}

// refused ends a request that the server does not have. The caller has the turn.
func (c *Client) refused(req *request) {
	req.sent = false
	c.cfg.State.withdraw(req.in)
	req.in = nil
}

func (c *Client) countNoService(err error) {
	if errors.Is(err, syscall.ENOLCK) {
		c.Counters.NoService.Add(1)
	}
}

func (c *Client) countGrant(req *request) {
	c.Counters.Granted.Add(1)
	switch {
	case req.afterCall:
		c.Counters.Callbacks.Add(1)
	case req.afterPoll:
		c.Counters.Polls.Add(1)
	}
}

// settle makes the state of the server that of this client after a request that ended without its
// result: it cancels the request and restores the locks in its range. It works in the background.
// Later requests for the file get the turn after it.
func (c *Client) settle(req *request) { c.settleLater(req, 0) }

// settleLater is settle after a delay. While the request has a record it retries, and the owner
// keeps its identity: the record is also that of other locks of the owner.
func (c *Client) settleLater(req *request, delay time.Duration) {
	if !c.hold(req.f, req.l.Owner) {
		return
	}
	var place *place
	if delay == 0 {
		place = req.f.turn.queue()
	}
	c.work.Go(func() {
		defer c.putFile(req.f)
		defer c.putOwner(req.l.Owner)
		if delay > 0 {
			if !sleep(c.ctx, delay) {
				return
			}
			place = req.f.turn.queue()
		}
		for !c.trySettle(req, place) && req.in != nil && sleep(c.ctx, c.times.settle) {
			place = req.f.turn.queue()
		}
	})
}

// trySettle makes one attempt of settle when place has the turn. It reports whether the request is
// settled.
func (c *Client) trySettle(req *request, place *place) bool {
	if place.wait(c.ctx) != nil {
		return false
	}
	defer req.f.release()
	return c.settleNow(req)
}

// settleNow is trySettle for a caller that has the turn.
func (c *Client) settleNow(req *request) bool {
	f, l := req.f, req.l
	if req.wait {
		_, _ = c.callServer(c.ctx, f, nlmwire.ProcCancel, req.cred, c.args(f, req.o, &l, true))
	}
	err := c.restore(c.ctx, f, req.o, req.cred, &l, func(part Lock) error {
		c.relock(f, req.o, part)
		return nil
	})
	if err != nil || c.ctx.Err() != nil {
		return false
	}
	c.cfg.State.withdraw(req.in)
	return true
}

// restore makes the state of the server that of the table for the owner and the range of l: it
// releases what the owner does not hold, and sets with relock what the owner holds. The caller has
// the turn.
func (c *Client) restore(ctx context.Context, f *file, o *owner, cred []byte, l *Lock,
	relock func(Lock) error) error {
	var failed error
	next := l.Start
	for _, part := range f.locks.Owned(l.Owner, l.Start, l.End) {
		if part.Start > next {
			failed = errors.Join(failed, c.unlockCall(ctx, f, o, cred, l.Owner, next, part.Start-1))
		}
		failed = errors.Join(failed, relock(part))
		next = part.End + 1
	}
	if next <= l.End {
		failed = errors.Join(failed, c.unlockCall(ctx, f, o, cred, l.Owner, next, l.End))
	}
	return failed
}

// hold counts a use of a file and an owner by a goroutine of work. It returns false after Close.
func (c *Client) hold(f *file, id Owner) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return false
	}
	f.users++
	c.mu.owners[id].users++
	return true
}

// Unlock releases the owner's locks from start to end. When ctx ends first, the release goes on in
// the background and Unlock returns EINTR; new requests for the file wait for it. Unlock returns
// ENOLCK when it would split a lock and there is no room for another one: the mount has as many
// locks as it may have, the user has its share of them, or the State or the server has no room.
func (c *Client) Unlock(ctx context.Context, cred []byte, fh nfs3.FH, id Owner, start, end uint64) error {
	c.mu.Lock()
	known := c.mu.files[fh] != nil && c.mu.owners[id] != nil
	c.mu.Unlock()
	if !known {
		return nil
	}
	o, f := c.getOwner(id), c.getFile(fh)
	defer c.putOwner(id)
	defer c.putFile(f)
	ctx, done := c.bound(ctx)
	defer done()
	if f.acquire(ctx) != nil {
		c.unlockLater(f, o, cred, id, start, end)
		return c.result(ctx, syscall.EINTR)
	}
	if !f.locks.Owns(id, start, end) && !f.lost.Owns(id, start, end) {
		f.release()
		return nil
	}
	// The server may still have a lost lock, for example in another mode.
	if f.locks.Splits(id, start, end) {
		uid := c.payer(o, cred)
		if c.locks.Take(uid) != nil {
			f.release()
			return syscall.ENOLCK
		}
		defer c.locks.Release(uid) // clear counts the lock
	}
	in, err := c.unlockIntent(f, o, cred, &Lock{Start: start, End: end, Owner: id})
	if err != nil {
		f.release()
		return err
	}
	stat, err := c.unlockStat(ctx, f, o, cred, id, start, end)
	if errors.Is(err, syscall.EINTR) {
		if !c.unlockInBackground(f, o, cred, id, start, end, in) {
			f.release()
		}
		return c.result(ctx, err)
	}
	defer f.release()
	if err == nil && stat == nlmwire.DeniedNoLocks { // it would split a lock of the server
		c.cfg.State.withdraw(in)
		return stat.Errno()
	}
	return c.clear(f, id, start, end, in) // what the server does not unlock, it does not have
}

// unlockLater releases locks in the background. Later requests for the file get the turn after it.
func (c *Client) unlockLater(f *file, o *owner, cred []byte, id Owner, start, end uint64) {
	if !c.hold(f, id) {
		return
	}
	// Record it now: the process may end before the turn comes.
	in, _ := c.cfg.State.begin(keyOf(f, id), o, cred, rangeRecord{kind: rangeUnlock, start: start, end: end})
	place := f.turn.queue() // a later LOCK must not come first
	c.work.Go(func() {
		defer c.putFile(f)
		defer c.putOwner(id)
		if place.wait(c.ctx) == nil && !c.unlockInBackground(f, o, cred, id, start, end, in) {
			f.release()
		}
	})
}

// unlockInBackground releases locks in the background. It takes over the turn of the caller. It
// returns false after Close. in is its record.
func (c *Client) unlockInBackground(f *file, o *owner, cred []byte, id Owner, start, end uint64, in *intent) bool {
	if !c.hold(f, id) {
		return false
	}
	c.work.Go(func() {
		defer c.putFile(f)
		defer c.putOwner(id)
		defer f.release()
		if c.unlockCall(c.ctx, f, o, cred, id, start, end) == nil {
			_ = c.clear(f, id, start, end, in)
		}
	})
	return true
}

// unlockCall is unlockStat for a caller that cannot use the status.
func (c *Client) unlockCall(ctx context.Context, f *file, o *owner, cred []byte, id Owner, start, end uint64) error {
	_, err := c.unlockStat(ctx, f, o, cred, id, start, end)
	return err
}

// unlockStat sends UNLOCK, again during a grace period. The caller has the turn.
func (c *Client) unlockStat(ctx context.Context, f *file, o *owner, cred []byte, id Owner, start,
	end uint64) (nlmwire.Stat, error) {
	args := c.args(f, o, &Lock{Start: start, End: end, Owner: id}, false)
	for {
		stat, err := c.callServer(ctx, f, nlmwire.ProcUnlock, cred, args)
		if err != nil {
			return stat, err
		}
		if stat != nlmwire.DeniedGracePeriod {
			if stat != nlmwire.Granted {
				c.limits.unlock.Log(c.log.Warn, "unlock failed", "server", c.cfg.Host, "status", stat)
			}
			return stat, nil
		}
		if !sleep(ctx, c.times.grace) {
			return stat, syscall.EINTR
		}
	}
}

// ReleaseOwner releases all locks of an owner on a file, as close(2) does with those of fcntl(2).
func (c *Client) ReleaseOwner(ctx context.Context, cred []byte, fh nfs3.FH, id Owner) error {
	return c.Unlock(ctx, cred, fh, id, 0, maxOffset)
}

// ReleaseOpen releases the locks, lost ones too, that were last set through an open file, whoever
// owns them. It takes its place before later requests for the file. When ctx ends first, or the
// timeout of a soft mount, the release goes on in the background and ReleaseOpen returns EINTR or
// GiveUpErr.
//
// The end of an open file must not release other locks of the owners that used it: a process may
// have set them through another open file since, and the kernel uses the number of an open file
// description again as soon as it is closed.
func (c *Client) ReleaseOpen(ctx context.Context, fh nfs3.FH, open uint64) error {
	ctx, stop := c.bound(ctx)
	defer stop()
	c.mu.Lock()
	f := c.mu.files[fh]
	if f == nil || c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	f.users++
	place, done := f.turn.queue(), make(chan struct{})
	c.work.Go(func() {
		defer close(done)
		defer c.putFile(f)
		if place.wait(c.ctx) != nil {
			return
		}
		defer f.release()
		for _, l := range slices.Concat(f.locks.All(), f.lost.All()) {
			if l.Open == open {
				c.releaseLock(c.ctx, f, &l)
			}
		}
	})
	c.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return c.result(ctx, syscall.EINTR)
	}
}

// releaseLock releases a lock of the tables. The caller has the turn.
func (c *Client) releaseLock(ctx context.Context, f *file, l *Lock) {
	o := c.getOwner(l.Owner)
	defer c.putOwner(l.Owner)
	in, _ := c.unlockIntent(f, o, f.creds[l.Owner], l) // it only removes records, and needs no room
	if c.unlockCall(ctx, f, o, f.creds[l.Owner], l.Owner, l.Start, l.End) == nil {
		_ = c.clear(f, l.Owner, l.Start, l.End, in)
	}
}

// Test returns a lock that excludes l. held is false when l could be set. The owner of a lock of
// another client is zero.
func (c *Client) Test(ctx context.Context, cred []byte, fh nfs3.FH, l Lock) (holder Lock, held bool, err error) {
	ctx, done := c.bound(ctx)
	defer done()
	o, f := c.getOwner(l.Owner), c.getFile(fh)
	defer c.putOwner(l.Owner)
	defer c.putFile(f)
	for {
		if err := f.acquire(ctx); err != nil {
			return Lock{}, false, c.result(ctx, err)
		}
		if conflict := f.locks.Conflict(&l); conflict != nil {
			f.release()
			return *conflict, true, nil
		}
		var res nlmwire.Res
		err := c.call(ctx, f, nlmwire.ProcTest, cred, c.args(f, o, &l, false), &res)
		f.release()
		switch {
		case err != nil:
			c.countNoService(err)
			return Lock{}, false, c.result(ctx, err)
		case res.Stat == nlmwire.Denied:
			h := Lock{Exclusive: res.Holder.Exclusive}
			h.Start, h.End = res.Holder.Range()
			return h, true, nil
		case res.Stat == nlmwire.Granted:
			return Lock{}, false, nil
		case res.Stat != nlmwire.DeniedGracePeriod:
			return Lock{}, false, res.Stat.Errno()
		}
		if !sleep(ctx, c.times.grace) {
			return Lock{}, false, c.result(ctx, syscall.EINTR)
		}
	}
}

// InUse reports whether any owner of this mount has locks of the file, or requests them.
func (c *Client) InUse(fh nfs3.FH) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.files[fh] != nil
}

// Lost reports whether a lock that was set through an open file is lost, and not unlocked since.
func (c *Client) Lost(fh nfs3.FH, open uint64) bool {
	if c.Counters.Lost.Load() == 0 {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.mu.lost[fh], open)
}

// bound returns ctx with the timeout of a soft mount.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.cfg.GiveUp == 0 {
		return ctx, func() {}
	}
	return running.WithTimeout(ctx, c.cfg.GiveUp)
}

// result returns err, or the error of a soft mount after its timeout.
func (c *Client) result(ctx context.Context, err error) error {
	if errors.Is(err, syscall.EINTR) && c.cfg.GiveUp != 0 && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.cfg.GiveUpErr
	}
	return err
}

func (c *Client) args(f *file, o *owner, l *Lock, block bool) *nlmwire.Args {
	a := &nlmwire.Args{Cookie: binary.BigEndian.AppendUint64(nil, c.cookie.Add(1)), Block: block,
		Exclusive: l.Exclusive, State: c.cfg.Service.state().nsmState,
		Region: nlmwire.Region{Caller: c.cfg.Caller, FH: f.fh.Bytes(), OH: o.oh, SVID: o.svid}}
	a.Region.SetRange(l.Start, l.End)
	return a
}

func (c *Client) callLock(ctx context.Context, f *file, o *owner, cred []byte, l *Lock, block,
	reclaim bool) (nlmwire.Stat, error) {
	c.cfg.Service.monitor(ctx, c) // before the arguments, which have the state number
	// For a queued request the server would call another lock service of this host, which would
	// refuse the lock. The server would then release the lock, although a poll may just have got
	// it.
	a := c.args(f, o, l, block && !c.cfg.Service.state().foreign)
	a.Reclaim = reclaim
	return c.callServer(ctx, f, nlmwire.ProcLock, cred, a)
}

func (c *Client) callServer(ctx context.Context, f *file, proc nlmwire.Proc, cred []byte,
	a *nlmwire.Args) (nlmwire.Stat, error) {
	var res nlmwire.Res
	err := c.call(ctx, f, proc, cred, a, &res)
	return res.Stat, err
}

// call makes one call about a file, whose turn the caller has. Its error is EINTR when ctx or the
// client ends, or ENOLCK when the server has no lock service.
//
// The server may execute a call after its caller has returned EINTR, and it may execute the calls
// of one connection in any order. So the next call about the file first waits for the end of this
// one.
func (c *Client) call(ctx context.Context, f *file, proc nlmwire.Proc, cred []byte, a *nlmwire.Args,
	res *nlmwire.Res) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(c.ctx, cancel)
	defer stop()
	if f.late != nil {
		select {
		case <-f.late:
		case <-ctx.Done():
			return syscall.EINTR
		}
	}
	var err error
	f.late, err = c.link.call(ctx, proc, cred, nlmwire.AppendArgs(nil, proc, a),
		func(b []byte) error { return nlmwire.ParseRes(proc, b, res) })
	switch {
	case err == nil:
		c.logged.Store(false)
		return nil
	case ctx.Err() != nil:
		return syscall.EINTR
	}
	if !c.logged.Swap(true) {
		c.limits.noService.Log(c.log.Error, "locks fail with ENOLCK", "reason", err)
	}
	return syscall.ENOLCK
}
