package data

import (
	"bytes"
	"testing"
)

// TestPieces compares the methods of Pieces with those of one slice.
func TestPieces(t *testing.T) {
	for _, sizes := range [][]int{{9}, {1, 8}, {3, 3, 3}, {1, 0, 2, 6}, {8, 1}} {
		data := []byte("123456789")
		for from := range len(data) + 1 {
			for to := from; to <= len(data); to++ {
				flat := bytes.Clone(data)
				var p Pieces
				for rest := bytes.Clone(data); len(p) < len(sizes); rest = rest[sizes[len(p)-1]:] {
					p = append(p, rest[:sizes[len(p)]:sizes[len(p)]])
				}
				part := p.AppendPart(nil, from, to)
				if got := bytes.Join(part, nil); !bytes.Equal(got, flat[from:to]) {
					t.Errorf("sizes %v: part from %d to %d: got %q, want %q", sizes, from, to, got, flat[from:to])
				}
				for _, b := range part {
					if len(b) == 0 {
						t.Errorf("sizes %v: part from %d to %d has an empty piece", sizes, from, to)
					}
				}
				p.copyAt(from, []byte("abcdefghi")[:to-from])
				copy(flat[from:], "abcdefghi"[:to-from])
				if got := bytes.Join(p, nil); !bytes.Equal(got, flat) {
					t.Errorf("sizes %v: copy from %d to %d: got %q, want %q", sizes, from, to, got, flat)
				}
				p.zero(from, to)
				clear(flat[from:to])
				if got := bytes.Join(p, nil); !bytes.Equal(got, flat) {
					t.Errorf("sizes %v: zeros from %d to %d: got %q, want %q", sizes, from, to, got, flat)
				}
			}
		}
	}
}
