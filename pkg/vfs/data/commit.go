package data

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

const (
	// commitExtents is the number of UNSTABLE extents of one file that starts a COMMIT in the
	// background.
	commitExtents = 16
	// unstableReplays is the number of UNSTABLE replays after verifier changes. Later replays use
	// FILE_SYNC.
	unstableReplays = 2
	// maxReplays bounds all replays. A server that neither keeps a verifier nor obeys FILE_SYNC
	// cannot store data.
	maxReplays = 6
)

// Sync writes the file's data to stable storage. Sync returns when the server has confirmed or
// refused all data; Report returns the refusal. The error is EINTR when ctx ends first.
// The data then stays in memory.
func (f *File) Sync(ctx context.Context) error {
	if f == nil {
		return nil
	}
	if dirty, err := f.beginSync(ctx); !dirty {
		return err
	}
	defer f.endSync()
	err := f.Push(ctx)
	for replays := 0; err == nil; replays++ {
		var replayed bool
		if replayed, err = f.commit(ctx, replays); !replayed {
			break
		}
	}
	return err
}

// beginSync waits for other syncs of the file and begins one. dirty is false when nothing is to be
// written, or with an error.
func (f *File) beginSync(ctx context.Context) (dirty bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.clean() {
		return false, nil
	}
	for f.syncing {
		if err := f.wait(ctx); err != nil {
			return false, err
		}
	}
	f.syncing = true
	if f.filling != nil && len(f.sending) == 0 && len(f.unstable) == 0 {
		// One FILE_SYNC WRITE costs less than a WRITE and a COMMIT.
		f.seal(nfs.FileSync)
	}
	return true, nil
}

func (f *File) endSync() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.syncing = false
	f.changed()
}

// commit makes the extents stable that are unstable now. replayed is true when the verifier changed
// and the data was sent again.
func (f *File) commit(ctx context.Context, replays int) (replayed bool, err error) {
	set := f.unstableNow()
	if len(set) == 0 {
		return false, nil
	}
	res, err := f.callCommit(ctx, set)
	switch {
	case err != nil && ctx.Err() != nil:
		return false, syscall.EINTR
	case err != nil:
		f.discard(set, f.s.cfg.Check(f, err))
		return false, nil
	case !slices.ContainsFunc(set, func(e *extent) bool { return e.lost || e.verf != res.Verf }):
		f.releaseExtents(set)
		return false, nil
	case replays >= maxReplays:
		f.discard(set, f.s.cfg.Invalid(f, "the write verifier changes with each reply"))
		return false, nil
	}
	stable := nfs.Unstable
	if replays >= unstableReplays {
		stable = nfs.FileSync
	}
	return true, f.replay(ctx, stable)
}

// callCommit sends COMMIT for the whole file with the credential of a writer of set. When the server
// refuses this writer, for example after a chmod, callCommit goes on with the next one: a COMMIT of
// any writer makes the data of all writers stable. The result is that of the last call.
func (f *File) callCommit(ctx context.Context, set []*extent) (res nfs.CommitResult, err error) {
	for i, e := range set {
		tried := func(o *extent) bool { return bytes.Equal(o.cred, e.cred) }
		if slices.ContainsFunc(set[:i], tried) {
			continue
		}
		if res, err = f.commitAs(ctx, e.cred); !isRefused(err) {
			break
		}
	}
	return res, err
}

// isRefused reports whether the server refused a call because of its credential.
func isRefused(err error) bool {
	e := nfs.CallErrno(err)
	return e == syscall.EACCES || e == syscall.EPERM
}

// commitAs sends COMMIT with a credential, again while the server is busy.
func (f *File) commitAs(ctx context.Context, cred []byte) (nfs.CommitResult, error) {
	var busy busyMark
	defer f.clearBusy(&busy)
	for try := 0; ; try++ {
		f.s.cfg.Counters.Commits.Add(1)
		start := f.s.cfg.Attrs.Now()
		// Offset 0 and count 0 mean the whole file (RFC 1813 §3.3.21).
		res, err := f.s.cfg.Server.Commit(ctx, cred, f.Handle, 0, 0)
		if f.retryBusy(ctx, &err, try, &busy) {
			continue
		}
		if err == nil {
			f.s.cfg.Attrs.Committed(f.attrs, &res.Change, start)
		}
		return res, err
	}
}

// unstableNow returns the unstable extents.
func (f *File) unstableNow() []*extent {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.unstable)
}

// releaseExtents releases extents whose data is stable.
func (f *File) releaseExtents(set []*extent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range set {
		f.unstable = removeExtent(f.unstable, e)
		f.release(e)
	}
	f.changed()
}

// discard releases extents whose data is lost and records err for the file's open handles.
func (f *File) discard(set []*extent, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range set {
		f.unstable = removeExtent(f.unstable, e)
		f.drop(e, err)
	}
	f.changed()
}

// replay sends all unstable extents again in the order of their writes. replay also sends the
// extents that were written after the server restarted, because an older extent that replay sends
// may overwrite their data. No other WRITE to the file is in flight during a replay.
func (f *File) replay(ctx context.Context, stable nfs.Stability) error {
	f.s.cfg.Counters.Replays.Add(1)
	f.s.cfg.Restarted()
	defer f.resume()
	set, err := f.pause(ctx)
	if err != nil {
		return err
	}
	for _, e := range set {
		f.s.cfg.Counters.ReplayedBytes.Add(uint64(e.n))
		var ch nfs.Change
		committed, start, err := f.writeExtent(ctx, e, stable, &ch)
		switch {
		case err != nil && ctx.Err() != nil:
			e.lost = true
			return syscall.EINTR
		case err != nil:
			f.discard([]*extent{e}, err)
			continue
		case stable == nfs.FileSync && committed == nfs.FileSync:
			f.releaseExtents([]*extent{e})
		}
		f.s.cfg.Attrs.Changed(f.attrs, &ch, start, false)
		f.s.cfg.Written(f, &ch)
	}
	return nil
}

// pause lets no WRITE start and waits for those in flight. pause returns the unstable extents in
// the order of their writes.
func (f *File) pause(ctx context.Context) ([]*extent, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.paused = true
	for slices.ContainsFunc(f.sending, func(e *extent) bool { return e.started }) {
		if err := f.wait(ctx); err != nil {
			return nil, err
		}
	}
	set := slices.Clone(f.unstable)
	slices.SortFunc(set, func(a, b *extent) int { return cmp.Compare(a.seq, b.seq) })
	for _, e := range set {
		// An interrupted replay must not pass for a complete one. writeExtent resets the flag.
		e.lost, e.resent = true, true
	}
	return set, nil
}

// resume reverses pause.
func (f *File) resume() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.paused = false
	f.changed()
}
