package fusefs

import (
	"context"
	"sync"
	"syscall"
	"time"
)

// An open and a removal of the same file on this mount come in one order or the other, although the server would let them overlap:
//
//	open first:     the removal sees that the file is open, and hides it (remove.go)
//	removal first:  the open waits for the removal's reply, and then finds the file gone
//
// Which it is, is decided under inodeTable.mu, where the opens and the removals are counted; no lock is held during the calls.

// openFile counts the file as open.
func (t *inodeTable) openFile(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens++
	t.files++
}

// closeFile returns the number of times that the file is still open.
func (t *inodeTable) closeFile(ino *inode) int {
	t.mu.Lock()
	t.files--
	t.mu.Unlock()
	return t.close(ino)
}

// awaitRemovals returns when no removal is under way that did not see ino open. No such removal begins once openFile was called.
func (t *inodeTable) awaitRemovals(ctx context.Context, ino *inode) error {
	t.mu.Lock()
	for ino.removals > 0 || t.blind > 0 {
		if t.removed == nil {
			t.removed = make(chan struct{})
		}
		removed := t.removed
		t.mu.Unlock()
		select {
		case <-removed:
		case <-ctx.Done():
			return syscall.EINTR
		}
		t.mu.Lock()
	}
	t.mu.Unlock()
	return nil
}

// beginBlind begins a removal without a look at what is removed. It returns false, and nothing begins, when any file is open.
func (t *inodeTable) beginBlind() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.files > 0 {
		return false
	}
	t.blind++
	return true
}

func (t *inodeTable) endBlind() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blind--
	t.removalEnded()
}

// beginRemoval begins a removal of ino. It returns false, and nothing begins, when ino is open.
func (t *inodeTable) beginRemoval(ino *inode) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ino.opens > 0 {
		return false
	}
	ino.removals++
	return true
}

func (t *inodeTable) endRemoval(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.removals--
	t.removalEnded()
}

// removalEnded is called with mu held.
func (t *inodeTable) removalEnded() {
	if t.removed != nil {
		close(t.removed)
		t.removed = nil
	}
}

// When an open finds its file gone, or the symbolic link on the way to it, the kernel looks the name up anew and opens what it finds, once. If that
// were gone again, the caller would see ESTALE, so that what such a lookup finds counts as open for a moment.

const (
	// reopenTime is for how long a lookup may follow an open that failed, and an open such a lookup.
	reopenTime = time.Second
	// maxReopens bounds the threads that are remembered.
	maxReopens = 256
	// heldTries bounds how often a name may stand for another file by the time that the file counts as open.
	heldTries = 16
)

// reopens remembers the threads whose open found its file gone.
type reopens struct {
	mu    sync.Mutex
	until map[uint32]time.Time
}

// expect notes that the thread is about to look up and open again.
func (o *reopens) expect(pid uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.until == nil || len(o.until) >= maxReopens {
		o.until = make(map[uint32]time.Time)
	}
	o.until[pid] = time.Now().Add(reopenTime)
}

// take tells whether the thread's next open would be its last try, once.
func (o *reopens) take(pid uint32) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	until, ok := o.until[pid]
	delete(o.until, pid)
	return ok && time.Now().Before(until)
}

// hold counts a file as open for a moment, and waits for the removals that did not see that.
func (fs *FS) hold(ctx context.Context, ino *inode) error {
	if err := fs.claim(ctx, ino); err != nil {
		return err
	}
	fs.work.Go(func() {
		t := time.NewTimer(reopenTime)
		defer t.Stop()
		select {
		case <-t.C:
		case <-fs.aborted:
		}
		fs.disclaim(ino)
	})
	return nil
}
