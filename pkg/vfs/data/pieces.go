package data

// Pieces are memory for the data of a READ or WRITE, in order. A guest can change this memory at
// any time. A Store only writes to that of a READ, and copies the data of a WRITE before it looks at
// it.
type Pieces [][]byte

// Size returns the number of bytes.
func (p Pieces) Size() (n int) {
	for _, b := range p {
		n += len(b)
	}
	return n
}

// AppendPart appends the range of p from byte from to byte to, to dst.
func (p Pieces) AppendPart(dst Pieces, from, to int) Pieces {
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
func (p Pieces) copyAt(off int, data []byte) {
	for _, b := range p {
		if off < len(b) {
			data = data[copy(b[off:], data):]
		}
		off = max(0, off-len(b))
	}
}

// zero clears the range from byte from to byte to.
func (p Pieces) zero(from, to int) {
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
