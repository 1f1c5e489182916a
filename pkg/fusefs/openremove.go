package fusefs

import (
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// An open and a removal of the same file on this mount come in one order or the other, although the
// server would let them overlap:
//
//	open first:     the removal sees that the file is open, and hides it (remove.go)
//	removal first:  the open waits for the removal's reply, and then begins anew with the name, as a server may still answer for the file
//
// Which it is, is decided under inodeTable.mu, where the opens and the removals are counted; no
// lock is held during the calls. While no file is open, removals spare themselves the LOOKUP that
// tells what they remove.

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

// A blindRemoval is one under way without a look at what is removed, begun while no file was open,
// or while the kernel did not know what is removed.
type blindRemoval struct {
	dir  *inode
	name string
}

// blindPatience is how long an open waits for blind removals before it asks the server what they
// are about: freeing a large file may take a server long, and is no affair of those who open
// others.
const blindPatience = 20 * time.Millisecond

// awaitRemovals returns when no removal of ino is under way that did not see it open. No such
// removal begins once openFile was called. waited is true when there was one, or may have been.
func (fs *FS) awaitRemovals(r *request, ino *inode) (waited bool, err error) {
	t := &fs.inodes
	t.mu.Lock()
	if ino.removals == 0 && len(t.blind) == 0 { // as nearly always
		t.mu.Unlock()
		return false, nil
	}
	t.mu.Unlock()
	patience := time.NewTimer(blindPatience)
	defer patience.Stop()
	others := make(map[*blindRemoval]bool) // those known to be about something else
	for {
		t.mu.Lock()
		mine := ino.removals > 0
		var unknown []*blindRemoval
		for _, b := range t.blind {
			if !others[b] {
				unknown = append(unknown, b)
			}
		}
		if t.removed == nil {
			t.removed = make(chan struct{})
		}
		removed := t.removed
		t.mu.Unlock()
		if !mine && len(unknown) == 0 {
			return waited, nil
		}
		select {
		case <-removed:
			waited = true
		case <-patience.C:
			for _, b := range unknown {
				target, err := fs.targetOf(r, b.dir, b.name)
				others[b] = err == nil && target != ino
			}
		case <-r.Done():
			return waited, syscall.EINTR
		}
	}
}

// beginBlind begins a removal without a look at what is removed. It returns nil, and nothing
// begins, when any file is open.
func (t *inodeTable) beginBlind(dir *inode, name string) *blindRemoval {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.files > 0 {
		return nil
	}
	b := &blindRemoval{dir, name}
	t.blind = append(t.blind, b)
	return b
}

// findOrBlind is the inode of a handle, or, when there is none, a blind removal of the name that
// stands for it.
func (t *inodeTable) findOrBlind(fh nfs3.FH, dir *inode, name string) (*inode, *blindRemoval) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ino := t.byFH[fh]; ino != nil {
		return ino, nil
	}
	b := &blindRemoval{dir, name}
	t.blind = append(t.blind, b)
	return nil, b
}

func (t *inodeTable) endBlind(b *blindRemoval) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blind = slices.DeleteFunc(t.blind, func(c *blindRemoval) bool { return c == b })
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

// The hidden name of a removed file goes behind the file's last close, for which the kernel does
// not wait. Who removes the directory next would find it not empty, so that rmdir(2) waits for
// names that are about to go.

// hiddenPatience is how long it waits for a close that the kernel may not have passed on yet.
const hiddenPatience = 100 * time.Millisecond

func (t *inodeTable) hide(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.hidden++
	dir.hid = true
}

// leave begins the removal of a hidden name, and left ends it.
func (t *inodeTable) leave(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.leaving++
}

func (t *inodeTable) left(dir *inode) {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir.leaving--
	dir.hidden--
	t.removalEnded()
}

// awaitHidden returns true when the directory had hidden names, perhaps until just now, and has
// none any more; false when it has those of files that stay open.
func (fs *FS) awaitHidden(r *request, dir *inode) bool {
	t := &fs.inodes
	patience := time.NewTimer(hiddenPatience)
	defer patience.Stop()
	for impatient := false; ; {
		t.mu.Lock()
		hid, hidden, leaving := dir.hid, dir.hidden, dir.leaving
		if t.removed == nil {
			t.removed = make(chan struct{})
		}
		removed := t.removed
		t.mu.Unlock()
		if hidden == 0 {
			return hid
		}
		if impatient && leaving == 0 {
			return false
		}
		select {
		case <-removed:
		case <-patience.C:
			impatient = true
		case <-r.Done():
			return false
		}
	}
}

// When an open finds its file gone, or the symbolic link on the way to it, the kernel looks the
// name up anew and opens what it finds, once. If that were gone again, the caller would see ESTALE,
// so that what such lookups find counts as open until the open comes. The kernel may look up more
// than once: when the name stands for another file than it knew, it asks again.

const (
	// reopenTime is for how long lookups may follow an open that failed, and an open such a lookup.
	reopenTime = 3 * time.Second
	// reopenLookups bounds the lookups of files and symbolic links on the way of one open.
	reopenLookups = 16
	// maxReopens bounds the threads that are remembered.
	maxReopens = 256
	// heldTries bounds how often a name may stand for another file by the time that the file counts
	// as open.
	heldTries = 16
)

// A reopen is the second try of an open.
type reopen struct {
	until   time.Time
	lookups int           // so far
	over    chan struct{} // closed when the open was tried, or will not be
}

// reopens remembers the threads whose open found its file gone.
type reopens struct {
	mu sync.Mutex
	of map[uint32]*reopen
}

// expect notes that the thread is about to look up and open again.
func (o *reopens) expect(pid uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of == nil {
		o.of = make(map[uint32]*reopen)
	}
	if len(o.of) >= maxReopens {
		for pid := range o.of {
			o.end(pid)
		}
	}
	o.end(pid)
	o.of[pid] = &reopen{until: time.Now().Add(reopenTime), over: make(chan struct{})}
}

// lookup tells whether the thread's next open would be its last try: then it is not nil.
func (o *reopens) lookup(pid uint32) *reopen {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.of[pid]
	if e == nil {
		return nil
	}
	if e.lookups++; e.lookups > reopenLookups || !time.Now().Before(e.until) {
		o.end(pid)
		return nil
	}
	return e
}

// over says that the thread has made its open, or has nothing to open.
func (o *reopens) over(pid uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end(pid)
}

// end is called with mu held.
func (o *reopens) end(pid uint32) {
	if e := o.of[pid]; e != nil {
		close(e.over)
		delete(o.of, pid)
	}
}

// hold counts a file as open until the open is tried, and waits for the removals that did not see
// that.
func (fs *FS) hold(r *request, ino *inode, e *reopen) error {
	if _, err := fs.claim(r, ino); err != nil {
		return err
	}
	fs.work.Go(func() {
		t := time.NewTimer(time.Until(e.until))
		defer t.Stop()
		select {
		case <-e.over:
		case <-t.C:
		case <-fs.aborted:
		}
		fs.disclaim(ino)
	})
	return nil
}
