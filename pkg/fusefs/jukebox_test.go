package fusefs

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
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// busyFiles answers NFS3ERR_JUKEBOX to calls whose first argument is the handle of a file whose
// name begins with prefix, until over is closed.
func (m *testMount) busyFiles(t *testing.T, prefix string, n int, over <-chan struct{}) answer {
	t.Helper()
	handles := make(map[nfs3.FH]bool)
	for i := range n {
		handles[m.inodeOf(t, fmt.Sprint(prefix, i)).fh] = true
	}
	busy := status(nfs3.ErrJukebox)
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

// promptly fails the test when f fails, or does not end although the server answers f's calls.
func promptly(t *testing.T, what string, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(testTimeout):
		t.Errorf("%s: still waits after %v", what, testTimeout)
	}
}

// busyCase lists how many files are busy, and which calls.
type busyCase struct {
	name    string
	files   int
	readers int // of each file
	writers int // of each file: 0 or 1
	size    int // bytes that each writer writes
	opts    Options
	buffers int
	procs   []nfs3.Proc
}

// TestBusyFilesDoNotBlockOthers checks that NFS3ERR_JUKEBOX for some files does not stall reads and
// writes of other files, and that no data is lost when the server is ready again.
func TestBusyFilesDoNotBlockOthers(t *testing.T) {
	t.Parallel()
	e := startExport(t)
	for _, c := range []busyCase{
		{name: "more readers than buffers", files: 1, readers: 8, buffers: 4, procs: []nfs3.Proc{nfs3.ProcRead}},
		{name: "more readers than background requests", files: 1, readers: maxBackground + 20, buffers: 4,
			procs: []nfs3.Proc{nfs3.ProcRead}},
		{name: "writer fills the pool", files: 1, writers: 1, size: 40 << 20, buffers: 16,
			procs: []nfs3.Proc{nfs3.ProcWrite}},
		{name: "writer takes all write permits", files: 1, writers: 1, size: 3 << 20, buffers: 16,
			opts: Options{MaxWrites: 2}, procs: []nfs3.Proc{nfs3.ProcWrite}},
		{name: "commit", files: 1, writers: 1, size: 40 << 20, buffers: 16, procs: []nfs3.Proc{nfs3.ProcCommit}},
		{name: "more files than buffers", files: 10, writers: 1, size: 2 << 20, buffers: 4,
			procs: []nfs3.Proc{nfs3.ProcWrite}},
		{name: "single buffer", files: 1, writers: 1, size: 2 << 20, buffers: 1, procs: []nfs3.Proc{nfs3.ProcWrite}},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, e) })
	}
}

func (c *busyCase) run(t *testing.T, e *export) {
	m, s := e.mountScripted(t, mountConfig{opts: c.opts, buffers: c.buffers})
	size := max(c.size, c.readers*(1<<20))
	for i := range c.files {
		must(t, os.WriteFile(filepath.Join(e.dir, fmt.Sprint("tape", i)), make([]byte, size), 0o644))
	}
	free := randomBytes(21, 6<<20)
	must(t, os.WriteFile(filepath.Join(e.dir, "free"), free, 0o644))
	over := make(chan struct{})
	s.on(m.busyFiles(t, "tape", c.files, over), c.procs...)

	var users sync.WaitGroup
	var once sync.Once
	ready := func() { once.Do(func() { close(over) }); users.Wait() }
	defer ready()
	data := randomBytes(22, c.size)
	for i := range c.files {
		path := m.path(fmt.Sprint("tape", i))
		for j := range c.readers {
			users.Go(func() { readPart(t, path, int64(j)<<20) })
		}
		for range c.writers {
			users.Go(func() {
				if err := writeFile(path, data); err != nil {
					t.Errorf("write of a busy file: %v", err)
				}
			})
		}
	}
	want := min(uint64(c.files*max(c.readers, c.writers)), maxBackground)
	if !eventually(func() bool { return m.fs.Counters.JukeboxRetries.Load() > 2*want }) {
		t.Fatal("the server was never busy")
	}
	promptly(t, "read", func() error {
		got, err := os.ReadFile(m.path("free"))
		if err == nil && !bytes.Equal(got, free) {
			err = errors.New("wrong content")
		}
		return err
	})
	promptly(t, "write", func() error { return writeFile(m.path("new"), free) })
	promptly(t, "truncate", func() error { return os.Truncate(m.path("new"), 5<<20) })
	ready()
	wantContent(t, filepath.Join(e.dir, "new"), free[:5<<20])
	for i := range c.files * c.writers {
		wantContent(t, filepath.Join(e.dir, fmt.Sprint("tape", i)), data)
	}
}

// readPart reads one byte of a file of zeros.
func readPart(t *testing.T, path string, off int64) {
	f, err := os.Open(path)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	b := []byte{1}
	if _, err := f.ReadAt(b, off); err != nil || b[0] != 0 {
		t.Errorf("read of a busy file: got %v, %v, want 0", b, err)
	}
}

// writeFile overwrites or creates a file and closes it.
func writeFile(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// TestBusyTimeoutEndsCalls checks that calls of a mount with a BusyTimeout (a soft mount) end with
// BusyErrno when the server stays busy.
func TestBusyTimeoutEndsCalls(t *testing.T) {
	t.Parallel()
	e := startExport(t)
	m, s := e.mountScripted(t, mountConfig{opts: Options{NoAC: true, BusyTimeout: 250 * time.Millisecond,
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
		s.on(status(nfs3.ErrJukebox), c.proc)
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
	a, calls, b := twoMounts(t, e, Options{AcRegMin: time.Second, AcRegMax: time.Second, AcDirMax: time.Second})
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
