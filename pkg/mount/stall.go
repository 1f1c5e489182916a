package mount

import (
	"context"
	"fmt"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// stallTick is the time between two looks for stalled mounts.
	stallTick = time.Second
	// stopLength is the length of a stop of this process (SIGSTOP, a frozen control group), after
	// which the ages of requests begin again: the servers could not answer.
	stopLength = 5 * time.Second
)

// A stall is a mount that does not answer. The zero value is none.
type stall struct {
	age     time.Duration // of the oldest request without reply
	callAge time.Duration // age of the oldest call without reply; 0 without one
	reason  string        // without names of processes and users
	owner   string        // of the oldest request, for the log of this host
}

// within returns s if it is older than bound. The time before since does not count.
func (s stall) within(since time.Time, bound time.Duration) stall {
	longest := time.Since(since)
	if s.age, s.callAge = min(s.age, longest), min(s.callAge, longest); s.age <= bound {
		return stall{}
	}
	return s
}

// A stallFinder finds out whether one mount is stalled. It is not safe for concurrent use.
type stallFinder struct {
	progress   uint64
	progressed time.Time // when progress changed
	lost       time.Time // when all connections were found lost; zero if one is not
}

// A sighting is what one look at a mount finds.
type sighting struct {
	progress  uint64     // grows when the server accepts written data
	lost      bool       // there is no connection
	lastError error      // of a connection
	call      *xprt.Call // the oldest call that counts; nil for none
	request   kernel.Waiting
	requests  bool // there is a request
}

// Stalled implements mountInstance.
func (s *mountStack) Stalled() stall {
	look := sighting{progress: s.fs.Progress(), lost: true}
	for _, t := range s.transports.all {
		lost, cause := t.Lost()
		look.lost, look.lastError = look.lost && lost, cause
		for _, c := range t.Calls() {
			if countsForStall(&c, lost) && (look.call == nil || c.Began.Before(look.call.Began)) {
				look.call = &c
			}
		}
	}
	look.request, look.requests = s.fs.Requests().Oldest()
	return s.stallFinder.find(time.Now(), s.address.String(), &look)
}

// countsForStall reports whether a call waits for the server. A call that waits for a slot or a
// credit does not count: the calls that have them do. Neither does a call of a transport that waits
// for its turn to connect.
func countsForStall(c *xprt.Call, lost bool) bool {
	switch c.Waits {
	case xprt.WaitReconnect:
		return lost
	case xprt.WaitLate:
		return false // its caller has returned
	}
	return !c.Sent.IsZero()
}

// find returns the oldest of these: the call; the request, from the time when the server last
// accepted written data, because a flush can make many calls; the loss of all connections.
func (f *stallFinder) find(now time.Time, server string, look *sighting) stall {
	if look.progress != f.progress || f.progressed.IsZero() {
		f.progress, f.progressed = look.progress, now
	}
	if !look.lost {
		f.lost = time.Time{}
	} else if f.lost.IsZero() {
		f.lost = now
	}
	var st stall
	if look.lost {
		st.age, st.reason = now.Sub(f.lost), "no connection to "+server
		if look.lastError != nil {
			st.reason += ": " + control.OneLine(look.lastError.Error())
		}
	}
	if c := look.call; c != nil {
		st.callAge = now.Sub(c.Began)
		if !look.lost {
			st.reason = fmt.Sprintf("no reply from %s to %s", server, procedureName(c.Prog, c.Vers, c.Proc))
		}
		st.age, st.owner = max(st.age, st.callAge), ownerName(ownerOf(c.Ctx, c.Proc))
	}
	if !look.requests {
		return st
	}
	if age := min(look.request.Age, now.Sub(f.progressed)); age > st.age {
		if st.age = age; !look.lost {
			st.reason = fmt.Sprintf("no reply to a request %s; the server answers the calls of the mount",
				look.request.Op)
			st.owner = ownerName(describeOwner(vfs.Owner{PID: look.request.PID, UID: look.request.UID}))
		}
	}
	return st
}

// ownerName describes the owner of a call in a message.
func ownerName(o control.CallOwner) string {
	if o.Owner != control.OwnerProcess {
		return o.Owner
	}
	return fmt.Sprintf("process %d (%s)", o.PID, o.Command)
}

// watchStalls looks for stalled mounts until the table closes.
func (t *Table) watchStalls() {
	start := time.Now()
	t.looked.Store(&start)
	tick := time.NewTicker(stallTick)
	defer tick.Stop()
	stops := running.NewDetector(stallTick, stallTick, start)
	since := start
	for {
		select {
		case <-tick.C:
		case <-t.closing:
			return
		}
		now := time.Now()
		stopped, check := stops.Tick(now)
		if stopped > stopLength {
			since = now
		}
		if check {
			t.checkStalls(since)
		}
		t.looked.Store(&now)
	}
}

// Looked returns when the table last looked for stalled mounts. It does so about once a second.
// When it has not done so for much longer, a part of a mount hangs, for example in a lock. Looked
// returns the zero time after Close or Leave was called.
func (t *Table) Looked() time.Time {
	select {
	case <-t.closing:
		return time.Time{}
	default:
	}
	if at := t.looked.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// checkStalls looks at all mounts. The time before since does not count.
func (t *Table) checkStalls(since time.Time) {
	t.mu.Lock()
	entries := t.everyEntry()
	t.mu.Unlock()
	for _, e := range entries {
		if e.opts.Stall > 0 {
			t.checkStall(e, since)
		}
	}
}

// checkStall records and logs whether a mount is stalled, and aborts it after Options.StallAbort.
func (t *Table) checkStall(e *entry, since time.Time) {
	t.mu.Lock()
	instance, now := e.instance, stall{}
	if e.state == control.StateRestoring && !e.refused.IsZero() {
		age := time.Since(e.refused)
		now = stall{age: age, callAge: age, reason: e.reason}
	}
	t.mu.Unlock()
	if instance != nil {
		now = instance.Stalled()
	}
	now = now.within(since, e.opts.Stall)
	t.mu.Lock()
	before := e.stall
	e.stall = now
	if before.age == 0 && now.age > 0 {
		e.stalls++
	}
	abort := e.opts.StallAbort > 0 && now.callAge > e.opts.StallAbort && !e.aborting
	e.aborting = e.aborting || abort
	t.mu.Unlock()
	log := t.log.With("spec", e.spec.String(), "dir", e.dir)
	switch {
	case before.age == 0 && now.age > 0:
		log.Warn("the mount does not answer", "seconds", int(now.age.Seconds()), "reason", now.reason, "owner",
			now.owner)
	case before.age > 0 && now.age == 0:
		log.Info("the mount answers again", "seconds", int(before.age.Seconds()))
	}
	if abort {
		t.stallAborts.Add(1)
		log.Error("aborting the mount, because it does not answer", "seconds", int(now.callAge.Seconds()), "reason",
			now.reason, "owner", now.owner)
		go func() {
			if err := t.forceUnmount(context.Background(), e); err != nil {
				log.Error("forced unmount failed", "error", err)
			}
		}()
	}
}
