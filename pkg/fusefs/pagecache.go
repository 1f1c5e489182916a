package fusefs

import (
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// The kernel caches the pages of files. They must show the changes of other clients and need not be
// read again after changes of this mount. The kernel cannot distinguish the two: with
// AUTO_INVAL_DATA it drops all pages of a file when the mtime changes. The file system therefore
// uses EXPLICIT_INVAL_DATA and tells the kernel when to drop pages:
//
//   - an open that finds a change of another client does not set KEEP_CACHE (file.go);
//   - a GETATTR or LOOKUP that finds one drops the pages before the kernel gets its reply;
//   - the kernel serves read(2) from its pages without a request, so the attributes of open files
//     are revalidated when they expire, as Linux's NFS client does during read(2).
//
// Where attributes are not cached (noac, actimeo=0), AUTO_INVAL_DATA is right: the kernel then
// requests the attributes before each read(2).

// pageWatchInterval is the interval of the checks for expired attributes of open files. The
// shortest attribute cache time of nfs(5), except 0, is one second.
const pageWatchInterval = time.Second

// maxPageChecks bounds the checks in progress. The check of one file lasts as long as the server
// answers NFS3ERR_JUKEBOX for it.
const maxPageChecks = 64

// explicitPages reports whether the file system decides when the kernel drops cached pages.
func (fs *FS) explicitPages() bool { return !fs.opts.NoAC && fs.opts.AcRegMax > 0 }

// changedByOther reports whether the difference between two states of an object shows a change of
// its content by another client. Renames, links and removals by this mount change the ctime of
// objects whose attributes their replies do not contain. The ctime alone is therefore no sign when
// there was a rename or removal after the call that returned the older state. since is FS.clock at
// that call.
func (fs *FS) changedByOther(older, newer stamp, since uint64) bool {
	if older.size != newer.size || older.mtime != newer.mtime {
		return true
	}
	return older.ctime != newer.ctime && since >= max(fs.lastRename.Load(), fs.lastRemoval.Load())
}

// dropStalePages makes the kernel drop its cached pages of an open file when another client has
// changed the file. The kernel waits for READs of these pages, so a handler of a READ or WRITE must
// not call dropStalePages.
func (fs *FS) dropStalePages(ino *inode) {
	if !fs.explicitPages() || fs.inodes.opensOf(ino) == 0 {
		return // the next open asks the server
	}
	ino.mu.Lock()
	stale := ino.attr.Type == nfs3.NF3REG && ino.known && ino.valid && !ino.pageStampValid
	if stale {
		ino.pageStamp, ino.pageStampValid = stampOf(&ino.attr), true
	}
	ino.mu.Unlock()
	if s := fs.server.Load(); stale && s != nil {
		fs.Counters.CacheDrops.Add(1)
		s.InodeNotify(ino.id, 0, 0)
	}
}

// A pageWatch revalidates the attributes of files that are open for buffered reads.
type pageWatch struct {
	files int           // open files to watch
	stop  chan struct{} // closed when files becomes 0, or by endWatch
	ended bool          // the FS is being closed

	checked map[*inode]bool // files whose checks are in progress
}

// watchFile begins to watch an open file. The caller holds FS.handles.
func (fs *FS) watchFile() {
	w := &fs.handles.watch
	if w.files++; w.files == 1 && !w.ended {
		stop := make(chan struct{})
		w.stop = stop
		fs.spawn(func() { fs.watchPages(stop) })
	}
}

// stopWatching ends the watch of a file before it is closed.
func (fs *FS) stopWatching(h *fileHandle) {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	if h.watched && !h.closed {
		h.watched = false
		fs.unwatchFile()
	}
}

// unwatchFile reverses watchFile. The caller holds FS.handles.
func (fs *FS) unwatchFile() {
	w := &fs.handles.watch
	if w.files--; w.files == 0 && !w.ended {
		close(w.stop)
	}
}

// endWatch ends the watch of all files. The kernel sends no RELEASE after the end of its
// connection.
func (fs *FS) endWatch() {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	w := &fs.handles.watch
	if !w.ended && w.files > 0 {
		close(w.stop)
	}
	w.ended = true
}

// watchPages checks the open files until stop is closed or the mount is aborted.
func (fs *FS) watchPages(stop <-chan struct{}) {
	tick := time.NewTicker(pageWatchInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, h := range fs.expiredFiles() {
				fs.spawn(func() { fs.checkPages(h) })
			}
		case <-stop:
			return
		case <-fs.aborted:
			return
		}
	}
}

// checkPages gets the attributes of an open file that expiredFiles returned, and drops its pages if
// another client has changed it.
func (fs *FS) checkPages(h *fileHandle) {
	defer func() {
		fs.handles.Lock()
		delete(fs.handles.watch.checked, h.ino)
		fs.handles.Unlock()
	}()
	var a nfs3.Attr
	if _, err := fs.fetch(background{fs}, h.cred, h.ino, &a); err == nil {
		fs.dropStalePages(h.ino)
	} else if errno(err) == syscall.ESTALE {
		fs.stopWatching(h) // the file is gone, and READs fail
	}
}

// expiredFiles returns watched files whose attributes have expired, one for each inode, and counts
// them as checked.
func (fs *FS) expiredFiles() []*fileHandle {
	fs.handles.Lock()
	defer fs.handles.Unlock()
	w := &fs.handles.watch
	if w.checked == nil {
		w.checked = make(map[*inode]bool)
	}
	var expired []*fileHandle
	for _, h := range fs.handles.files {
		if len(w.checked) == maxPageChecks {
			break
		}
		if !h.watched || w.checked[h.ino] {
			continue
		}
		h.ino.mu.Lock()
		if h.ino.pending == 0 && !fs.freshLocked(h.ino) {
			w.checked[h.ino] = true
			expired = append(expired, h)
		}
		h.ino.mu.Unlock()
	}
	return expired
}
