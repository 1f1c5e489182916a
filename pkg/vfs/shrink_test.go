package vfs

import (
	"encoding/binary"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// heapInUse returns the bytes of the heap after a garbage collection.
func heapInUse() int64 {
	runtime.GC()
	runtime.GC() // frees what finalizers released
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// fsWithFiles returns an FS without a server, whose kernel knows files and their names.
func fsWithFiles(tb testing.TB, files int) (fs *FS, ids []uint64) {
	tb.Helper()
	fs = &FS{opts: DefaultOptions()}
	dir := &inode{id: 1}
	fs.inodes.init(dir, nil)
	fs.setCaches()
	fs.inodes.forgotten = func(ino *inode) { fs.names.Forget(&ino.dir) }
	fs.inodes.shrink = func() {}
	for i := range files {
		a := nfs.Attr{Type: nfs.Regular, FileID: uint64(i)}
		var fh [32]byte
		binary.BigEndian.PutUint64(fh[:], uint64(i))
		h, err := nfs.NewHandle(fh[:])
		must(tb, err)
		ino := fs.inodes.ref(h, &a)
		fs.updateAttr(ino, &a, fs.attrs.Now())
		name := "file-" + strconv.Itoa(i)
		fs.keepLookup(dir, name, ino.id, fs.attrs.Now())
		out := fuse.EntryOut{NodeId: ino.id}
		out.SetEntryTimeout(time.Minute)
		fs.cacheName(dir, name, fs.attrs.Now(), &out)
		ino.dir.SetPlace(dir.id, i)
		ids = append(ids, ino.id)
	}
	return fs, ids
}

// TestForgottenNodesReturnMemory checks that the memory of many files is returned after the kernel
// forgot them.
func TestForgottenNodesReturnMemory(t *testing.T) {
	const (
		files  = 50000
		remain = 1 << 20 // bytes; the maps alone take several times as much without shrinking
	)
	before := heapInUse()
	fs, ids := fsWithFiles(t, files)
	begun := false
	fs.inodes.shrink = func() { begun = true }
	for _, id := range ids {
		fs.Forget(id, 1)
	}
	if !begun || !fs.copyTables(files, attr.Now().Add(2*time.Minute)) { // the names have expired
		t.Error("the table is not copied")
	}
	if left := heapInUse() - before; left > remain {
		t.Errorf("heap after the kernel forgot %d files: got %d bytes more than before, want at most %d", files, left,
			remain)
	}
	if n := fs.Inodes(); n != 1 {
		t.Errorf("nodes: got %d, want the root", n)
	}
	runtime.KeepAlive(fs)
}

// BenchmarkNodeMemory reports the memory of a file that the kernel knows: its node, and its name in
// the caches. It also reports what an open file and a written file add.
func BenchmarkNodeMemory(b *testing.B) {
	const files = 1 << 18
	for b.Loop() {
		before := heapInUse()
		fs, ids := fsWithFiles(b, files)
		known := heapInUse()
		fs.handles.files = make(map[uint64]*fileHandle)
		for i, id := range ids {
			h := fs.makeFile(fs.inodes.get(id), nil, unix.O_WRONLY)
			h.id = uint64(i)
			fs.addFile(h)
		}
		b.ReportMetric(float64(known-before)/files-8, "B/file") // without ids
		open := heapInUse()
		for _, id := range ids {
			fs.written(fs.inodes.get(id))
		}
		b.ReportMetric(float64(open-known)/files, "B/open-file")
		b.ReportMetric(float64(heapInUse()-open)/files, "B/written-file")
		runtime.KeepAlive(fs)
		runtime.KeepAlive(ids)
	}
	b.ReportMetric(0, "ns/op")
}
