package vfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit/memnfs"
)

// busyFiles answers NFS3ERR_JUKEBOX to calls whose first argument is the handle of a file whose
// name begins with prefix, until over is closed.
func (m *testMount) busyFiles(t *testing.T, prefix string, n int, over <-chan struct{}) answer {
	t.Helper()
	handles := make(map[nfs.Handle]bool)
	for i := range n {
		handles[m.inodeOf(t, fmt.Sprint(prefix, i)).fh] = true
	}
	busy := status(nfs.ErrJukebox)
	return func(ctx context.Context, msg *sunrpc.Message, pass func() error) error {
		select {
		case <-over:
			return pass()
		default:
		}
		for fh := range handles {
			if bytes.Contains(msg.Args, fh.Bytes()) {
				return busy(ctx, msg, pass)
			}
		}
		return pass()
	}
}

// busyCase lists how many files are busy, and which calls.
type busyCase struct {
	name    string
	proc    memnfs.Call
	files   int
	readers int // of each file; 0: one writer
	size    int // bytes that each writer writes
	opts    Options
	buffers int
}

// TestBusyFilesDoNotBlockOthers checks that NFS3ERR_JUKEBOX for some files does not stall reads and
// writes of other files, and that no data is lost when the server is ready again.
func TestBusyFilesDoNotBlockOthers(t *testing.T) {
	const unit = MinIOSize
	for _, c := range []busyCase{
		{name: "more readers than buffers", proc: memnfs.Read, files: 1, readers: 8, buffers: 4},
		{name: "writer fills the pool", proc: memnfs.Write, files: 1, size: 40 * unit, buffers: 16},
		{name: "writer takes all write permits", proc: memnfs.Write, files: 1, size: 3 * unit, buffers: 16,
			opts: Options{MaxWrites: 2}},
		{name: "commit", proc: memnfs.Commit, files: 1, size: 40 * unit, buffers: 16},
		{name: "more files than buffers", proc: memnfs.Write, files: 10, size: 2 * unit, buffers: 4},
		{name: "single buffer", proc: memnfs.Write, files: 1, size: 2 * unit, buffers: 1},
	} {
		t.Run(c.name, func(t *testing.T) { synctest.Test(t, c.run) })
	}
}

func (c *busyCase) run(t *testing.T) {
	const free = 6 * MinIOSize
	s := &memnfs.Server{}
	s.SetBusy(c.proc)
	fs := bareFS(s, testPool(t, c.buffers), c.opts)
	fs.handles.files = make(map[uint64]*fileHandle)
	var users sync.WaitGroup
	use := func(h *fileHandle, size int) error {
		if size == 0 {
			data := byte(255)
			status := call(fs, kernel.OpRead, fuse.ReadIn{Fh: h.ino.id, Size: 1}, "", &data)
			if status != fuse.OK || data == 255 {
				return fmt.Errorf("read: got %v, %v, want a byte", data, status)
			}
			return nil
		}
		if n := writeTo(fs, h, 0, size); n != size {
			return fmt.Errorf("write: got %d bytes, want %d", n, size)
		}
		return fs.sync(background{fs}, h.ino)
	}
	open := func(name string, id int) *fileHandle {
		h := openFile(uint64(id))
		h.ino.fh, _ = nfs.NewHandle([]byte(name))
		fs.handles.files[h.ino.id] = h
		return h
	}
	other := open("free", 2)
	for i := range c.files {
		h := open("busy", 3+i)
		for range max(c.readers, 1) {
			users.Go(func() {
				if err := use(h, c.size); err != nil {
					t.Errorf("busy file: %v", err)
				}
			})
		}
	}
	time.Sleep(time.Minute)
	if fs.Counters.JukeboxRetries.Load() == 0 {
		t.Error("retries of busy calls: got 0, want more")
	}
	for _, size := range []int{0, free} {
		done := make(chan error, 1)
		go func() { done <- use(other, size) }()
		select {
		case err := <-done:
			must(t, err)
		case <-time.After(time.Minute):
			t.Errorf("use of %d bytes of another file: still waits", size)
		}
	}
	s.SetBusy(memnfs.None)
	users.Wait()
	fs.Close(t.Context())
	if n := s.Stable(); n != free+c.files*c.size {
		t.Errorf("stable bytes: got %d, want %d", n, free+c.files*c.size)
	}
}

// TestBusyReadsRaiseKernelBound checks that the kernel may have as many background requests beside
// the delayed reads as without them.
func TestBusyReadsRaiseKernelBound(t *testing.T) {
	const reads = maxBackground + 20
	bound, kept := maxBackground, 0
	b := busyReads{apply: func(n int) { bound = n }}
	for range reads {
		if b.begin(true, 16) {
			kept++
		}
	}
	if bound < reads+maxBackground/2 || kept != 16/keepShare {
		t.Errorf("%d delayed reads: got a bound of %d and %d kept buffers", reads, bound, kept)
	}
	for i := range reads {
		b.end(i < kept)
	}
	if bound != maxBackground {
		t.Errorf("bound after the reads: got %d, want %d", bound, maxBackground)
	}
}

// TestBusyTimeoutEndsCalls checks that calls of a mount with a BusyTimeout (a soft mount) end with
// BusyErrno when the server stays busy.
func TestBusyTimeoutEndsCalls(t *testing.T) {
	t.Parallel()
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true, BusyTimeout: time.Nanosecond,
		BusyErrno: syscall.ETIMEDOUT}})
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), []byte("x"), 0o644))
	for _, c := range []struct {
		proc nfs3.Proc
		call func(*os.File) error
	}{
		{nfs3.ProcGetAttr, func(f *os.File) error { _, err := f.Stat(); return err }},
		{nfs3.ProcRead, func(f *os.File) error { _, err := f.ReadAt(make([]byte, 1), 0); return err }},
		{nfs3.ProcWrite, func(f *os.File) error { _, err := f.WriteAt([]byte("y"), 0); return err }},
		{nfs3.ProcSetAttr, func(f *os.File) error { return f.Chmod(0o600) }},
		{nfs3.ProcLookup, func(*os.File) error { _, err := os.Lstat(m.path("other")); return err }},
		{nfs3.ProcCreate, func(*os.File) error { return os.WriteFile(m.path("new"), nil, 0o600) }},
	} {
		f, err := os.OpenFile(m.path("file"), os.O_RDWR, 0)
		must(t, err)
		s.on(status(nfs.ErrJukebox), c.proc)
		if err := c.call(f); !errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("%v: got %v, want ETIMEDOUT", c.proc, err)
		}
		s.on(nil, c.proc)
		_ = f.Close()
	}
	wantContent(t, m.path("file"), []byte("x"))
}

// TestBusyFileDoesNotStopPageChecks checks that an open file shows another client's data while the
// server is busy with the attributes of a second open file.
func TestBusyFileDoesNotStopPageChecks(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	a, calls, b := twoMounts(t, e, Options{AcRegMin: shortAge, AcRegMax: shortAge, AcDirMax: time.Second})
	must(t, os.WriteFile(a.path("busy0"), []byte("1"), 0o644))
	must(t, os.WriteFile(b.path("f"), []byte("1"), 0o644))
	over := make(chan struct{})
	defer close(over)
	openAndRead(t, a.path("busy0"), 1)
	f, buf := openAndRead(t, a.path("f"), 1)
	calls.on(a.busyFiles(t, "busy", 1, over), nfs3.ProcGetAttr)
	before := calls.count(nfs3.ProcGetAttr)
	if !eventually(func() bool { return calls.count(nfs3.ProcGetAttr) > before+3 }) {
		t.Fatal("the open files are not checked")
	}
	e.awaitTick(t)
	must(t, os.WriteFile(b.path("f"), []byte("2"), 0o644))
	if !eventually(func() bool {
		_, err := f.ReadAt(buf, 0)
		return err == nil && string(buf) == "2"
	}) {
		t.Errorf("read: got %q forever, want the new data", buf)
	}
}
