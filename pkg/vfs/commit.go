package vfs

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

// sync writes the file's data to stable storage. sync returns when the server has confirmed or
// refused all data; fileHandle.report returns the refusal. The error is EINTR when ctx ends first.
// The data then stays in memory.
func (fs *FS) sync(ctx context.Context, ino *inode) error {
	w := ino.data.Load()
	if w == nil {
		return nil
	}
	if dirty, err := fs.beginSync(ctx, ino); !dirty {
		return err
	}
	defer w.endSync()
	err := fs.push(ctx, ino)
	for replays := 0; err == nil; replays++ {
		var replayed bool
		if replayed, err = fs.commit(ctx, ino, replays); !replayed {
			break
		}
	}
	return err
}

// beginSync waits for other syncs of the file and begins one. dirty is false when nothing is to be
// written, or with an error.
func (fs *FS) beginSync(ctx context.Context, ino *inode) (dirty bool, err error) {
	w := ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.clean() {
		return false, nil
	}
	for w.syncing {
		if err := w.wait(ctx); err != nil {
			return false, err
		}
	}
	w.syncing = true
	if w.filling != nil && len(w.sending) == 0 && len(w.unstable) == 0 {
		// One FILE_SYNC WRITE costs less than a WRITE and a COMMIT.
		fs.seal(ino, nfs.FileSync)
	}
	return true, nil
}

func (w *writeback) endSync() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.syncing = false
	w.changed()
}

// commit makes the extents stable that are unstable now. replayed is true when the verifier changed
// and the data was sent again.
func (fs *FS) commit(ctx context.Context, ino *inode, replays int) (replayed bool, err error) {
	set := ino.wb().unstableNow()
	if len(set) == 0 {
		return false, nil
	}
	res, err := fs.callCommit(ctx, ino, set)
	switch {
	case err != nil && ctx.Err() != nil:
		return false, syscall.EINTR
	case err != nil:
		fs.discard(ino, set, fs.checkStale(ino, err))
		return false, nil
	case !slices.ContainsFunc(set, func(e *extent) bool { return e.lost || e.verf != res.Verf }):
		fs.releaseExtents(ino, set)
		return false, nil
	case replays >= maxReplays:
		fs.discard(ino, set, fs.invalidReply(ino, "the write verifier changes with each reply"))
		return false, nil
	}
	stable := nfs.Unstable
	if replays >= unstableReplays {
		stable = nfs.FileSync
	}
	return true, fs.replay(ctx, ino, stable)
}

// callCommit sends COMMIT for the whole file with the credential of a writer of set. When the server
// refuses this writer, for example after a chmod, callCommit goes on with the next one: a COMMIT of
// any writer makes the data of all writers stable. The result is that of the last call.
func (fs *FS) callCommit(ctx context.Context, ino *inode, set []*extent) (res nfs.CommitResult, err error) {
	for i, e := range set {
		tried := func(f *extent) bool { return bytes.Equal(f.cred, e.cred) }
		if slices.ContainsFunc(set[:i], tried) {
			continue
		}
		if res, err = fs.commitAs(ctx, e.cred, ino); !isRefused(err) {
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
func (fs *FS) commitAs(ctx context.Context, cred []byte, ino *inode) (nfs.CommitResult, error) {
	var busy busyMark
	defer fs.clearBusy(ino, &busy)
	for try := 0; ; try++ {
		fs.Counters.Commits.Add(1)
		start := fs.attrs.Now()
		// Offset 0 and count 0 mean the whole file (RFC 1813 §3.3.21).
		res, err := fs.server.Commit(ctx, cred, ino.fh, 0, 0)
		if fs.retryBusy(ctx, ino, &err, try, &busy) {
			continue
		}
		if err == nil {
			fs.attrs.Committed(&ino.attr, &res.Change, start)
		}
		return res, err
	}
}

// unstableNow returns the unstable extents.
func (w *writeback) unstableNow() []*extent {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.unstable)
}

// releaseExtents releases extents whose data is stable.
func (fs *FS) releaseExtents(ino *inode, set []*extent) {
	w := ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range set {
		w.unstable = removeExtent(w.unstable, e)
		fs.release(ino, e)
	}
	w.changed()
}

// discard releases extents whose data is lost and records err for the file's open handles.
func (fs *FS) discard(ino *inode, set []*extent, err error) {
	w := ino.wb()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range set {
		w.unstable = removeExtent(w.unstable, e)
		fs.drop(ino, e, err)
	}
	w.changed()
}

// replay sends all unstable extents again in the order of their writes. replay also sends the
// extents that were written after the server restarted, because an older extent that replay sends
// may overwrite their data. No other WRITE to the file is in flight during a replay.
func (fs *FS) replay(ctx context.Context, ino *inode, stable nfs.Stability) error {
	fs.Counters.Replays.Add(1)
	if fs.opts.Locks != nil {
		fs.opts.Locks.Restarted("write verifier changed")
	}
	defer ino.wb().resume()
	set, err := ino.wb().pause(ctx)
	if err != nil {
		return err
	}
	for _, e := range set {
		fs.Counters.ReplayedBytes.Add(uint64(e.n))
		var wcc nfs.Change
		committed, start, err := fs.writeExtent(ctx, ino, e, stable, &wcc)
		switch {
		case err != nil && ctx.Err() != nil:
			e.lost = true
			return syscall.EINTR
		case err != nil:
			fs.discard(ino, []*extent{e}, err)
			continue
		case stable == nfs.FileSync && committed == nfs.FileSync:
			fs.releaseExtents(ino, []*extent{e})
		}
		fs.updateChange(ino, &wcc, start, false)
	}
	return nil
}

// pause lets no WRITE start and waits for those in flight. pause returns the unstable extents in
// the order of their writes.
func (w *writeback) pause(ctx context.Context) ([]*extent, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paused = true
	for slices.ContainsFunc(w.sending, func(e *extent) bool { return e.started }) {
		if err := w.wait(ctx); err != nil {
			return nil, err
		}
	}
	set := slices.Clone(w.unstable)
	slices.SortFunc(set, func(a, b *extent) int { return cmp.Compare(a.seq, b.seq) })
	for _, e := range set {
		// An interrupted replay must not pass for a complete one. writeExtent resets the flag.
		e.lost, e.resent = true, true
	}
	return set, nil
}

// resume reverses pause.
func (w *writeback) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.paused = false
	w.changed()
}
