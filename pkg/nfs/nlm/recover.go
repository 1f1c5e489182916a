package nlm

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A restart is a reason to reclaim the locks.
type restart struct {
	reason string
	// certain means that the server has restarted, unless its connection or its status monitor shows
	// the opposite.
	// Otherwise it may have restarted: a lock that the server grants again without reclaim then
	// counts as kept.
	certain bool
}

// Restarted tells the client that the server may have restarted, for example because its write
// verifier changed. It does not wait.
func (c *Client) Restarted(reason string) { c.trigger(restart{reason: reason}) }

func (c *Client) trigger(r restart) {
	for {
		select {
		case c.restart <- r:
			return
		default:
		}
		select {
		case old := <-c.restart:
			r.certain = r.certain || old.certain
		default:
		}
	}
}

// connectionLost is called by the link.
func (c *Client) connectionLost(err error) {
	c.log.Debug("lock connection lost", "server", c.cfg.Host, "error", err)
	// The tables may have no lock yet: a request may be about to record one.
	c.trigger(restart{reason: "lock connection lost"})
}

// connectionMade is called by the link.
func (c *Client) connectionMade() {
	select {
	case c.connected <- struct{}{}:
	default:
	}
}

// run reclaims the locks after a restart of the server. While locks are held, it also keeps the
// connection in use: its end shows a restart.
func (c *Client) run() {
	keepAlive := time.NewTicker(c.times.keepAlive)
	defer keepAlive.Stop()
	c.finishRestore()
	for {
		select {
		case <-c.ctx.Done():
			return
		case r := <-c.restart:
			c.recover(r)
			c.learnState()
		case <-c.connected:
			c.learnState()
		case <-keepAlive.C:
			if c.Counters.Held.Load() > 0 {
				_, _ = c.link.call(c.ctx, nlmwire.ProcNull, sunrpc.AppendAuthNone(nil), nil, nil)
				c.learnState()
			}
		}
	}
}

// recover reclaims all locks and makes blocked requests ask again.
func (c *Client) recover(r restart) {
	if r.certain {
		// A notice is late or forged if the connection, or the status monitor of the server, shows
		// that the server has not restarted since the locks were set or reclaimed.
		_, _ = c.link.call(c.ctx, nlmwire.ProcNull, sunrpc.AppendAuthNone(nil), nil, nil)
		r.certain = c.link.losses() != c.reclaimed && c.hasRestarted()
	}
	c.reclaimAll(r, nil)
}

// reclaimAll reclaims all locks and makes blocked requests ask again. The caller has the turns of
// the interrupted files.
func (c *Client) reclaimAll(r restart, turns map[*file]*interrupted) {
	losses, all := c.link.losses(), true
	c.mu.Lock()
	var files []*file
	for _, f := range c.mu.files {
		f.users++
		files = append(files, f)
	}
	for req := range c.mu.pending {
		req.poke()
	}
	c.mu.Unlock()
	held := c.Counters.Held.Load()
	if held > 0 {
		c.limits.reclaim.Log(c.log.Info, "reclaiming locks", "server", c.cfg.Host, "reason", r.reason, "locks", held)
	}
	for _, f := range files {
		x := turns[f]
		if x != nil || f.acquire(c.ctx) == nil {
			for _, l := range f.locks.All() {
				o := c.getOwner(l.Owner)
				for _, part := range x.parts(l) {
					all = c.reclaim(f, o, part, r.certain) && all
				}
				c.putOwner(l.Owner)
			}
			if x == nil {
				f.release()
			}
		}
		c.putFile(f)
	}
	// If the connection was lost meanwhile, another recovery follows.
	if all {
		c.reclaimed = losses
	}
}

// maxReclaims bounds the attempts to reclaim one lock from a server that refuses reclaims as well
// as new locks because of its grace period.
const maxReclaims = 100

// reclaim sets one lock again after a restart of the server. It reports whether the server, in its
// grace period, accepted the lock as one from before the restart. The caller has the turn.
func (c *Client) reclaim(f *file, o *owner, l Lock, certain bool) bool {
	for try := 1; ; try++ {
		stat, err := c.callLock(c.ctx, f, o, f.creds[l.Owner], &l, false, true)
		if err == nil && stat == nlmwire.Granted {
			c.Counters.Reclaimed.Add(1)
			return true
		}
		if err == nil && !certain && (stat == nlmwire.DeniedGracePeriod || stat == nlmwire.Denied) {
			// A server without a grace period refuses every reclaim. If it has not restarted, or if
			// no other client has the lock, it grants the lock without reclaim.
			stat, err = c.callLock(c.ctx, f, o, f.creds[l.Owner], &l, false, false)
			if err == nil && stat == nlmwire.Granted {
				return false
			}
			// The grace period began between the calls.
			if err == nil && stat == nlmwire.DeniedGracePeriod && try < maxReclaims && sleep(c.ctx, c.times.grace) {
				continue
			}
		}
		if c.ctx.Err() == nil {
			c.lose(f, l, stat, err)
		}
		return false
	}
}

// relock sets a lock that this client holds, in its mode. The lock is lost unless the server grants
// it. The caller has the turn.
func (c *Client) relock(f *file, o *owner, l Lock) {
	stat, err := c.callLock(c.ctx, f, o, f.creds[l.Owner], &l, false, false)
	for err == nil && stat == nlmwire.DeniedGracePeriod && sleep(c.ctx, c.times.grace) {
		stat, err = c.callLock(c.ctx, f, o, f.creds[l.Owner], &l, false, false)
	}
	if (err != nil || stat != nlmwire.Granted) && c.ctx.Err() == nil {
		c.lose(f, l, stat, err)
	}
}

// lose records that the server no longer has a lock. The caller has the turn.
func (c *Client) lose(f *file, l Lock, stat nlmwire.Stat, err error) {
	if c.change(f, &tableChange{id: l.Owner, start: l.Start, end: l.End, releases: true, do: func() {
		f.locks.Clear(l.Owner, l.Start, l.End)
		f.lost.Set(l)
	}}) != nil {
		return // the client is detached
	}
	c.Counters.Lost.Add(1)
	cause := any(stat)
	if err != nil {
		cause = err
	}
	c.limits.lost.Log(c.log.Error, "lock lost: the server did not return it; I/O through its owner fails with EIO "+
		"until the owner unlocks or closes the file", "server", c.cfg.Host, "pid", l.PID, "start", l.Start,
		"end", l.End, "cause", cause)
	if c.cfg.Lost != nil {
		c.cfg.Lost(f.fh, l.Owner)
	}
}
