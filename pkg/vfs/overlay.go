package vfs

import (
	"iter"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// A server that restarts loses the data that is not committed. The extents still have this data,
// and the next COMMIT finds the new verifier and replays it. Until then the server returns too few
// bytes, old bytes, and too small a size. Reads and attributes therefore include the extents.
//
// When another client truncates a file with extents, its change appears after the COMMIT.
// Close-to-open makes no promise before. A truncation by this mount begins with a sync, and the
// kernel sends no WRITE of the file meanwhile, so no extent is older than the truncation.

// maxRereads bounds the READs of one request while replays of the file end.
const maxRereads = 64

// all returns the extents. Where two overlap, the later one has the newer data: an extent is sent
// only when the earlier extents that it overlaps have left sending. The caller holds mu.
func (w *writeback) all() iter.Seq[*extent] {
	return func(yield func(*extent) bool) {
		for _, e := range w.unstable {
			if !yield(e) {
				return
			}
		}
		for _, e := range w.sending {
			if !yield(e) {
				return
			}
		}
		if w.filling != nil {
			yield(w.filling)
		}
	}
}

// end returns the end of the data that is not known to be stable, or 0.
func (w *writeback) end() uint64 {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.endLocked()
}

// endLocked is end for callers that hold mu.
func (w *writeback) endLocked() (end uint64) {
	for e := range w.all() {
		end = max(end, e.end())
	}
	return end
}

// releasedLost returns the number of replayed extents that were released so far.
func (w *writeback) releasedLost() uint64 {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.replayed
}

// readCurrent is readFull with the data of the extents. When a replayed extent was released during
// the READ, the server may have executed the READ before the replay: readCurrent then reads again.
func (fs *FS) readCurrent(r *request, h *fileHandle, in *fuse.ReadIn, t *target) (n int, err error) {
	for range maxRereads {
		before := h.ino.data.Load().releasedLost()
		if n, err = fs.readFull(r, h, in, t); err != nil {
			return 0, err
		}
		var ok bool
		if n, ok = h.ino.data.Load().overlay(t.all, int(in.Size), n, in.Offset, before); ok {
			return n, nil
		}
	}
	return 0, fs.invalidReply(h.ino, "the write verifier keeps changing during a READ")
}

// overlay copies the extents over the n bytes in mem that were read at off. When the extents end
// behind these bytes, overlay appends their data, and zeros for holes, to at most size bytes.
// overlay returns the new number of bytes. ok is false when a replayed extent was released since
// before.
func (w *writeback) overlay(mem pieces, size, n int, off, before uint64) (_ int, ok bool) {
	if w == nil {
		return n, true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.replayed != before {
		return 0, false
	}
	if end := w.endLocked(); end > off+uint64(n) {
		size = int(min(uint64(size), end-off))
		mem.zero(n, size)
		n = size
	}
	for e := range w.all() {
		e.copyTo(mem, n, off)
	}
	return n, true
}

// copyTo copies the part of the extent that is in the n bytes of mem, which begin at off.
func (e *extent) copyTo(mem pieces, n int, off uint64) {
	from, to := max(e.off, off), min(e.end(), off+uint64(n))
	if from < to {
		mem.copyAt(int(from-off), e.buf[from-e.off:to-e.off])
	}
}
