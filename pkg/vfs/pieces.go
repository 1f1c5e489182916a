package vfs

// pieces are memory for the data of a READ or WRITE, in order. A guest can change this memory at
// any time. vfs only writes to that of a READ, and copies the data of a WRITE before it looks at
// it.
type pieces [][]byte

func (p pieces) size() (n int) {
	for _, b := range p {
		n += len(b)
	}
	return n
}

// appendPart appends the range of p from byte from to byte to, to dst.
func (p pieces) appendPart(dst pieces, from, to int) pieces {
	for _, b := range p {
		if from < len(b) && from < to {
			dst = append(dst, b[from:min(to, len(b))])
		}
		from, to = max(0, from-len(b)), to-len(b)
		if to <= 0 {
			break
		}
	}
	return dst
}

// copyAt copies data to p from byte off on, as far as p reaches.
func (p pieces) copyAt(off int, data []byte) {
	for _, b := range p {
		if off < len(b) {
			data = data[copy(b[off:], data):]
		}
		off = max(0, off-len(b))
	}
}

// zero clears the range from byte from to byte to.
func (p pieces) zero(from, to int) {
	for _, b := range p {
		if from < len(b) && from < to {
			clear(b[from:min(to, len(b))])
		}
		from, to = max(0, from-len(b)), to-len(b)
		if to <= 0 {
			return
		}
	}
}

// bufferPieces is buffer for the first size bytes of data.
func (fs *FS) bufferPieces(r *request, h *fileHandle, off uint64, data pieces, size int) (taken int, err error) {
	for _, b := range data {
		n, err := fs.buffer(r, h, off+uint64(taken), b[:min(len(b), size-taken)])
		if taken += n; err != nil {
			return taken, err
		}
	}
	return taken, nil
}
