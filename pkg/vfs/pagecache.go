package vfs

import (
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// The kernel caches the pages of files. They must show the changes of other clients and need not be
// read again after changes of this mount. The kernel cannot distinguish the two: with
// AUTO_INVAL_DATA it drops all pages of a file when the mtime changes. The file system therefore
// uses EXPLICIT_INVAL_DATA and tells the kernel when to drop pages:
//
//   - an open that finds a change of another client drops the pages, and a lock always does;
//   - a write past the pages (O_DIRECT, O_APPEND) drops those that it changes (droppages.go);
//   - a GETATTR or LOOKUP that finds one drops the pages before the kernel gets its reply;
//   - the kernel serves read(2) from its pages without a request, so the attributes of open files
//     are revalidated when they expire, as Linux's NFS client does during read(2);
//   - the handler of a READ or WRITE whose reply shows a change cannot drop pages, so the next of
//     these checks does.
//
// Where attributes are not cached (noac, actimeo=0), AUTO_INVAL_DATA is right: the kernel then
// requests the attributes before each read(2). It is also used for a guest, whose kernel cannot be
// told to drop pages.

// pageWatchInterval is the interval of the checks for expired attributes of open files. The
// shortest attribute cache time of nfs(5), except 0, is one second.
const pageWatchInterval = time.Second

// maxPageChecks bounds the checks in progress. The check of one file lasts as long as the server
// answers NFS3ERR_JUKEBOX for it.
const maxPageChecks = 64

// explicitPages reports whether the file system decides when the kernel drops cached pages.
func (fs *FS) explicitPages() bool { return !fs.opts.NoAC && fs.opts.AcRegMax > 0 && !fs.opts.Guest }

// revalidate reports whether the kernel's cached pages match the attributes a, which are new from
// the server. If they do not, revalidate makes the kernel drop the pages. It records a as the state
// of the pages from now on. A handler of a READ or WRITE must not call revalidate, see
// dropStalePages.
//
// The kernel also drops the pages when the reply to an open does not set KEEP_CACHE. That is too
// late for another open or lock that finds the recorded state before the kernel handles the reply.
func (fs *FS) revalidate(ino *inode, a *nfs.Attr, cacheable bool) bool {
	unchanged, drop := ino.attr.Revalidate(a, cacheable)
	if drop {
		fs.sendDrop(ino)
	}
	return unchanged
}

// sendDrop makes the kernel discard its cached pages and attributes of a file. The caller has
// counted it in pageDrops.
//
// While several processes lock or open the file, the kernel may ignore the attributes that it then
// gets, see kernel.Device.ExtendSize. The size is therefore set first.
func (fs *FS) sendDrop(ino *inode) {
	fs.Counters.CacheDrops.Add(1)
	if d := fs.device.Load(); d != nil {
		_ = d.ExtendSize(ino.id, fs.knownSize(ino))
		_ = d.InvalInode(ino.id, 0, 0)
	}
	ino.attr.Dropped()
}

// knownSize returns the size of a file on the server, or 0 if it is unknown.
func (fs *FS) knownSize(ino *inode) uint64 {
	v := fs.attrs.View(&ino.attr)
	if v.Type != nfs.Regular || !v.Known || !v.Valid || v.Pending {
		return 0
	}
	return v.Size
}

// dropCache counts and sends a drop.
func (fs *FS) dropCache(ino *inode) {
	ino.attr.BeginDrop()
	fs.sendDrop(ino)
}

// dropStalePages makes the kernel drop its cached pages of an open file when another client has
// changed the file. The kernel waits for READs of these pages, so a handler of a READ or WRITE must
// not call dropStalePages.
func (fs *FS) dropStalePages(ino *inode) {
	if !fs.explicitPages() || fs.inodes.opensOf(ino) == 0 {
		return // the next open asks the server
	}
	if ino.attr.BeginDropOutdated() {
		fs.sendDrop(ino)
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
	var a nfs.Attr
	if _, err := fs.fetch(background{fs}, h.cred, h.ino, &a); err == nil {
		fs.dropStalePages(h.ino)
	} else if nfs.CallErrno(err) == syscall.ESTALE {
		fs.stopWatching(h) // the file is gone, and READs fail
	}
}

// expiredFiles returns watched files whose attributes have expired, or whose pages are known to be
// stale. It returns one file for each inode, and counts the files as checked. A program that keeps
// reading learns of changes by the attributes in the replies, which then do not expire.
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
		if fs.attrs.NeedsCheck(&h.ino.attr) {
			w.checked[h.ino] = true
			expired = append(expired, h)
		}
	}
	return expired
}
