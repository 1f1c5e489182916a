package data

import "iter"

// A server that restarts loses the data that is not committed. The extents still have this data,
// and the next COMMIT finds the new verifier and replays it. Until then the server returns too few
// bytes, old bytes, and too small a size. Reads and attributes therefore include the extents.
//
// When another client truncates a file with extents, its change appears after the COMMIT.
// Close-to-open makes no promise before. A truncation by this mount begins with a sync, and the
// kernel sends no WRITE of the file meanwhile, so no extent is older than the truncation.

// all returns the extents. Where two overlap, the later one has the newer data: an extent is sent
// only when the earlier extents that it overlaps have left sending. The caller holds mu.
func (f *File) all() iter.Seq[*extent] {
	return func(yield func(*extent) bool) {
		for _, e := range f.unstable {
			if !yield(e) {
				return
			}
		}
		for _, e := range f.sending {
			if !yield(e) {
				return
			}
		}
		if f.filling != nil {
			yield(f.filling)
		}
	}
}

// End returns the end of the data that is not known to be stable, or 0.
func (f *File) End() uint64 {
	if f == nil {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.endLocked()
}

// endLocked is End for callers that hold mu.
func (f *File) endLocked() (end uint64) {
	for e := range f.all() {
		end = max(end, e.end())
	}
	return end
}

// Replayed returns the number of replayed extents that were released so far.
func (f *File) Replayed() uint64 {
	if f == nil {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.replayed
}

// Overlay copies the extents over the n bytes in mem that were read at off. When the extents end
// behind these bytes, Overlay appends their data, and zeros for holes, to at most size bytes.
// Overlay returns the new number of bytes. ok is false when a replayed extent was released since
// before.
func (f *File) Overlay(mem Pieces, size, n int, off, before uint64) (_ int, ok bool) {
	if f == nil {
		return n, true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.replayed != before {
		return 0, false
	}
	if end := f.endLocked(); end > off+uint64(n) {
		size = int(min(uint64(size), end-off))
		mem.zero(n, size)
		n = size
	}
	for e := range f.all() {
		e.copyTo(mem, n, off)
	}
	return n, true
}

// copyTo copies the part of the extent that is in the n bytes of mem, which begin at off.
func (e *extent) copyTo(mem Pieces, n int, off uint64) {
	from, to := max(e.off, off), min(e.end(), off+uint64(n))
	if from < to {
		mem.copyAt(int(from-off), e.buf[from-e.off:to-e.off])
	}
}
