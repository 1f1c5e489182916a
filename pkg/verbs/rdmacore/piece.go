package rdmacore

import (
	"unsafe"
)

// onePiece joins segments that follow one another in memory. It reports false when they do not.
func onePiece(segs [][]byte) ([]byte, bool) {
	var piece []byte
	for _, s := range segs {
		switch {
		case len(s) == 0:
		case len(piece) == 0:
			piece = s[:len(s):len(s)]
		case addressOf(s) != addressOf(piece)+uint64(len(piece)):
			return nil, false
		default:
			piece = unsafe.Slice(unsafe.SliceData(piece), len(piece)+len(s))
		}
	}
	return piece, true
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
