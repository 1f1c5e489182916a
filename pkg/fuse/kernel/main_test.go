package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == helperArg {
		if err := RunHelper(); err != nil {
			log.Print(err)
			unix.Exit(1)
		}
		unix.Exit(0) // os.Exit waits for 1 s with the race detector
	}
	if mode := os.Getenv(serverEnv); mode != "" {
		run := serveForTest
		kind, argument, _ := strings.Cut(mode, ":")
		switch kind {
		case "stuck":
			run = getStuck
		case "call":
			run = callForTest
		case "use":
			run, mode = useForTest, argument
		}
		if err := run(mode); err != nil {
			log.Fatal(err)
		}
		return
	}
	kit.Main(m)
}

const (
	fileNode = 2
	linkNode = 3
	dataSize = 3<<20 + 1000
)

// A testFS has a file "data", whose byte at offset i is fileByte(i), and a symbolic link "link".
type testFS struct {
	FileSystem // nil: other methods panic

	// read handles READs, and lookup is called for each LOOKUP, if not nil.
	read   func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status)
	lookup func(r *Request) fuse.Status
	delay  time.Duration // of a LOOKUP

	link        string
	keepReplied bool
	mode        atomic.Uint32 // of the file
	lookups     atomic.Int32
	requests    Requests
	warnings    logBuffer

	mu      sync.Mutex
	written [][]byte // data of WRITEs
	replied []uint64 // arguments of Replied, if keepReplied
}

func newTestFS() *testFS {
	fs := &testFS{}
	fs.mode.Store(0o644)
	return fs
}

func fileByte(off int64) byte { return byte(off>>12) ^ byte(off) }

func (fs *testFS) attr(node uint64, a *fuse.Attr) {
	*a = fuse.Attr{Ino: node, Nlink: 1, Blksize: 4096}
	switch node {
	case fuse.FUSE_ROOT_ID:
		a.Mode = unix.S_IFDIR | 0o755
	case fileNode:
		a.Mode, a.Size = unix.S_IFREG|fs.mode.Load(), dataSize
	case linkNode:
		a.Mode = unix.S_IFLNK | 0o777
	}
}

func (fs *testFS) Lookup(r *Request, name string, out *fuse.EntryOut) fuse.Status {
	fs.lookups.Add(1)
	time.Sleep(fs.delay)
	if fs.lookup != nil {
		if status := fs.lookup(r); !status.Ok() {
			return status
		}
	}
	node, ok := map[string]uint64{"data": fileNode, "link": linkNode}[name]
	if !ok {
		return fuse.ENOENT
	}
	out.NodeId = node
	out.SetEntryTimeout(time.Hour)
	out.SetAttrTimeout(time.Hour)
	fs.attr(node, &out.Attr)
	return fuse.OK
}

func (fs *testFS) GetAttr(_ *Request, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	out.SetTimeout(time.Hour)
	fs.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (fs *testFS) Open(_ *Request, in *fuse.OpenIn, _ *fuse.OpenOut) fuse.Status {
	return fuse.OK
}

func (fs *testFS) Flush(*Request, *fuse.FlushIn) fuse.Status     { return fuse.OK }
func (fs *testFS) Release(*Request, *fuse.ReleaseIn) fuse.Status { return fuse.OK }
func (fs *testFS) Forget(uint64, uint64)                         {}
func (fs *testFS) Readlink(*Request) ([]byte, fuse.Status)       { return []byte(fs.link), fuse.OK }

func (fs *testFS) Write(_ *Request, _ *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.written = append(fs.written, bytes.Join(data, nil))
	return uint32(size(data)), fuse.OK
}

// takeWritten returns the data of the WRITEs since the last call.
func (fs *testFS) takeWritten() []byte {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	data := bytes.Join(fs.written, nil)
	fs.written = nil
	return data
}

func (fs *testFS) Read(r *Request, in *fuse.ReadIn, place [][]byte) (int, [][]byte, fuse.Status) {
	if fs.read != nil {
		data, status := fs.read(r, in)
		return 0, data, status
	}
	data := fileData(int64(in.Offset), int(in.Size))
	if place == nil {
		return 0, give(r, data[:len(data)/3], data[len(data)/3:]), fuse.OK
	}
	n := 0
	for _, p := range place {
		clear(p)
		n += copy(p, data[n:])
	}
	return n, nil, fuse.OK
}

// give returns data that Replied clears, as the next user of a buffer does.
func give(r *Request, data ...[]byte) [][]byte {
	r.FS = data
	return data
}

// fileData returns n bytes of the file, or fewer at its end.
func fileData(off int64, n int) []byte {
	off = min(off, dataSize)
	data := make([]byte, min(int64(n), dataSize-off))
	for i := range data {
		data[i] = fileByte(off + int64(i))
	}
	return data
}

func (fs *testFS) Requests() *Requests { return &fs.requests }

func (fs *testFS) Replied(r *Request) {
	if data, ok := r.FS.([][]byte); ok {
		for _, b := range data {
			clear(b)
		}
		r.FS = nil
	}
	if fs.keepReplied {
		fs.mu.Lock()
		defer fs.mu.Unlock()
		fs.replied = append(fs.replied, r.Unique)
	}
}

// takeReplied returns the arguments of Replied since the last call, when there are n.
func (fs *testFS) takeReplied(t testing.TB, n int) []uint64 {
	t.Helper()
	var all []uint64
	kit.Eventually(t, "calls of Replied", func() bool {
		fs.mu.Lock()
		defer fs.mu.Unlock()
		if len(fs.replied) < n {
			return false
		}
		all, fs.replied = fs.replied, nil
		return true
	})
	return all
}

func (fs *testFS) Warn(msg string, args ...any) {
	fmt.Fprintln(&fs.warnings, append([]any{msg}, args...)...)
}

// A logBuffer collects the messages of a connection.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func options(l io.Writer) Options {
	return Options{MaxWrite: 1 << 20, MaxReadAhead: 1 << 20, MaxBackground: 64, Logger: log.New(l, "", 0), XAttrs: true,
		Capabilities: fuse.CAP_EXPLICIT_INVAL_DATA | fuse.CAP_HAS_EXPIRE_ONLY,
		Panicked:     func(any) fuse.Status { return fuse.Status(unix.EUCLEAN) }}
}

// A testMount is a testFS mounted through /dev/fuse.
type testMount struct {
	dir    string
	dev    *Device
	front  *DevFuse
	log    *logBuffer
	served chan struct{} // closed when Serve has returned
}

func mount(t testing.TB, fs *testFS) *testMount {
	t.Helper()
	kit.NeedsFUSE(t)
	m := &testMount{dir: t.TempDir(), log: &logBuffer{}, served: make(chan struct{})}
	var err error
	if m.dev, err = OpenDevice(); err != nil {
		t.Fatal(err)
	}
	kit.Must(t, m.dev.Use(func(fd int) { mountTest(t, m.dir, fd) }))
	if m.front, err = NewDevFuse(m.dev, fs, options(m.log)); err != nil {
		t.Fatal(err)
	}
	go func() {
		m.front.Serve()
		close(m.served)
	}()
	t.Cleanup(func() {
		_ = unix.Unmount(m.dir, unix.MNT_DETACH)
		if err := m.dev.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
		m.awaitEnd(t)
	})
	return m
}

// mountTest mounts the file system of a descriptor of /dev/fuse.
func mountTest(t testing.TB, dir string, fd int) {
	t.Helper()
	kit.Must(t, unix.Mount("front", dir, "fuse.fronttest", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%d", fd, 1<<20)))
}

func (m *testMount) path(name string) string { return filepath.Join(m.dir, name) }

func (m *testMount) awaitEnd(t testing.TB) {
	t.Helper()
	select {
	case <-m.served:
	case <-time.After(kit.Timeout):
		t.Fatal("Serve did not return")
	}
}
