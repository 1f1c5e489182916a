package mount

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
)

const (
	// restoreWait is how long Restore waits for the state of the mounts.
	restoreWait = time.Second
	// restorePause and restorePauseMax limit the random pause between attempts to reach the server.
	restorePause, restorePauseMax = 500 * time.Millisecond, 10 * time.Second
)

// Restore continues the mounts that an earlier process has left in the store. It is called once,
// after [NewTable]. It does not wait for servers: until a server replies, its mount has the state
// [control.StateRestoring], and programs on it wait.
func (t *Table) Restore() {
	if t.shared.store == nil {
		return
	}
	opened := make(chan struct{})
	var opens, restores sync.WaitGroup
	for _, l := range leftMounts(t.shared.store) {
		opens.Add(1)
		restores.Add(1)
		go t.restore(l, opens.Done, restores.Done)
	}
	go func() {
		opens.Wait()
		close(opened)
		restores.Wait() // for ever if a mount is left alone: its locks must stay
		t.shared.locks.Restored()
	}()
	select {
	case <-opened:
	case <-time.After(restoreWait): // a killed process has not yet exited
	}
}

// restore continues one mount. It calls listed when the mount is in the table, and restored when
// the mount continues or was discarded.
func (t *Table) restore(l *leftMount, listed, restored func()) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err := l.open(ctx, t.shared)
	p := plan{dir: l.Dir, virtiofs: l.guestFile != nil, left: l, timeout: t.timeout}
	if err == nil {
		err = t.planLeft(&p)
	}
	if p.dir == "" && p.virtiofs {
		p.dir = "unknown socket of " + l.id
	} else if p.dir == "" {
		p.dir = "unknown mount point of " + l.id
	}
	e := t.addLeft(p, cancel, restored, err)
	listed()
	if e == nil || err != nil {
		return
	}
	t.continueMount(ctx, e)
}

// planLeft sets the rest of the plan from the description of the mount.
func (t *Table) planLeft(p *plan) (err error) {
	if p.spec, err = ParseSpec(p.left.Spec); err != nil {
		return err
	}
	p.opts, err = ParseOptions(DefaultOptions(), p.left.Options)
	return err
}

// addLeft adds a mount of an earlier process to the table. failure is why it cannot be continued.
// It returns nil if the table is closed.
func (t *Table) addLeft(p plan, cancel context.CancelFunc, restored func(), failure error) *entry {
	since := p.left.Since
	if since.IsZero() {
		since = time.Now()
	}
	e := &entry{plan: p, since: since, cancel: cancel, built: make(chan struct{}), ended: make(chan struct{}),
		removed: make(chan struct{}), restored: restored, state: control.StateRestoring,
		reason: "the daemon connects to the server"}
	if failure != nil {
		e.state, e.reason = control.StateKept, control.OneLine(failure.Error())
		t.log.Error("mount of an earlier daemon is left alone; "+p.left.advice(), "dir", p.dir, "reason", e.reason)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil
	}
	if failure == nil && !p.left.isAttached(p.dir) {
		t.mu.detached[e] = struct{}{}
	} else {
		t.mu.entries[p.dir] = e
	}
	if failure == nil {
		t.work.Add(1)
	}
	return e
}

// continueMount builds the mount of an earlier process. It tries again until the server replies, or
// until a forced unmount ends ctx.
func (t *Table) continueMount(ctx context.Context, e *entry) {
	pause := pace.Backoff{Min: restorePause, Max: restorePauseMax}
	for {
		instance, err := t.build(ctx, e.plan)
		switch {
		case err == nil:
			t.mu.Lock()
			e.instance, e.state, e.reason = instance, control.StateMounted, ""
			t.mu.Unlock()
			close(e.built)
			t.log.Info("continued the mount of an earlier daemon", "spec", e.spec.String(), "dir", e.dir, "restarts",
				e.left.state.Restarts())
			e.restored()
			t.watch(e)
			return
		// After errNotResumed, a file system uses the state, which must not be discarded.
		case errors.Is(err, errNotResumed), ctx.Err() == nil && errors.Is(err, slotfile.ErrCorrupt):
			t.setReason(e, control.StateKept, err)
			t.log.Error("mount of an earlier daemon is left alone; "+e.left.advice(), "dir", e.dir, "reason", err)
			t.work.Done()
			return
		case ctx.Err() != nil:
			t.discard(e)
			t.remove(e)
			e.restored()
			return
		}
		t.setReason(e, control.StateRestoring, err)
		t.log.Warn("mount of an earlier daemon waits for its server", "spec", e.spec.String(), "dir", e.dir, "reason",
			control.OneLine(err.Error()))
		select {
		case <-time.After(pause.Next()):
		case <-ctx.Done():
		}
	}
}

func (t *Table) setReason(e *entry, state control.MountState, reason error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e.state, e.reason = state, control.OneLine(reason.Error())
	if e.refused.IsZero() {
		e.refused = time.Now()
	}
}

// discard ends a mount of an earlier process that a forced unmount gives up. No file system uses
// its state.
func (t *Table) discard(e *entry) {
	lost := e.left.state.UnwrittenBytes()
	if err := e.left.discard(e.dir); err != nil {
		t.log.Error("forced unmount failed", "dir", e.dir, "error", err)
	}
	if lost > 0 {
		t.shared.unmount.Add(lost)
		t.log.Error("written data lost: the mount ended before the server had it", "spec", e.spec.String(),
			"dir", e.dir, "bytes", lost)
	}
	e.left.remove()
	t.log.Info("unmounted", "spec", e.spec.String(), "dir", e.dir)
}

// umountLeft unmounts a mount that is not continued yet.
func (t *Table) umountLeft(ctx context.Context, e *entry, mode control.UmountMode) error {
	t.mu.Lock()
	state, reason := e.state, e.reason
	t.mu.Unlock()
	switch {
	case state == control.StateKept && e.virtiofs && mode == control.UmountForce:
		return t.discardKept(e)
	case state == control.StateKept:
		return control.Errorf(control.CodeMount, "unmount %s: this daemon cannot serve the mount: %s; %s", e.dir,
			reason, e.left.advice())
	case mode != control.UmountForce:
		return control.Errorf(control.CodeMount, "unmount %s: the daemon waits for the server to continue the mount: "+
			"%s; try again later, or discard written data with --force", e.dir, reason)
	}
	e.cancel() // the build may complete nevertheless
	select {
	case <-e.removed:
		return nil
	case <-e.built:
		return t.unmount(ctx, e, mode)
	case <-ctx.Done():
		return umountTimeout(e, mode)
	}
}

// discardKept ends a share that this daemon cannot serve. Without its descriptors, the connection
// of the virtual machine ends.
func (t *Table) discardKept(e *entry) error {
	t.mu.Lock()
	known := t.mu.entries[e.dir] == e
	if known {
		delete(t.mu.entries, e.dir)
		close(e.removed)
	}
	t.mu.Unlock()
	if !known {
		return nil
	}
	defer e.restored()
	t.log.Warn("share of an earlier daemon removed", "dir", e.dir)
	if e.left.keeper != nil && e.left.guest != nil { // not after errNotResumed
		t.discard(e)
		return nil
	}
	if err := removeKept(t.shared.store, e.left.id); err != nil {
		return control.Errorf(control.CodeMount, "unmount %s: %w", e.dir, err)
	}
	return nil
}

// Leave ends the use of the table without unmounting: the mounts stay for the next process. It
// unmounts the mounts that would end with this process. It writes dirty data until ctx ends. The
// process must exit afterwards.
func (t *Table) Leave(ctx context.Context) {
	t.mu.Lock()
	t.refuse()
	entries := t.everyEntry()
	instances := make([]mountInstance, len(entries))
	for i, e := range entries {
		instances[i] = e.instance
	}
	t.mu.Unlock()
	var ends sync.WaitGroup
	for i, e := range entries {
		switch instance := instances[i]; {
		case instance == nil && e.left != nil: // its state is unchanged
		case instance != nil && instance.KeepError() == nil:
			ends.Go(func() { instance.Flush(ctx, 0) })
		default:
			ends.Go(func() {
				t.flush(ctx, e, 0)
				t.unmountOrForce(ctx, e)
			})
		}
	}
	ends.Wait()
	SettleConnects()
}
