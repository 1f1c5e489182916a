package fusefs

import (
	"context"
	"slices"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

const (
	// commitExtents is the number of UNSTABLE extents of one file at which they are committed in
	// the background.
	commitExtents = 16
	// unstableReplays is how often data is sent again UNSTABLE after a verifier changed; then it is
	// sent FILE_SYNC.
	unstableReplays = 2
	// maxReplays is how often it is sent again at all: a server that neither keeps a verifier nor
	// obeys FILE_SYNC cannot store anything.
	maxReplays = 6
)

// sync brings everything written to the file so far to stable storage: it returns when the server
// has confirmed it, or has refused it, which fileHandle.report tells. The error is EINTR when ctx
// ended before; then nothing is given up.
func (fs *FS) sync(ctx context.Context, ino *inode) error {
	w := &ino.wb
	w.mu.Lock()
	if w.clean() {
		w.mu.Unlock()
		return nil
	}
	for w.syncing {
		if err := w.wait(ctx); err != nil {
			w.mu.Unlock()
			return err
		}
	}
	w.syncing = true
	if w.filling != nil && len(w.sending) == 0 && len(w.unstable) == 0 {
		// One WRITE that is stable at once costs less than a WRITE and a COMMIT.
		fs.seal(ino, nfs3.FileSync)
	}
	w.mu.Unlock()

	err := fs.push(ctx, ino)
	for replays := 0; err == nil; replays++ {
		var again bool
		if again, err = fs.commit(ctx, ino, replays); !again {
			break
		}
	}

	w.mu.Lock()
	w.syncing = false
	w.changed()
	w.mu.Unlock()
	return err
}

// commit makes one COMMIT call for the extents that are unstable now. again is true when the
// verifier had changed, and the data was sent once more.
func (fs *FS) commit(ctx context.Context, ino *inode, replays int) (again bool, err error) {
	w := &ino.wb
	w.mu.Lock()
	set := slices.Clone(w.unstable)
	w.mu.Unlock()
	if len(set) == 0 {
		return false, nil
	}
	var res nfs3.CommitResult
	for try := 0; ; try++ {
		fs.Counters.Commits.Add(1)
		start := fs.tick()
		// Offset 0 and count 0 are the whole file (RFC 1813 §3.3.21).
		err = fs.client.Commit(ctx, set[0].cred, ino.fh, 0, 0, &res)
		if fs.again(ctx, err, try) {
			continue
		}
		if err == nil {
			fs.absorbWcc(ino, &res.Wcc, start, false)
		}
		break
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return false, syscall.EINTR
	case err != nil:
		fs.giveUp(ino, set, fs.nodeErr(ino, err))
		return false, nil
	case !slices.ContainsFunc(set, func(e *extent) bool { return e.lost || e.verf != res.Verf }):
		fs.drop(ino, set)
		return false, nil
	case replays >= maxReplays:
		fs.giveUp(ino, set, syscall.EIO)
		return false, nil
	}
	stable := nfs3.Unstable
	if replays >= unstableReplays {
		stable = nfs3.FileSync
	}
	return true, fs.replay(ctx, ino, stable)
}

// drop forgets extents that are stable now.
func (fs *FS) drop(ino *inode, set []*extent) {
	w := &ino.wb
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range set {
		w.unstable = without(w.unstable, e)
		fs.release(ino, e)
	}
	w.changed()
}

// giveUp forgets extents whose data is lost, and remembers why.
func (fs *FS) giveUp(ino *inode, set []*extent, err error) {
	fs.Counters.WriteErrors.Add(uint64(len(set)))
	w := &ino.wb
	w.mu.Lock()
	w.fail(err)
	w.mu.Unlock()
	fs.drop(ino, set)
}

// replay sends all unstable extents again, in the order in which they were written: one sent after
// the server restarted is on it already, but an older one that is sent again now may overwrite it.
// No other WRITE to the file is under way meanwhile.
func (fs *FS) replay(ctx context.Context, ino *inode, stable nfs3.StableHow) error {
	fs.Counters.Replays.Add(1)
	w := &ino.wb
	w.mu.Lock()
	w.held = true
	defer func() {
		w.mu.Lock()
		w.held = false
		w.changed()
		w.mu.Unlock()
	}()
	for slices.ContainsFunc(w.sending, func(e *extent) bool { return e.started }) {
		if err := w.wait(ctx); err != nil {
			w.mu.Unlock()
			return err
		}
	}
	set := slices.Clone(w.unstable)
	slices.SortFunc(set, func(a, b *extent) int {
		if a.seq < b.seq {
			return -1
		}
		return 1
	})
	for _, e := range set {
		// until it is sent: an interrupted replay must not be taken for a complete one
		e.lost = true
	}
	w.mu.Unlock()

	for _, e := range set {
		fs.Counters.ReplayedBytes.Add(uint64(e.n))
		var wcc nfs3.WccData
		committed, start, err := fs.writeExtent(ctx, ino, e, stable, &wcc)
		switch {
		case err != nil && ctx.Err() != nil:
			e.lost = true
			return syscall.EINTR
		case err != nil:
			fs.giveUp(ino, []*extent{e}, err)
			continue
		case stable == nfs3.FileSync && committed == nfs3.FileSync:
			fs.drop(ino, []*extent{e})
		}
		fs.absorbWcc(ino, &wcc, start, false)
	}
	return nil
}
