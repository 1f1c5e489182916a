package fusefs

import (
	"encoding/binary"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// heapInUse returns the bytes of the heap after a garbage collection.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC() // frees what finalizers released
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestForgottenNodesReturnMemory looks up many files, and checks that their memory is returned
// after the kernel forgot them.
func TestForgottenNodesReturnMemory(t *testing.T) {
	const (
		files  = 50000
		remain = 4 << 20 // bytes; the maps alone take three times as much without shrinking
	)
	e := startExport(t)
	must(t, os.Mkdir(e.dir+"/d", 0o755))
	for i := range files {
		f, err := os.Create(e.dir + "/d/file-" + strconv.Itoa(i))
		must(t, err)
		must(t, f.Close())
	}
	m := e.mount(t, mountConfig{})
	before := heapInUse()
	if list, err := os.ReadDir(m.path("d")); err != nil || len(list) != files {
		t.Fatalf("list d: got %d files, %v, want %d", len(list), err, files)
	}
	// The kernel would forget the nodes when memory is short.
	m.fs.inodes.mu.Lock()
	var ids []uint64
	for id, ino := range m.fs.inodes.byID {
		ino.mu.Lock()
		if !ino.isDir() {
			ids = append(ids, id)
		}
		ino.mu.Unlock()
	}
	m.fs.inodes.mu.Unlock()
	used := heapInUse() - before
	for _, id := range ids {
		m.fs.Forget(id, 1)
	}
	var left int64
	if !eventually(func() bool { left = heapInUse() - before; return left < remain }) {
		t.Errorf("heap after the kernel forgot %d files: got %d bytes more than before, want at most %d", files, left,
			remain)
	}
	t.Logf("heap: %d bytes for %d files; %d bytes after the kernel forgot them", used, files, left)
	if _, err := os.Stat(m.path("d")); err != nil {
		t.Errorf("stat of a directory that the kernel knows: %v", err)
	}
}

// BenchmarkNodeMemory reports the memory of one file that the kernel knows: its node, and its name
// in the name cache.
func BenchmarkNodeMemory(b *testing.B) {
	const files = 1 << 18
	for b.Loop() {
		before := heapInUse()
		fs := &FS{opts: DefaultOptions()}
		dir := &inode{id: 1}
		fs.inodes.init(dir, nil)
		d := &dirHandle{ino: dir}
		for i := range files {
			a := nfs3.Attr{Type: nfs3.NF3REG, FileID: uint64(i)}
			var fh [32]byte
			binary.BigEndian.PutUint64(fh[:], uint64(i))
			h, err := nfs3.NewFH(fh[:])
			must(b, err)
			ino := fs.inodes.ref(h, &a)
			fs.updateAttr(ino, &a, fs.callStart())
			fs.keepLookup(dir, "file-"+strconv.Itoa(i), ino.id, fs.callStart())
			d.index = i
			ino.setPlace(d)
		}
		b.ReportMetric(float64(heapInUse()-before)/files, "B/file")
		runtime.KeepAlive(fs)
	}
	b.ReportMetric(0, "ns/op")
}
