package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// open opens a file for the test. os.Open would send POLL requests.
func open(t testing.TB, path string, flags int) int {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	kit.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func TestRequestsOfManySizes(t *testing.T) {
	fs := newTestFS()
	fs.link = strings.Repeat("l", 4000)
	m := mount(t, fs)
	buf := make([]byte, 5000)
	n, err := unix.Readlink(m.path("link"), buf)
	kit.Must(t, err)
	if string(buf[:n]) != fs.link {
		t.Errorf("link of %d bytes: got %d bytes", len(fs.link), n)
	}
	var st unix.Stat_t
	if err := unix.Stat(m.path(strings.Repeat("x", 255)), &st); !errors.Is(err, unix.ENOENT) {
		t.Errorf("stat of an unknown name: got %v, want ENOENT", err)
	}
	fd := open(t, m.path("data"), unix.O_WRONLY)
	for _, size := range []int{1, smallRequest - 80, smallRequest, 70000, 1 << 20} {
		data := bytes.Repeat([]byte{byte(size), byte(size >> 8), 3}, size/3+1)[:size]
		_, err := unix.Pwrite(fd, data, 0)
		kit.Must(t, err)
		if got := fs.takeWritten(); !bytes.Equal(got, data) {
			t.Errorf("write of %d bytes: the file system got %d bytes, or other data", size, len(got))
		}
	}
}

// TestSlowRequestsBlockNoOther holds many requests and sends others meanwhile.
func TestSlowRequestsBlockNoOther(t *testing.T) {
	const slow = 100
	fs := newTestFS()
	release := make(chan struct{})
	var pending atomic.Int32
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		pending.Add(1)
		<-release
		return give(r, make([]byte, in.Size)), fuse.OK
	}
	m := mount(t, fs)
	fd := open(t, m.path("data"), unix.O_RDONLY|unix.O_DIRECT)
	var readers sync.WaitGroup
	for i := range slow {
		readers.Go(func() {
			if _, err := unix.Pread(fd, make([]byte, 4096), int64(i)*4096); err != nil {
				t.Error(err)
			}
		})
	}
	kit.Eventually(t, "all reads to be in progress", func() bool { return pending.Load() == slow })
	var st unix.Stat_t
	if err := unix.Stat(m.path("none"), &st); !errors.Is(err, unix.ENOENT) {
		t.Errorf("stat beside the slow reads: got %v, want ENOENT", err)
	}
	close(release)
	readers.Wait()
	// The goroutines that are not needed end.
	kit.Eventually(t, "workers to end", func() bool {
		m.front.readers.Lock()
		defer m.front.readers.Unlock()
		return m.front.readers.waiting <= m.front.readers.max && len(m.front.readers.free) <= m.front.readers.max
	})
}

func TestEndOfConnectionEndsRequests(t *testing.T) {
	fs := newTestFS()
	began := make(chan struct{})
	fs.read = func(r *Request, _ *fuse.ReadIn) ([][]byte, fuse.Status) {
		close(began)
		<-r.Done()
		return nil, fuse.EINTR
	}
	m := mount(t, fs)
	fd := open(t, m.path("data"), unix.O_RDONLY|unix.O_DIRECT)
	read := make(chan error, 1)
	go func() {
		_, err := unix.Pread(fd, make([]byte, 4096), 0)
		read <- err
	}()
	<-began
	if m.dev.Disconnected() {
		t.Error("Disconnected before the end of the connection: got true, want false")
	}
	if err := unix.Unmount(m.dir, unix.MNT_FORCE); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err) // MNT_FORCE ends the connection, also of a busy mount
	}
	if err := <-read; err == nil {
		t.Error("read after the end of the connection: got no error")
	}
	m.awaitEnd(t)
	if !m.dev.Disconnected() {
		t.Error("Disconnected after the end of the connection: got false, want true")
	}
	if s := m.log.String() + fs.warnings.String(); s != "" {
		t.Errorf("log: got %q, want nothing", s)
	}
}

// withAndWithoutHelper runs a test twice: on a mount whose notifications this process sends, and on
// one with a helper.
func withAndWithoutHelper(t *testing.T, test func(t *testing.T, mount func(*testFS) *testMount)) {
	t.Run("direct", func(t *testing.T) {
		test(t, func(fs *testFS) *testMount { return mount(t, fs) })
	})
	t.Run("helper", func(t *testing.T) {
		test(t, func(fs *testFS) *testMount {
			m := mount(t, fs)
			useHelper(t, m.dev)
			return m
		})
	})
}

func TestNotificationsReachKernel(t *testing.T) { withAndWithoutHelper(t, testNotifications) }

func testNotifications(t *testing.T, mount func(*testFS) *testMount) {
	fs := newTestFS()
	var reads atomic.Int32
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		reads.Add(1)
		return give(r, make([]byte, in.Size)), fuse.OK
	}
	m := mount(fs)
	var fd int
	var st unix.Stat_t
	// The kernel marks the path of an open file whose name it has removed.
	hasName := func() bool {
		path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		kit.Must(t, err)
		return !strings.HasSuffix(path, "(deleted)")
	}
	readPage := func() {
		_, err := unix.Pread(fd, make([]byte, 4096), 0)
		kit.Must(t, err)
	}
	stat := func() uint32 {
		kit.Must(t, unix.Stat(m.path("data"), &st))
		return st.Mode & 0o777
	}
	for _, n := range []struct {
		name           string
		notify         func() error
		reads, lookups int32
		mode           uint32
	}{
		{"none", func() error { return nil }, 0, 0, 0o644},
		{"pages", func() error { return m.dev.InvalInode(fileNode, 0, 0) }, 1, 0, 0o600},
		{"pages past the read", func() error { return m.dev.InvalInode(fileNode, 1<<20, 4096) }, 0, 0, 0o600},
		{"attributes", func() error { return m.dev.InvalInode(fileNode, -1, 0) }, 0, 0, 0o600},
		{"name", func() error { return m.dev.ExpireEntry(fuse.FUSE_ROOT_ID, "data") }, 0, 1, 0o600},
		{"unknown node", func() error { return m.dev.InvalInode(77, 0, 0) }, 0, 0, 0o644},
		{"unknown name", func() error { return m.dev.ExpireEntry(fuse.FUSE_ROOT_ID, "other") }, 0, 0, 0o644},
	} {
		t.Run(n.name, func(t *testing.T) {
			fs.mode.Store(0o644)
			fd = open(t, m.path("data"), unix.O_RDONLY)
			kit.Must(t, m.dev.InvalInode(fileNode, -1, 0))
			readPage()
			stat()
			reads.Store(0)
			fs.lookups.Store(0)
			fs.mode.Store(0o600)
			kit.Must(t, n.notify())
			if !hasName() {
				t.Error("open file: the kernel has lost its name")
			}
			mode := stat()
			readPage()
			if reads.Load() != n.reads || fs.lookups.Load() != n.lookups || mode != n.mode {
				t.Errorf("after the notification: got %d READs, %d LOOKUPs and mode %o, want %d, %d, %o",
					reads.Load(), fs.lookups.Load(), mode, n.reads, n.lookups, n.mode)
			}
		})
	}
}

// TestExtendSize raises the size of an open file. The cached pages must keep their data.
func TestExtendSize(t *testing.T) { withAndWithoutHelper(t, testExtendSize) }

func testExtendSize(t *testing.T, mount func(*testFS) *testMount) {
	fs := newTestFS()
	var reads atomic.Int32
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		reads.Add(1)
		return give(r, bytes.Repeat([]byte{7}, int(in.Size))), fuse.OK
	}
	m := mount(fs)
	fd := open(t, m.path("data"), unix.O_RDONLY)
	kit.Must(t, unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM)) // no read-ahead
	buf := make([]byte, 1)
	read := func(off int64) int {
		t.Helper()
		n, err := unix.Pread(fd, buf, off)
		kit.Must(t, err)
		if n > 0 && buf[0] != 7 {
			t.Errorf("byte at %d: got %d, want 7", off, buf[0])
		}
		return n
	}
	read(dataSize - 1)
	for _, size := range []uint64{0, 1, dataSize, dataSize + 1, 1 << 63, math.MaxUint64} {
		kit.Must(t, m.dev.ExtendSize(fileNode, size))
		before := reads.Load()
		if read(dataSize - 1); reads.Load() != before {
			t.Errorf("extend to %d: the cached page was read again", size)
		}
		if n := read(8 << 20); n != 0 {
			t.Errorf("extend to %d: got %d bytes behind the end", size, n)
		}
	}
	kit.Must(t, m.dev.ExtendSize(fileNode, 8<<20+1))
	if n := read(8 << 20); n != 1 {
		t.Errorf("last byte after the extension: got %d bytes, want 1", n)
	}
	kit.Must(t, m.dev.ExtendSize(77, 4096)) // a node that the kernel does not know
}

// A kernel is the kernel's end of a connection: a socket that keeps message boundaries as /dev/fuse
// does.
type kernel struct {
	t   testing.TB
	fd  int
	dev *Device
	log *logBuffer
}

func newKernel(t testing.TB) *kernel {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	kit.Must(t, err)
	for _, fd := range fds {
		kit.Must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20))
	}
	kit.Must(t, unix.SetsockoptTimeval(fds[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 30}))
	dev, err := newDevice(fds[1])
	kit.Must(t, err)
	return &kernel{t, fds[0], dev, &logBuffer{}}
}

// serve starts a connection for the connection, which ends with the test.
func (k *kernel) serve(fs *testFS) {
	k.t.Helper()
	in := fuse.InitIn{Major: 7, Minor: 45, MaxReadAhead: 1 << 20, Flags: fuse.CAP_ASYNC_READ}
	k.send(26, 1, bytesOf(&in)[unsafe.Sizeof(in.InHeader):])
	s, err := NewDevFuse(k.dev, fs, options(k.log))
	kit.Must(k.t, err)
	if errno, _ := k.receive(1); errno != 0 {
		k.t.Fatalf("INIT: %v", errno)
	}
	served := make(chan struct{})
	go func() {
		s.Serve()
		close(served)
	}()
	k.t.Cleanup(func() {
		_ = unix.Shutdown(k.fd, unix.SHUT_RDWR)
		<-served
		_ = unix.Close(k.fd)
		kit.Must(k.t, k.dev.Close())
	})
}

// send sends a request.
func (k *kernel) send(op Op, unique uint64, body []byte) {
	k.t.Helper()
	h := fuse.InHeader{Opcode: uint32(op), Unique: unique, NodeId: fileNode}
	h.Length = uint32(int(unsafe.Sizeof(h)) + len(body))
	_, err := unix.Write(k.fd, append(bytes.Clone(bytesOf(&h)), body...))
	kit.Must(k.t, err)
}

// receive returns the next reply, which must be that of unique.
func (k *kernel) receive(unique uint64) (syscall.Errno, []byte) {
	k.t.Helper()
	buf := make([]byte, 2<<20)
	n, err := unix.Read(k.fd, buf)
	for err == unix.EINTR { // a socket with a timeout is not read again after a signal
		n, err = unix.Read(k.fd, buf)
	}
	if err != nil || n < headerSize {
		k.t.Fatalf("reply to request %d: got %d bytes, %v", unique, n, err)
	}
	size, got := binary.NativeEndian.Uint32(buf), binary.NativeEndian.Uint64(buf[8:])
	if int(size) != n || got != unique {
		k.t.Fatalf("reply: got %d bytes with length %d for request %d, want request %d", n, size, got, unique)
	}
	return syscall.Errno(-int32(binary.NativeEndian.Uint32(buf[4:]))), buf[headerSize:n]
}

func (k *kernel) sendRead(unique uint64, size uint32) {
	k.t.Helper()
	k.send(OpRead, unique, readIn(size))
}

// readIn returns the body of a READ or READDIR.
func readIn(size uint32) []byte {
	in := fuse.ReadIn{Size: size}
	return bytesOf(&in)[unsafe.Sizeof(in.InHeader):]
}

func (k *kernel) interrupt(unique, target uint64) {
	k.t.Helper()
	k.send(OpInterrupt, unique, binary.NativeEndian.AppendUint64(nil, target))
}

// TestDeviceOf uses descriptors of another owner.
func TestDeviceOf(t *testing.T) {
	kit.NeedsFUSE(t)
	first, err := OpenDevice()
	kit.Must(t, err)
	defer first.Close()
	kept, err := first.File()
	kit.Must(t, err)
	defer kept.Close()
	kit.Must(t, first.Use(func(fd int) { kit.Must(t, unix.SetNonblock(fd, true)) })) // of the shared description
	d, err := DeviceOf(kept)
	kit.Must(t, err)
	defer d.Close()
	kit.Must(t, kept.Close())
	kit.Must(t, d.Use(func(fd int) {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		closes, err2 := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		kit.Must(t, errors.Join(err, err2))
		if flags&unix.O_NONBLOCK != 0 || closes&unix.FD_CLOEXEC == 0 {
			t.Errorf("flags of the duplicate: got %#x and %#x, want no O_NONBLOCK, and FD_CLOEXEC", flags, closes)
		}
	}))
	dir := t.TempDir()
	kit.Must(t, first.Use(func(fd int) { mountTest(t, dir, fd) }))
	kit.Must(t, first.Close())
	if d.Disconnected() {
		t.Error("connection after Close of the first Device: ended")
	}
	if _, err := NewDevFuse(d, newTestFS(), resumeOptions()); err != nil {
		t.Errorf("NewDevFuse: %v", err)
	}
	kit.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
	kit.Must(t, d.Close())
	if _, err := d.File(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("File after Close: got %v, want %v", err, os.ErrClosed)
	}

	null, err := os.Open(os.DevNull)
	kit.Must(t, err)
	defer null.Close()
	file, err := os.Create(t.TempDir() + "/file")
	kit.Must(t, err)
	defer file.Close()
	for _, f := range []*os.File{null, file, kept} {
		if _, err := DeviceOf(f); err == nil {
			t.Errorf("DeviceOf(%s): got no error", f.Name())
		}
	}
}

// TestRepliedFollowsEachReply checks that Replied is called once for each request with a reply.
func TestRepliedFollowsEachReply(t *testing.T) {
	fs := newTestFS()
	fs.keepReplied = true
	release, began := make(chan struct{}), make(chan struct{})
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		switch in.Offset {
		case 1:
			panic("test")
		case 2:
			close(began)
			<-r.Done()
			return nil, fuse.EINTR
		}
		return give(r, fileData(int64(in.Offset), int(in.Size))), fuse.OK
	}
	fs.lookup = func(*Request) fuse.Status {
		<-release
		return fuse.ENOENT
	}
	k := newKernel(t)
	k.serve(fs)
	readAt := func(unique, off uint64) {
		in := fuse.ReadIn{Size: 4096, Offset: off}
		k.send(OpRead, unique, bytesOf(&in)[unsafe.Sizeof(in.InHeader):])
	}
	replied := func(want uint64) {
		t.Helper()
		k.receive(want)
		if all := fs.takeReplied(t, 1); len(all) != 1 || all[0] != want&^resent {
			t.Errorf("request %#x: got calls of Replied %#x", want, all)
		}
	}
	forget := make([]byte, 8)
	k.send(OpForget, 10, forget)
	k.send(OpBatchForget, 12, make([]byte, 8))
	readAt(14, 0)
	replied(14)
	readAt(16|resent, 0)
	replied(16 | resent)
	readAt(18, 1)
	replied(18)
	readAt(20, 2)
	<-began
	k.interrupt(21, 20)
	replied(20)
	k.interrupt(21, 20) // has no effect and no reply
	k.send(99, 22, nil)
	replied(22)
	k.send(1, 24|resent, []byte("none\x00"))
	time.Sleep(5 * time.Millisecond)
	fs.mu.Lock()
	if len(fs.replied) != 0 {
		t.Errorf("calls of Replied before the reply: got %d, want 0", fs.replied)
	}
	fs.mu.Unlock()
	close(release)
	replied(24 | resent)
}

func TestInterruptOfRead(t *testing.T) {
	fs := newTestFS()
	began := make(chan uint64)
	fs.read = func(r *Request, in *fuse.ReadIn) ([][]byte, fuse.Status) {
		began <- in.Unique
		<-r.Done()
		return nil, fuse.EINTR
	}
	k := newKernel(t)
	k.serve(fs)
	for round := uint64(1); round <= 3; round++ { // a worker serves more READs after an interrupt
		first, second := 100*round, 100*round+2
		k.sendRead(first, 4096)
		<-began
		k.sendRead(second, 4096)
		<-began
		for _, unique := range []uint64{second, first} {
			k.interrupt(unique+1, unique)
			if errno, _ := k.receive(unique); errno != unix.EINTR {
				t.Fatalf("interrupted READ: got %v, want EINTR", errno)
			}
		}
		k.interrupt(first+1, first) // has no effect and no reply
	}
}

func TestBadReadResults(t *testing.T) {
	for _, c := range []struct {
		name string
		read func() ([][]byte, fuse.Status)
		want syscall.Errno
	}{
		{"error", func() ([][]byte, fuse.Status) { return nil, fuse.EACCES }, unix.EACCES},
		{"panic", func() ([][]byte, fuse.Status) { panic("test") }, unix.EUCLEAN},
		{"more than requested", func() ([][]byte, fuse.Status) {
			return [][]byte{make([]byte, 4096), make([]byte, 1)}, fuse.OK
		}, unix.EIO},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := newTestFS()
			fs.read = func(*Request, *fuse.ReadIn) ([][]byte, fuse.Status) { return c.read() }
			k := newKernel(t)
			k.serve(fs)
			k.sendRead(4, 4096)
			if errno, data := k.receive(4); errno != c.want || len(data) != 0 {
				t.Errorf("reply: got %v and %d bytes, want %v without data", errno, len(data), c.want)
			}
			if w, ok := fs.requests.Oldest(); ok {
				t.Errorf("in progress after the reply: got %+v, want no request", w)
			}
			fs.read = nil
			k.sendRead(6, 4096)
			if errno, data := k.receive(6); errno != 0 || len(data) != 4096 {
				t.Errorf("next READ: got %v and %d bytes, want 4096", errno, len(data))
			}
		})
	}
}

// TestEveryRequestGetsReply sends requests that the file system cannot handle. The kernel
// waits for the replies.
func TestEveryRequestGetsReply(t *testing.T) {
	k := newKernel(t)
	k.serve(newTestFS())
	for i, c := range []struct {
		name string
		op   Op
		body []byte
		want syscall.Errno
	}{
		{"unknown opcode", 99, nil, unix.ENOSYS},
		{"short READ", OpRead, make([]byte, 8), unix.EINVAL},
		{"short GETXATTR", OpGetXAttr, make([]byte, 2), unix.EINVAL},
		{"method that panics", OpReadDir, readIn(1 << 20), unix.EUCLEAN},
		{"READ of more than MaxWrite", OpRead, readIn(1<<20 + 1), unix.EINVAL},
	} {
		t.Run(c.name, func(t *testing.T) {
			unique := uint64(10 + 2*i)
			k.t = t
			k.send(c.op, unique, c.body)
			if errno, _ := k.receive(unique); errno != c.want {
				t.Errorf("reply: got %v, want %v", errno, c.want)
			}
		})
	}
}

// TestRejectedRepliesEndRequests makes write(2) of a reply fail.
func TestRejectedRepliesEndRequests(t *testing.T) {
	k := newKernel(t)
	kit.Must(t, k.dev.Use(func(fd int) {
		kit.Must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10))
	}))
	fs := newTestFS()
	fs.keepReplied = true
	k.serve(fs)
	k.sendRead(4, 1<<20)
	if errno, _ := k.receive(4); errno != unix.EIO {
		t.Errorf("READ whose reply is too long for the socket: got %v, want EIO", errno)
	}
	if all := fs.takeReplied(t, 1); len(all) != 1 || all[0] != 4 {
		t.Errorf("calls of Replied: got %d, want 4", all)
	}
	if s := k.log.String(); !strings.Contains(s, "request 4: write: message too long") {
		t.Errorf("log: got %q, want the error", s)
	}
}

// TestReadErrorsAreRetried makes read(2) fail.
func TestReadErrorsAreRetried(t *testing.T) {
	fs := newTestFS()
	k := newKernel(t)
	k.serve(fs)
	_, err := unix.Write(k.fd, make([]byte, 10)) // shorter than a header
	kit.Must(t, err)
	k.sendRead(4, 4096)
	if errno, data := k.receive(4); errno != 0 || len(data) != 4096 {
		t.Errorf("READ after a short request: got %v and %d bytes, want 4096", errno, len(data))
	}
	kit.Eventually(t, "message", func() bool { return strings.Contains(k.log.String(), "request of 10 bytes") })
}
