package vfs

import (
	"context"
	"syscall"
)

// A pageRange is a range of a file whose cached pages the kernel must drop.
type pageRange struct{ off, end uint64 }

func (p pageRange) empty() bool { return p.off == p.end }

// dropPages makes the kernel drop its cached pages of a rejected extent, as Linux's NFS client
// does. Reads then return the server's data. The caller holds writeback.mu.
func (fs *FS) dropPages(ino *inode, e *extent) {
	fs.attrs.Rejected(&ino.attr)
	fs.dropRange(ino, pageRange{e.off, e.end()})
}

// dropWritten makes the kernel drop its cached pages of data that was written past them. Kernels
// since 6.6 drop these pages before the write, but a reader can fill them again meanwhile.
//
// After a write with O_DIRECT, dropWritten does not wait for the drop. The write can be one of the
// kernel's background requests, and a READ that holds the pages can wait for these requests.
func (fs *FS) dropWritten(r *request, h *fileHandle, flags uint32, p pageRange) {
	ino, w := h.ino, h.ino.wb()
	if !fs.explicitPages() || !fs.attrs.View(&ino.attr).Buffered {
		return
	}
	w.mu.Lock()
	fs.dropRange(ino, p)
	w.mu.Unlock()
	if flags&syscall.O_DIRECT == 0 {
		_ = w.awaitDropped(r) // the data is written nevertheless
	}
}

// dropRange makes the kernel drop its cached pages of a range. It only starts the work: the kernel
// waits for the locks of the pages, and a WRITE or READ that is being handled holds them. The
// caller holds writeback.mu.
func (fs *FS) dropRange(ino *inode, p pageRange) {
	w := ino.wb()
	if w.toDrop.empty() {
		w.toDrop = p
	}
	w.toDrop = pageRange{min(w.toDrop.off, p.off), max(w.toDrop.end, p.end)}
	if !w.dropping {
		w.dropping = true // one goroutine for each file
		fs.spawn(func() { fs.sendRanges(ino) })
	}
}

// sendRanges sends the notifications of one file. It holds no lock meanwhile.
func (fs *FS) sendRanges(ino *inode) {
	for p := ino.wb().takeDrop(); !p.empty(); p = ino.wb().takeDrop() {
		if d := fs.device.Load(); d != nil {
			_ = d.InvalInode(ino.id, int64(p.off), int64(p.end-p.off))
		}
	}
}

// takeDrop returns the range to drop. An empty range ends sendRanges.
func (w *writeback) takeDrop() pageRange {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.toDrop
	w.toDrop = pageRange{}
	if p.empty() {
		w.dropping = false
		w.changed()
	}
	return p
}

// awaitDropped waits until the kernel has dropped the pages of dropRange. The request must hold no
// page lock: it is FSYNC, FLUSH, or a WRITE past the page cache.
func (w *writeback) awaitDropped(ctx context.Context) error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.dropping {
		if err := w.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
