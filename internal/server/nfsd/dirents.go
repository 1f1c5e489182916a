package nfsd

import (
	"bytes"
	"encoding/binary"
	"iter"
)

// A dirent is struct linux_dirent64. name is a view of the buffer.
type dirent struct {
	ino  uint64
	next int64 // position behind this entry
	typ  byte
	name []byte
}

const direntHeader = 19

// dirents reads the entries that getdents64(2) left in b.
func dirents(b []byte) iter.Seq[dirent] {
	return func(yield func(dirent) bool) {
		for len(b) > direntHeader {
			size := int(binary.NativeEndian.Uint16(b[16:]))
			if size <= direntHeader || size > len(b) {
				return
			}
			e := dirent{ino: binary.NativeEndian.Uint64(b), next: int64(binary.NativeEndian.Uint64(b[8:])), typ: b[18],
				name: b[direntHeader:size]}
			if end := bytes.IndexByte(e.name, 0); end >= 0 {
				e.name = e.name[:end]
			}
			b = b[size:]
			if !yield(e) {
				return
			}
		}
	}
}
