package front

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serverEnv makes the test binary serve the connection of descriptor 3. Its value is "new" or
// "resume", and the INIT request goes through descriptor 4. Descriptor 5 is the memory of the
// process before, if there is some. Other values are the mount point for useForTest.
const serverEnv = "NFSRDMAD_FRONT_TEST_SERVER"

// frontEnv is the front of a server: "devfuse", or "requests" for DevFuse.KeepRequests.
const frontEnv = "NFSRDMAD_FRONT_TEST_FRONT"

// delayEnv is how long a server handles a request. A server that is killed should have requests in
// progress.
const delayEnv = "NFSRDMAD_FRONT_TEST_DELAY"

func serveForTest(mode string) error {
	dev, err := newDevice(3)
	if err != nil {
		return err
	}
	initFile := os.NewFile(4, "init")
	fs := newTestFS()
	if d := os.Getenv(delayEnv); d != "" {
		if fs.delay, err = time.ParseDuration(d); err != nil {
			return err
		}
	}
	data := fs.data
	fs.read = func(_ <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		time.Sleep(fs.delay)
		return data(in), fuse.OK
	}
	var s *DevFuse
	if mode == "new" {
		if s, err = newServer(dev, fs, initFile); err == nil {
			_, err = initFile.Write(s.Init())
			initFile.Close()
		}
	} else {
		var init []byte
		if init, err = io.ReadAll(initFile); err == nil {
			s, err = resumeServer(dev, fs, init)
		}
	}
	if err != nil {
		return err
	}
	s.Serve()
	return nil
}

// newServer makes the front of a new connection. If it has memory, newServer first writes the
// number of the descriptor to initFile.
func newServer(dev *Device, fs FileSystem, initFile *os.File) (*DevFuse, error) {
	s, err := NewDevFuse(dev, fs, resumeOptions())
	if err != nil || os.Getenv(frontEnv) != "requests" {
		return s, err
	}
	if err := s.KeepRequests(); err != nil {
		return nil, err
	}
	mem, err := s.Memory()
	if err != nil {
		return nil, err
	}
	var fd [8]byte
	binary.NativeEndian.PutUint64(fd[:], uint64(mem.Fd()))
	_, err = initFile.Write(fd[:])
	return s, err
}

func resumeServer(dev *Device, fs FileSystem, init []byte) (*DevFuse, error) {
	var mem *os.File
	if os.Getenv(frontEnv) != "devfuse" {
		mem = os.NewFile(5, "memory")
		defer mem.Close()
	}
	return Resume(dev, fs, resumeOptions(), init, mem)
}

func resumeOptions() *fuse.MountOptions {
	o := options(os.Stderr)
	o.ExtraCapabilities |= fuse.CAP_HAS_RESEND
	return o
}

// A testServer is a process that serves a connection.
type testServer struct {
	*exec.Cmd
	init []byte
	mem  *os.File // see Memory
}

// startServer starts a process that serves dev. It continues the connection of the process before,
// unless that is nil.
func startServer(t *testing.T, dev *os.File, front string, before *testServer) *testServer {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	s := &testServer{Cmd: exec.Command("/proc/self/exe")}
	mode := "new"
	mine, its := r, w
	if before != nil {
		mode, mine, its = "resume", w, r
		s.init, s.mem = before.init, before.mem
	}
	s.Env = append(os.Environ(), serverEnv+"="+mode, frontEnv+"="+front)
	s.Stderr = os.Stderr
	s.ExtraFiles = []*os.File{dev, its}
	if s.mem != nil {
		s.ExtraFiles = append(s.ExtraFiles, s.mem)
	}
	must(t, s.Start())
	must(t, its.Close())
	if before != nil {
		_, err = mine.Write(s.init)
		must(t, errors.Join(err, mine.Close()))
		return s
	}
	s.init, err = io.ReadAll(mine)
	must(t, errors.Join(err, mine.Close()))
	if front != "devfuse" {
		pid, err := unix.PidfdOpen(s.Process.Pid, 0)
		must(t, err)
		defer unix.Close(pid)
		fd, err := unix.PidfdGetfd(pid, int(binary.NativeEndian.Uint64(s.init)), 0)
		must(t, err)
		s.mem, s.init = os.NewFile(uintptr(fd), "memory"), s.init[8:]
		t.Cleanup(func() { s.mem.Close() })
	}
	return s
}

// TestResumeAfterKill kills the process that serves a mount, again and again. The programs on the
// mount must see a pause and no error.
func TestResumeAfterKill(t *testing.T) {
	t.Setenv(delayEnv, "2ms")
	for _, front := range []string{"devfuse", "requests"} {
		t.Run(front, func(t *testing.T) { testResume(t, front) })
	}
}

func testResume(t *testing.T, front string) {
	kit.NeedsFUSE(t)
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	dir := t.TempDir()
	fd, err := unix.Open(devicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	dev := os.NewFile(uintptr(fd), devicePath)
	defer dev.Close()
	mountTest(t, dir, fd)
	server := startServer(t, dev, front, nil)
	defer func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = server.Process.Kill()
		_ = server.Wait()
	}()

	// The programs run in a process that starts no other: a new process closes its copies of the
	// descriptors of open files, and waits for the server.
	calls, callsEnd, err := os.Pipe()
	must(t, err)
	stopEnd, stop, err := os.Pipe()
	must(t, err)
	programs := exec.Command("/proc/self/exe")
	// The signals of Go's scheduler would interrupt calls.
	programs.Env = append(os.Environ(), serverEnv+"="+dir, "GODEBUG=asyncpreemptoff=1")
	programs.Stderr = os.Stderr
	programs.ExtraFiles = []*os.File{callsEnd, stopEnd}
	must(t, programs.Start())
	t.Cleanup(func() { // after the end of the connection
		_ = programs.Process.Kill()
		_ = programs.Wait()
	})
	must(t, errors.Join(callsEnd.Close(), stopEnd.Close()))
	awaitCalls := func(n int) {
		t.Helper()
		must(t, calls.SetReadDeadline(time.Now().Add(testTimeout)))
		if _, err := io.ReadFull(calls, make([]byte, n)); err != nil {
			t.Fatalf("wait for calls on the mount: %v", err)
		}
	}
	for range rounds {
		must(t, calls.SetReadDeadline(time.Now().Add(time.Millisecond)))
		if _, err := io.Copy(io.Discard, calls); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("the programs have ended: %v", err)
		}
		awaitCalls(20)
		time.Sleep(rand.N(10 * time.Millisecond))
		must(t, server.Process.Kill())
		_ = server.Wait()
		server = startServer(t, dev, front, server)
	}
	awaitCalls(20)
	must(t, stop.Close())
	_, err = io.Copy(io.Discard, calls) // until the programs end
	must(t, err)
	if err := programs.Wait(); err != nil {
		t.Errorf("programs on the mount: %v", err)
	}
}

// useForTest makes calls on the mount at dir, and writes a byte to descriptor 3 for each, until
// descriptor 4 is closed.
func useForTest(dir string) error {
	calls, stop := os.NewFile(3, "calls"), os.NewFile(4, "stop")
	file, err := unix.Open(dir+"/data", unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	var ended atomic.Bool
	go func() {
		_, _ = stop.Read(make([]byte, 1))
		ended.Store(true)
	}()
	var group errgroup.Group
	for i := range 6 {
		group.Go(func() error {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			buf := make([]byte, 64<<10)
			for !ended.Load() {
				var st unix.Stat_t
				switch err := unix.Stat(dir+"/none", &st); {
				case errors.Is(err, unix.EINTR): // a signal of Go's runtime, before a process had the request
				case !errors.Is(err, unix.ENOENT):
					return fmt.Errorf("stat of a missing name: got %v, want ENOENT", err)
				}
				off := random.Int64N(dataSize/4096-16) * 4096
				n, err := unix.Pread(file, buf, off)
				if errors.Is(err, unix.EINTR) {
					continue
				}
				if err != nil || !bytes.Equal(buf[:n], fileData(off, len(buf))) {
					return fmt.Errorf("read at %d: got %d bytes, %w, want %d bytes of the file", off, n, err, len(buf))
				}
				if _, err := calls.Write([]byte{0}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

func TestResumeErrors(t *testing.T) {
	withResend := fuse.InitIn{Major: 7, Minor: 40, Flags: 1 << 30, Flags2: fuse.CAP_HAS_RESEND >> 32}
	withResend.Opcode = opInit
	old := withResend
	old.Flags2 = 0
	protocol6 := withResend
	protocol6.Major, protocol6.Minor = 6, 0
	dev, err := OpenDevice()
	must(t, err)
	defer dev.Close()
	for _, c := range []struct {
		name string
		init []byte
		opts *fuse.MountOptions
		want string
	}{
		{"nothing", nil, resumeOptions(), "request of 0 bytes is no INIT"},
		{"another request", bytesOf(&fuse.ReadIn{}), resumeOptions(), "is no INIT"},
		{"old protocol", bytesOf(&protocol6), resumeOptions(), "INIT of protocol 6.0"},
		{"old kernel", bytesOf(&old), resumeOptions(), ErrNoResend.Error()},
		{"not requested", bytesOf(&withResend), options(io.Discard), ErrNoResend.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Resume(dev, newTestFS(), c.opts, c.init, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Resume: got %v, want the error %s", err, c.want)
			}
		})
	}
	if _, err := Resume(dev, newTestFS(), resumeOptions(), bytesOf(&withResend), nil); err != nil {
		t.Errorf("Resume: %v", err)
	}
}

// TestResentRequestsAreMarked stops a server with a request in progress.
func TestResentRequestsAreMarked(t *testing.T) {
	kit.NeedsFUSE(t)
	dir := t.TempDir()
	dev, err := OpenDevice()
	must(t, err)
	defer dev.Close()
	must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	var init []byte
	must(t, dev.Use(func(fd int) {
		s, err := NewDevFuse(dev, newTestFS(), resumeOptions())
		must(t, err)
		init = s.Init()
		// The first process receives the request and is gone.
		go unix.Stat(dir+"/none", new(unix.Stat_t))
		buf := make([]byte, s.bufSize)
		n, err := readRequest(fd, buf)
		must(t, err)
		if Resent(header(buf[:n])) {
			t.Error("first request: Resent is true, want false")
		}
	}))
	fs := newTestFS()
	marked := make(chan bool, 1)
	fs.lookup = func(_ <-chan struct{}, h *fuse.InHeader) fuse.Status {
		marked <- Resent(h)
		return fuse.OK
	}
	s, err := Resume(dev, fs, resumeOptions(), init, nil)
	must(t, err)
	served := make(chan struct{})
	go func() {
		s.Serve()
		close(served)
	}()
	select {
	case is := <-marked:
		if !is {
			t.Error("request that was sent again: Resent is false, want true")
		}
	case <-time.After(testTimeout):
		t.Error("the request was not sent again")
	}
	must(t, unix.Unmount(dir, unix.MNT_DETACH))
	<-served
}

// TestInterruptOfResentRequest kills a program whose request was sent again. The kernel then waits
// for the reply, so the request must be interrupted. The program is killed before or after the
// request is sent again.
func TestInterruptOfResentRequest(t *testing.T) {
	for _, call := range []string{"stat none", "direct data"} {
		for _, late := range []bool{false, true} {
			for _, keep := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, killed later=%v, kept=%v", call, late, keep), func(t *testing.T) {
					testInterruptOfResent(t, call, late, keep)
				})
			}
		}
	}
}

func testInterruptOfResent(t *testing.T, call string, late, keep bool) {
	kit.NeedsFUSE(t)
	dir := t.TempDir()
	dev, err := OpenDevice()
	must(t, err)
	defer dev.Close()
	must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	fs := newTestFS()
	began, interrupted := make(chan fuse.InHeader, 2), make(chan struct{}, 2)
	wait := func(cancel <-chan struct{}, in *fuse.InHeader) fuse.Status {
		began <- *in // in ends with the request
		select {
		case <-cancel:
			interrupted <- struct{}{}
			return fuse.EINTR
		case <-fs.end:
			return fuse.EIO
		}
	}
	first, err := NewDevFuse(dev, fs, resumeOptions())
	must(t, err)
	if keep {
		must(t, first.KeepRequests())
		defer first.requests.close()
	}
	kind, name, _ := strings.Cut(call, " ")
	program := startCall(t, kind+" "+dir+"/"+name)
	ended := waitFor(program)
	// The first process handles requests until one of the kind that waits, and is gone.
	opcode := uint32(opRead)
	if kind == "stat" {
		opcode = 1
	}
	w := first.newWorker()
	unique := uint64(0)
	must(t, dev.Use(func(fd int) {
		first.fd = fd
		buf := first.beginRead(false)
		for unique == 0 {
			n, err := readRequest(fd, buf)
			must(t, err)
			if h := header(buf[:n]); h.Opcode == opcode {
				unique = h.Unique
			} else {
				w.call.Handle(buf[:n], ledger.Now())
				h.Unique = 0
			}
		}
	}))
	if kind == "stat" {
		fs.lookup = wait
	} else {
		fs.read = func(cancel <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
			return nil, wait(cancel, &in.InHeader)
		}
	}
	if !late {
		must(t, program.Process.Kill())
		// The kernel would drop the request if the signal came while it waits to be sent again.
		await(t, "the INTERRUPT", func() bool {
			n, ready := 0, []unix.PollFd{{Events: unix.POLLIN}}
			must(t, dev.Use(func(fd int) {
				ready[0].Fd = int32(fd)
				n, err = unix.Poll(ready, 0)
			}))
			return err == nil && n == 1
		})
	}
	mem, err := first.Memory()
	must(t, err)
	if mem != nil {
		defer mem.Close()
	}
	s, err := Resume(dev, fs, resumeOptions(), first.Init(), mem)
	must(t, err)
	served := make(chan struct{})
	go func() {
		s.Serve()
		close(served)
	}()
	in := <-began
	if !Resent(&in) || Unique(&in) != unique {
		t.Errorf("request that was sent again: got %#x, want %#x with the bit", in.Unique, unique)
	}
	if late {
		time.Sleep(20 * time.Millisecond)
		must(t, program.Process.Kill())
	}
	select {
	case <-interrupted:
	case <-time.After(testTimeout):
		t.Error("the request was not interrupted")
	}
	_ = unix.Unmount(dir, unix.MNT_FORCE)
	_ = unix.Unmount(dir, unix.MNT_DETACH)
	<-ended
	<-served
}

// TestInterruptNamesResentRequest shows what the kernel sends: the INTERRUPT has the number of the
// request with the bit.
func TestInterruptNamesResentRequest(t *testing.T) {
	kit.NeedsFUSE(t)
	dir := t.TempDir()
	dev, err := OpenDevice()
	must(t, err)
	defer dev.Close()
	must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	s, err := NewDevFuse(dev, newTestFS(), resumeOptions())
	must(t, err)
	program := startCall(t, "stat "+dir+"/none")
	ended := waitFor(program)
	must(t, dev.Use(func(fd int) {
		buf := bytesOfWords(make([]uint64, s.bufSize/8))
		read := func() *fuse.InHeader {
			t.Helper()
			_, err := readRequest(fd, buf)
			must(t, err)
			return header(buf)
		}
		unique := read().Unique
		must(t, program.Process.Kill())
		interrupt := func() uint64 {
			t.Helper()
			if h := read(); h.Opcode != opInterrupt {
				t.Fatalf("request %d, want INTERRUPT", h.Opcode)
			}
			return (*fuse.InterruptIn)(unsafe.Pointer(&buf[0])).Unique
		}
		if got := interrupt(); got != unique {
			t.Errorf("INTERRUPT: got %#x, want %#x", got, unique)
		}
		for range 2 { // the second time the request already has the bit
			must(t, dev.resend())
			if got := read().Unique; got != unique|resent {
				t.Errorf("request that was sent again: got %#x, want %#x", got, unique|resent)
			}
			if got := interrupt(); got != unique|resent {
				t.Errorf("INTERRUPT of a request that was sent again: got %#x, want %#x", got, unique|resent)
			}
		}
		reply := make([]byte, headerSize)
		_, err := unix.Write(fd, reply[:putError(reply, unique|resent, unix.EINTR)])
		must(t, err)
	}))
	select {
	case <-ended:
	case <-time.After(testTimeout):
		t.Error("the program did not end")
		_ = unix.Unmount(dir, unix.MNT_FORCE)
	}
}

// TestMarkInReplies checks that a reply has the number that the kernel knows: with the mark, if the
// kernel has sent the request again.
func TestMarkInReplies(t *testing.T) {
	const unique = 42 | resent
	for name, c := range map[string]struct {
		front *DevFuse
		want  uint64
	}{
		"devfuse":  {&DevFuse{}, unique},
		"requests": {&DevFuse{requests: &requestMemory{}}, 42},
	} {
		t.Run(name, func(t *testing.T) {
			r, w, err := os.Pipe()
			must(t, err)
			defer r.Close()
			c.front.fd = int(w.Fd())
			reply := make([]byte, headerSize)
			(&worker{s: c.front}).Send(reply[:putError(reply, unique, unix.EIO)], nil)
			must(t, w.Close())
			got, err := io.ReadAll(r)
			must(t, err)
			if n := binary.NativeEndian.Uint64(got[8:]); len(got) != headerSize || n != c.want {
				t.Errorf("got %d bytes and number %#x, want %#x", len(got), n, c.want)
			}
		})
	}
}
