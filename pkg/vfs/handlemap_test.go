package vfs

import (
	"math/rand/v2"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// TestHandleMap compares a handleMap, in which many handles have the same hash, with a map of
// handles.
func TestHandleMap(t *testing.T) {
	m, want := handleMap{limit: 3}, make(map[nfs.Handle]*inode)
	for i := range 20000 {
		fh, err := nfs.NewHandle([]byte{byte(rand.IntN(12))})
		if err != nil {
			t.Fatal(err)
		}
		switch rand.IntN(4) {
		case 0:
			ino := &inode{fh: fh}
			m.put(ino)
			want[fh] = ino
		case 1:
			m.remove(&inode{fh: fh}) // another node than the one in the map
		case 2:
			if ino := want[fh]; ino != nil {
				m.remove(ino)
				delete(want, fh)
			}
		case 3:
			m.shrink()
		}
		if got := m.get(fh); got != want[fh] || m.has(&inode{fh: fh}) {
			t.Fatalf("step %d: node of a handle: got %p, want %p", i, got, want[fh])
		}
	}
	for _, ino := range want {
		m.remove(ino)
	}
	if len(m.nodes) != 0 {
		t.Errorf("after the removal of all nodes: got %d hashes, want 0", len(m.nodes))
	}
}
