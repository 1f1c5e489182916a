package fusefs

import "context"

// A pageRange is a range of a file whose cached pages the kernel must drop.
type pageRange struct{ off, end uint64 }

func (p pageRange) empty() bool { return p.off == p.end }

// dropPages makes the kernel drop its cached pages of a rejected extent, as Linux's NFS client
// does. Reads then return the server's data. dropPages only starts the work: the kernel waits for
// the locks of the pages, and a WRITE or READ that is being handled holds them. The caller holds
// writeback.mu.
func (fs *FS) dropPages(ino *inode, e *extent) {
	ino.mu.Lock()
	ino.sizeUnknown = true
	ino.mu.Unlock()
	fs.invalidateAttr(ino)
	w := &ino.wb
	if w.rejected.empty() {
		w.rejected = pageRange{e.off, e.end()}
	}
	w.rejected = pageRange{min(w.rejected.off, e.off), max(w.rejected.end, e.end())}
	if !w.dropping {
		w.dropping = true // one goroutine for each file
		fs.spawn(func() { fs.dropRejected(ino) })
	}
}

// dropRejected sends the notifications of one file. It holds no lock meanwhile.
func (fs *FS) dropRejected(ino *inode) {
	for p := ino.wb.takeRejected(); !p.empty(); p = ino.wb.takeRejected() {
		if s := fs.server.Load(); s != nil {
			s.InodeNotify(ino.id, int64(p.off), int64(p.end-p.off))
		}
	}
}

// takeRejected returns the range to drop. An empty range ends dropRejected.
func (w *writeback) takeRejected() pageRange {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.rejected
	w.rejected = pageRange{}
	if p.empty() {
		w.dropping = false
		w.changed()
	}
	return p
}

// awaitDropped waits until the kernel has dropped the pages of rejected data. The request must hold
// no page lock: it is FSYNC or FLUSH, not READ or WRITE.
func (w *writeback) awaitDropped(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.dropping {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
