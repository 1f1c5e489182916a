package data

import (
	"context"
)

// A pageRange is a range of a file whose cached pages the kernel must drop.
type pageRange struct{ off, end uint64 }

func (p pageRange) empty() bool { return p.off == p.end }

// dropPages makes the kernel drop its cached pages of a rejected extent, as Linux's NFS client
// does. Reads then return the server's data. The caller holds File.mu.
func (f *File) dropPages(e *extent) {
	f.s.cfg.Attrs.Rejected(f.attrs)
	f.dropRange(pageRange{e.off, e.end()})
}

// dropRange makes the kernel drop its cached pages of a range. It only starts the work: the kernel
// waits for the locks of the pages, and a WRITE or READ that is being handled holds them. The
// caller holds File.mu.
func (f *File) dropRange(p pageRange) {
	if f.toDrop.empty() {
		f.toDrop = p
	}
	f.toDrop = pageRange{min(f.toDrop.off, p.off), max(f.toDrop.end, p.end)}
	if !f.dropping {
		f.dropping = true // one goroutine for each file
		f.s.cfg.Spawn(f.sendRanges)
	}
}

// sendRanges sends the notifications of one file. It holds no lock meanwhile.
func (f *File) sendRanges() {
	for p := f.takeDrop(); !p.empty(); p = f.takeDrop() {
		f.s.cfg.DropPages(f, p.off, p.end-p.off)
	}
}

// DropPages makes the kernel drop its cached pages of a range. It does not wait, see AwaitDropped.
func (f *File) DropPages(off, end uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropRange(pageRange{off, end})
}

// takeDrop returns the range to drop. An empty range ends sendRanges.
func (f *File) takeDrop() pageRange {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.toDrop
	f.toDrop = pageRange{}
	if p.empty() {
		f.dropping = false
		f.changed()
	}
	return p
}

// AwaitDropped waits until the kernel has dropped the pages of DropPages. The request must hold no
// page lock: it is FSYNC, FLUSH, or a WRITE past the page cache.
func (f *File) AwaitDropped(ctx context.Context) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.dropping {
		if err := f.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
