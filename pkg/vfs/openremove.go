package vfs

import (
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// The server would allow an open and a removal of the same file to overlap. On this mount they run
// in one of two orders:
//
//	open first:     the removal finds the file open and hides it (remove.go)
//	removal first:  the open waits for the removal's reply and then repeats the lookup of the name,
//	                because the server may still accept the removed file's handle
//
// inodeTable.mu guards the counts of opens and removals and so decides the order. No lock is held
// during the calls. While no file is open, a removal skips the LOOKUP that would find the object it
// removes.

// openFile counts the file as open.
func (t *inodeTable) openFile(ino *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino.opens++
	t.files++
}

// closeFile ends one open and returns the number of remaining opens of the file.
func (t *inodeTable) closeFile(ino *inode) int {
	t.mu.Lock()
	t.files--
	t.mu.Unlock()
	return t.close(ino)
}

// An unresolvedRemoval is a removal in flight whose object is not known. Unresolved removals begin
// while no file is open, or while the kernel does not know the object.
type unresolvedRemoval struct {
	cred []byte // of the request that removes
	dir  *inode
	name string
	// names of the object of a RENAME; nil and "" for a REMOVE
	fromDir  *inode
	fromName string
	// target is the object that name stood for in the reply to the last LOOKUP of this mount; the
	// zero value if the name cache does not have the name.
	target nfs.Handle
}

// unresolvedTimeout is how long an open waits for unresolved removals. Then the open asks the
// server which objects they remove, and again after twice the time, up to unresolvedLongest. A
// server may take long to free a large file, and opens of other files must not wait for it.
const (
	unresolvedTimeout = 20 * time.Millisecond
	unresolvedLongest = time.Second
)

// awaitRemovals waits for the removals of ino that began before openFile. No such removal begins
// after openFile. waited is true when there was, or may have been, a removal of ino.
func (fs *FS) awaitRemovals(r *request, ino *inode) (waited bool, err error) {
	mine, unknown, removalDone := fs.inodes.removalsOf(ino, nil)
	if !mine && len(unknown) == 0 { // the usual case
		return false, nil
	}
	wait := unresolvedTimeout
	timer := time.NewTimer(wait)
	defer timer.Stop()
	others := make(map[*unresolvedRemoval]bool) // false while the object may be ino
	for mine || len(unknown) > 0 {
		waited = waited || mine
		for _, b := range unknown {
			others[b] = false
		}
		select {
		case <-removalDone:
		case <-timer.C:
			for _, b := range unknown {
				others[b] = fs.removesOther(r, b, ino)
			}
			wait = min(2*wait, unresolvedLongest)
			timer.Reset(wait)
		case <-r.Done():
			return waited, syscall.EINTR
		}
		mine, unknown, removalDone = fs.inodes.removalsOf(ino, others)
	}
	for _, other := range others {
		waited = waited || !other
	}
	return waited, nil
}

// removalsOf reports whether a removal of ino is in flight, and returns the unresolved removals
// except those of others. done is closed when a removal ends.
func (t *inodeTable) removalsOf(ino *inode, others map[*unresolvedRemoval]bool) (mine bool,
	unknown []*unresolvedRemoval, done <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.unresolved {
		if !others[b] {
			unknown = append(unknown, b)
		}
	}
	if mine = ino.removals > 0; !mine && len(unknown) == 0 {
		return false, nil, nil
	}
	if t.removalDone == nil {
		t.removalDone = make(chan struct{})
	}
	return mine, unknown, t.removalDone
}

// removesOther asks the server whether a removal in flight is of another object than ino. It asks
// with the credential of the remover, because the caller may not have the right to search the
// directory.
//
// The server may have executed the removal already. The name then does not exist, or stands for the
// renamed object. In this case the last LOOKUP of the name tells which object it was.
func (fs *FS) removesOther(r *request, b *unresolvedRemoval, ino *inode) bool {
	lookup := func(dir *inode, name string) (fh nfs.Handle, ok bool, err error) {
		res, err := fs.server.Lookup(r, b.cred, dir.fh, name)
		if nfs.HasStatus(err, nfs.ErrNoEnt) {
			return fh, false, nil
		}
		return res.FH, err == nil, err
	}
	another := b.target != (nfs.Handle{}) && b.target != ino.fh
	switch fh, ok, err := lookup(b.dir, b.name); {
	case err != nil || ok && fh == ino.fh:
		return false
	case !ok:
		return another
	case b.fromDir == nil:
		return true
	}
	_, ok, err := lookup(b.fromDir, b.fromName)
	return err == nil && (ok || another) // ok: RENAME was not executed before the first LOOKUP
}

// newRemoval returns the removal of a name by r.
func (fs *FS) newRemoval(r *request, dir *inode, name string) *unresolvedRemoval {
	b := &unresolvedRemoval{cred: r.cred, dir: dir, name: name}
	if node := dir.dir.Last(name); node != 0 {
		if ino := fs.inodes.get(node); ino != nil {
			b.target = ino.fh
		}
	}
	return b
}

// beginUnresolved begins a removal without a LOOKUP. beginUnresolved returns false and begins
// nothing when any file is open.
func (t *inodeTable) beginUnresolved(b *unresolvedRemoval) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.files > 0 {
		return false
	}
	t.unresolved = append(t.unresolved, b)
	return true
}

// findOrBeginUnresolved returns the inode with the handle fh. When there is none, it begins the
// unresolved removal b, whose name stands for fh.
func (t *inodeTable) findOrBeginUnresolved(fh nfs.Handle, b *unresolvedRemoval) *inode {
	t.mu.Lock()
	defer t.mu.Unlock()
	ino := t.byFH.get(fh)
	if ino == nil {
		t.unresolved = append(t.unresolved, b)
	}
	return ino
}

// endUnresolved ends b if b has begun.
func (t *inodeTable) endUnresolved(b *unresolvedRemoval) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unresolved = slices.DeleteFunc(t.unresolved, func(c *unresolvedRemoval) bool { return c == b })
	t.removalEnded()
}

// beginRemoval begins a removal of ino. beginRemoval returns false and begins nothing when ino is
// open.
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

// removalEnded wakes the goroutines that wait for removals. The caller holds mu.
func (t *inodeTable) removalEnded() {
	if t.removalDone != nil {
		close(t.removalDone)
		t.removalDone = nil
	}
}

// The hidden name of a removed file is removed after the file's last close, and the kernel does not
// wait for this removal. An rmdir(2) of the directory in between would find it not empty. rmdir
// therefore waits for hidden names that are being removed.

// hiddenTimeout is how long rmdir waits for the RELEASE of a file after its close(2). RELEASE does
// not come while a process has a copy of the descriptor, or a mapping of the file.
const hiddenTimeout = time.Second

func (t *inodeTable) addHidden(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.hidden++
	dir.hadHidden = true
}

// beginHiddenRemoval begins the removal of a hidden name, and endHiddenRemoval ends it.
func (t *inodeTable) beginHiddenRemoval(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.hiddenRemovals++
}

func (t *inodeTable) endHiddenRemoval(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.hiddenRemovals--
	dir.hidden--
	t.removalEnded()
}

// hidesOpenFile reports whether a hidden name in the directory is of a file that was not closed.
func (fs *FS) hidesOpenFile(dir *inode) bool {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	for _, h := range fs.handles.files {
		if silly := h.ino.silly.Load(); silly != nil && silly.dir == dir && !h.flushed.Load() {
			return true
		}
	}
	return false
}

// awaitHiddenRemovals waits until the directory has no hidden names. awaitHiddenRemovals returns
// true when the directory had hidden names at some time and has none now. awaitHiddenRemovals
// returns false when the files of the hidden names stay open, or when r ends.
func (fs *FS) awaitHiddenRemovals(r *request, dir *inode) bool {
	t := &fs.inodes
	fs.reopens.unpinAll() // a pin keeps a hidden name
	timer := time.NewTimer(hiddenTimeout)
	defer timer.Stop()
	for timedOut := false; ; {
		t.mu.Lock()
		hadHidden, hidden, removing := dir.hadHidden, dir.hidden, dir.hiddenRemovals
		if t.removalDone == nil {
			t.removalDone = make(chan struct{})
		}
		removalDone := t.removalDone
		t.mu.Unlock()
		if hidden == 0 {
			return hadHidden
		}
		if removing == 0 && (timedOut || fs.hidesOpenFile(dir)) {
			return false
		}
		select {
		case <-removalDone:
		case <-timer.C:
			timedOut = true
		case <-r.Done():
			return false
		}
	}
}

// When an open, or the GETATTR before it, finds that its file or a symbolic link in its path was
// removed, the kernel repeats the lookup and the open once. If the new file also disappeared, the
// caller would get ESTALE. The files that the repeated lookups find are therefore pinned until the
// open arrives. The kernel repeats a lookup again when the name stands for another file. The
// repeated open may wait for removals of other files. It asks the server whether its file still
// exists.

const (
	// reopenTime is how long after a failed open its second lookup and open are expected.
	reopenTime = 3 * time.Second
	// reopenLookups bounds the lookups of files and symbolic links in the path of one open.
	reopenLookups = 16
	// maxReopens bounds the number of remembered threads.
	maxReopens = 256
	// pinTries bounds how often a name may change to another file while the found file is being
	// pinned.
	pinTries = 16
)

// A reopen is the second attempt of an open.
type reopen struct {
	expires time.Time
	lookups int           // lookups so far
	done    chan struct{} // closed when the pins of the open end
	ended   bool          // done is closed
}

// end ends the pins of e.
func (e *reopen) end() {
	if !e.ended {
		e.ended = true
		close(e.done)
	}
}

// expected reports whether the time of e has not passed. A nil e is not expected.
func (e *reopen) expected() bool { return e != nil && time.Now().Before(e.expires) }

// reopens holds the threads whose open found a stale file.
type reopens struct {
	mu       sync.Mutex
	byThread map[uint32]*reopen
}

// expect records that the thread will repeat its lookup and open.
func (o *reopens) expect(pid uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byThread == nil {
		o.byThread = make(map[uint32]*reopen)
	}
	if len(o.byThread) >= maxReopens {
		o.finishAllLocked(true)
	}
	if len(o.byThread) >= maxReopens {
		o.finishAllLocked(false)
	}
	o.finishLocked(pid)
	o.byThread[pid] = &reopen{expires: time.Now().Add(reopenTime), done: make(chan struct{})}
}

// lookup returns the reopen of the thread when the thread's next open is its last attempt, else
// nil.
func (o *reopens) lookup(pid uint32) *reopen {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.byThread[pid]
	if e == nil {
		return nil
	}
	if e.lookups++; e.lookups > reopenLookups || !e.expected() {
		o.finishLocked(pid)
		return nil
	}
	if e.ended { // by rmdir(2) of another thread
		e.done, e.ended = make(chan struct{}), false
	}
	return e
}

// finish records that the thread has attempted its open or has nothing to open. last is true when
// the open was expected, so the kernel does not repeat it.
func (o *reopens) finish(pid uint32) (last bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	last = o.byThread[pid].expected()
	o.finishLocked(pid)
	return last
}

// unpinAll ends the pins of all threads. Their opens are still expected: the kernel does not repeat
// them.
func (o *reopens) unpinAll() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range o.byThread {
		e.end()
	}
}

// finishAllLocked is finishLocked for all threads, or only those whose time has passed.
func (o *reopens) finishAllLocked(passed bool) {
	for pid, e := range o.byThread {
		if !passed || !e.expected() {
			o.finishLocked(pid)
		}
	}
}

// finishLocked is finish for callers that hold mu.
func (o *reopens) finishLocked(pid uint32) {
	if e := o.byThread[pid]; e != nil {
		e.end()
		delete(o.byThread, pid)
	}
}

// pinUntilReopen pins a file until the open is attempted. pinUntilReopen waits for removals that
// began before.
func (fs *FS) pinUntilReopen(r *request, ino *inode, e *reopen) error {
	if _, err := fs.pin(r, ino); err != nil {
		return err
	}
	fs.spawn(func() {
		t := time.NewTimer(time.Until(e.expires))
		defer t.Stop()
		select {
		case <-e.done:
		case <-t.C:
		case <-fs.aborted:
		}
		fs.unpin(ino)
	})
	return nil
}
