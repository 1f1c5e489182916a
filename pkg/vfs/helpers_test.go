package vfs

import (
	"bytes"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// subdir makes a new directory on the mount.
func subdir(t *testing.T, m *testMount) string {
	t.Helper()
	dir, err := os.MkdirTemp(m.dir, "t")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// run runs a program in a directory of the mount. The shell changes the directory, not Go's fork:
// until its exec, a forked child blocks the Go runtime. The runtime has to answer the request for
// the directory.
func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", `cd -- "$0" && exec "$@"`, dir, name}, args...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.org",
		"GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.org")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

var must, randomBytes = kit.Must, kit.RandomBytes

// eventually reports whether done returns true before [kit.Timeout].
func eventually(done func() bool) bool {
	for end := time.Now().Add(kit.Timeout); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func wantContent(t *testing.T, path string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(path)
	must(t, err)
	if !bytes.Equal(got, want) {
		at := 0
		for at < min(len(got), len(want)) && got[at] == want[at] {
			at++
		}
		t.Fatalf("content of %s: got %d bytes, want %d; the first difference is at byte %d", path, len(got),
			len(want), at)
	}
}

// dropCaches makes the kernel drop the cached pages of a file.
func dropCaches(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	must(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// tree describes everything in a directory tree: mode, owner, size, mtime and content.
func tree(t *testing.T, root string) string {
	t.Helper()
	var b strings.Builder
	must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s mode=%o uid=%d gid=%d", rel, st.Mode, st.Uid, st.Gid)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " nlink=%d size=%d mtime=%d.%09d sum=%x", st.Nlink, st.Size, st.Mtim.Sec, st.Mtim.Nsec,
				hash(data))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " -> %s", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			fmt.Fprintf(&b, " dev=%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		b.WriteByte('\n')
		return nil
	}))
	return b.String()
}

// awaitClosed waits until no file is open. close(2) does not wait for the daemon.
func (m *testMount) awaitClosed(t *testing.T) {
	t.Helper()
	if !eventually(func() bool { return m.fs.inodes.openFiles() == 0 }) {
		t.Fatal("files are still open")
	}
}

// openFiles returns the number of open files.
func (t *inodeTable) openFiles() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.files
}

// A reply keeps the reply to a request.
type reply []byte

func (*reply) Room() int          { return math.MaxInt }
func (*reply) Place(int) [][]byte { return nil }
func (r *reply) Send(head []byte, data [][]byte, _ int) {
	*r = append(append((*r)[:0], head...), bytes.Join(data, nil)...)
}

// message encodes a request: a structure that begins with a fuse.InHeader, and what follows it.
func message[I any](op kernel.Op, in I, payload string) kernel.Message {
	b := append(unsafe.Slice((*byte)(unsafe.Pointer(&in)), unsafe.Sizeof(in)), payload...)
	h := (*fuse.InHeader)(unsafe.Pointer(&b[0]))
	h.Opcode, h.Length = uint32(op), uint32(len(b))
	return kernel.Message{In: b, Received: ledger.Now()}
}

// call makes a request as a connection does. It decodes the reply to out, unless nil.
func call[I, O any](fs kernel.FileSystem, op kernel.Op, in I, payload string, out *O) fuse.Status {
	return callMessage(fs, message(op, in, payload), out)
}

func callMessage[O any](fs kernel.FileSystem, m kernel.Message, out *O) fuse.Status {
	var r reply
	opts := kernel.Options{MaxWrite: MaxIOSize, Panicked: func(v any) fuse.Status { panic(v) }}
	kernel.NewHandler(fs, opts).NewRequest(&r).Handle(m)
	h := (*fuse.OutHeader)(unsafe.Pointer(&r[0]))
	if out != nil {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(out)), unsafe.Sizeof(*out)), r[unsafe.Sizeof(*h):])
	}
	return fuse.Status(-h.Status)
}

// none is for replies without data.
var none *struct{}

// A heldFS keeps a request in progress.
type heldFS struct {
	kernel.FileSystem
	requests kernel.Requests
	began    chan *kernel.Request
	over     chan struct{}
}

func (f *heldFS) Requests() *kernel.Requests { return &f.requests }
func (f *heldFS) Replied(*kernel.Request)    {}

func (f *heldFS) Flush(r *kernel.Request, _ *fuse.FlushIn) fuse.Status {
	f.began <- r
	<-f.over
	return fuse.OK
}

// newRequest returns a request that is in progress until the test ends. cancel closes its Done.
func newRequest(t testing.TB) (r *request, cancel func()) {
	f := &heldFS{began: make(chan *kernel.Request), over: make(chan struct{})}
	caller := fuse.Caller{Pid: 4711, Owner: fuse.Owner{Uid: math.MaxUint32 - 1}}
	go call(f, kernel.OpFlush, fuse.FlushIn{InHeader: fuse.InHeader{Caller: caller}}, "", none)
	t.Cleanup(func() { close(f.over) })
	return &request{Request: <-f.began}, f.requests.Abort
}
