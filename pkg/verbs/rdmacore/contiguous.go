package rdmacore

import (
	"unsafe"
)

// contiguous joins segments that follow one another in memory. It returns false if they do not.
func contiguous(segs [][]byte) ([]byte, bool) {
	var mem []byte
	for _, s := range segs {
		switch {
		case len(s) == 0:
		case len(mem) == 0:
			mem = s[:len(s):len(s)]
		case addressOf(s) != addressOf(mem)+uint64(len(mem)):
			return nil, false
		default:
			mem = unsafe.Slice(unsafe.SliceData(mem), len(mem)+len(s))
		}
	}
	return mem, true
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
