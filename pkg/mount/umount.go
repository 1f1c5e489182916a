package mount

import (
	"context"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
)

const (
	// forceTimeout bounds a forced unmount, whatever the server does.
	forceTimeout = 5 * time.Second
	// forceFlushTimeout and forceStall bound the part of it that writes dirty data.
	forceFlushTimeout = 3 * time.Second
	forceStall        = 2 * time.Second // without progress
)

// Umount unmounts the mount at r.Dir. A normal unmount fails if a file is open, or if the server
// does not accept the dirty data before ctx ends. The mount then stays mounted. A forced unmount
// first writes the dirty data that the server accepts within forceFlushTimeout.
func (t *Table) Umount(ctx context.Context, r control.UmountRequest) error {
	switch r.Mode {
	case control.UmountNormal, control.UmountLazy, control.UmountForce:
	default:
		return control.Errorf(control.CodeUsage, "unmount %s: unknown mode %q; use force or lazy", r.Dir,
			string(r.Mode))
	}
	dir, err := t.resolve(ctx, r.Dir)
	if err != nil {
		return err
	}
	e := t.find(dir, r.Mode)
	if e == nil {
		return notMounted("unmount", dir)
	}
	if r.Mode == control.UmountForce {
		return t.forceUnmount(ctx, e)
	}
	return t.unmount(ctx, e, r.Mode)
}

// forceUnmount unmounts e within forceTimeout. It first tries to write the dirty data.
func (t *Table) forceUnmount(ctx context.Context, e *entry) error {
	ctx, cancel := running.WithTimeout(ctx, forceTimeout)
	defer cancel()
	flushCtx, flushed := running.WithTimeout(ctx, forceFlushTimeout)
	defer flushed()
	t.flush(flushCtx, e, forceStall)
	return t.unmount(ctx, e, control.UmountForce)
}

// flush makes later writes of a mount synchronous and writes its dirty data. See
// [mountInstance.Flush]. It does nothing during the build of the mount.
func (t *Table) flush(ctx context.Context, e *entry, stall time.Duration) {
	if instance := t.setState(e, control.StateUnmounting); instance != nil {
		instance.Flush(ctx, stall)
	}
}

func (t *Table) unmount(ctx context.Context, e *entry, mode control.UmountMode) error {
	instance := t.setState(e, control.StateUnmounting)
	if instance == nil && e.left != nil {
		return t.umountLeft(ctx, e, mode)
	}
	if instance == nil {
		e.cancel() // the build may complete nevertheless
		select {
		case <-e.removed:
			return nil
		case <-e.built:
			instance = t.setState(e, control.StateUnmounting)
		case <-ctx.Done():
			return umountTimeout(e, mode)
		}
	}
	if err := instance.Unmount(ctx, mode); err != nil {
		t.setState(e, control.StateMounted)
		return err
	}
	if mode == control.UmountLazy {
		t.detach(e)
		return nil
	}
	select {
	case <-e.removed:
		return nil
	case <-ctx.Done():
		return umountTimeout(e, mode)
	}
}

func umountTimeout(e *entry, mode control.UmountMode) error {
	if mode == control.UmountForce {
		return control.Errorf(control.CodeMount, "unmount %s: timeout; the daemon still releases the mount; see "+
			"its log", e.dir)
	}
	return control.Errorf(control.CodeMount, "unmount %s: timeout; try --force", e.dir)
}

// detach moves a lazily unmounted mount to the detached mounts, so that its mount point is free.
func (t *Table) detach(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.entries[e.dir] == e {
		delete(t.mu.entries, e.dir)
		t.mu.detached[e] = struct{}{}
	}
}

// Close refuses new mounts and unmounts all mounts. It first writes their dirty data, until ctx
// ends. It unmounts mounts with open files by force. It leaves mounts in [control.StateKept] alone.
// Close returns when all other mounts are released, at the latest [CloseGrace] after the end of
// ctx. It logs the mounts that are not released. Its error means that written data is lost; the log
// names the files.
func (t *Table) Close(ctx context.Context) error {
	defer SettleConnects()
	defer t.shared.locks.Close()
	lostBefore := t.shared.unmount.Load()
	t.mu.Lock()
	t.refuse()
	var unmounts sync.WaitGroup
	for _, e := range t.mu.entries {
		if e.state != control.StateKept {
			unmounts.Go(func() {
				t.flush(ctx, e, 0)
				t.unmountOrForce(ctx, e)
			})
		}
	}
	for e := range t.mu.detached {
		if e.state != control.StateKept {
			unmounts.Go(func() {
				t.flush(ctx, e, 0)
				t.force(ctx, e)
			})
		}
	}
	t.mu.Unlock()
	unmounts.Wait()
	released := make(chan struct{})
	go func() {
		defer close(released)
		t.work.Wait()
	}()
	select {
	case <-released:
	case <-time.After(releaseTimeout):
		for _, v := range t.all() {
			t.log.Error("mount not released", "spec", v.Spec, "dir", v.Dir)
		}
	}
	return t.LossError(lostBefore)
}

// refuse refuses new mounts. The caller holds the lock.
func (t *Table) refuse() {
	if !t.mu.closed {
		t.mu.closed = true
		close(t.closing)
	}
}

// releaseTimeout bounds the release of unmounted mounts. It is longer than the timeouts of its
// steps together.
const releaseTimeout = writeBackTimeout + nlm.CloseTimeout + umntTimeout + 3*time.Second

// CloseGrace bounds the time that [Table.Close] takes after the end of its context.
const CloseGrace = pathTimeout + releaseTimeout + nlm.CloseTimeout + settleTimeout

// unmountOrForce unmounts e normally, and by force if that fails.
func (t *Table) unmountOrForce(ctx context.Context, e *entry) {
	if err := t.unmount(ctx, e, control.UmountNormal); err != nil {
		t.log.Warn("forcing unmount", "dir", e.dir, "reason", err)
		t.force(ctx, e)
	}
}

// force unmounts e by force, also if ctx has ended.
func (t *Table) force(ctx context.Context, e *entry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pathTimeout)
	defer cancel()
	if err := t.unmount(ctx, e, control.UmountForce); err != nil {
		t.log.Error("forced unmount failed", "dir", e.dir, "error", err)
	}
}
