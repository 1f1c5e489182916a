package front

import (
	"bytes"
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

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
)

// serverEnv makes the test binary serve the connection of descriptor 3. Its value is "new" or
// "resume", and the INIT request goes through descriptor 4. Other values are the mount point for
// useForTest.
const serverEnv = "NFSRDMAD_FRONT_TEST_SERVER"

// requestTime is how long a server handles a request, so that a server that is killed has requests
// in progress.
const requestTime = 2 * time.Millisecond

func serveForTest(mode string) error {
	dev, err := newDevice(3)
	if err != nil {
		return err
	}
	initFile := os.NewFile(4, "init")
	fs := newTestFS()
	data := fs.data
	fs.read = func(_ <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		time.Sleep(requestTime)
		return data(in), fuse.OK
	}
	fs.delay = requestTime
	var s *DevFuse
	if mode == "new" {
		if s, err = NewDevFuse(dev, fs, resumeOptions()); err == nil {
			_, err = initFile.Write(s.Init())
			initFile.Close()
		}
	} else {
		var init []byte
		if init, err = io.ReadAll(initFile); err == nil {
			s, err = Resume(dev, fs, resumeOptions(), init)
		}
	}
	if err != nil {
		return err
	}
	s.Serve()
	return nil
}

func resumeOptions() *fuse.MountOptions {
	o := options(os.Stderr)
	o.ExtraCapabilities |= fuse.CAP_HAS_RESEND
	return o
}

// startServer starts a process that serves dev. With mode "new" it returns the INIT request.
func startServer(t *testing.T, dev *os.File, mode string, init []byte) (*exec.Cmd, []byte) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), serverEnv+"="+mode)
	cmd.Stderr = os.Stderr
	mine, its := w, r
	if mode == "new" {
		mine, its = r, w
	}
	cmd.ExtraFiles = []*os.File{dev, its}
	must(t, cmd.Start())
	must(t, its.Close())
	if mode == "new" {
		init, err = io.ReadAll(mine)
	} else {
		_, err = mine.Write(init)
	}
	must(t, errors.Join(err, mine.Close()))
	return cmd, init
}

// TestResumeAfterKill kills the process that serves a mount, again and again. The programs on the
// mount must see a pause and no error.
func TestResumeAfterKill(t *testing.T) {
	testutil.NeedsFUSE(t)
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
	server, init := startServer(t, dev, "new", nil)
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
	programs.Env = append(os.Environ(), serverEnv+"="+dir)
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
		awaitCalls(20)
		time.Sleep(rand.N(10 * time.Millisecond))
		must(t, server.Process.Kill())
		_ = server.Wait()
		server, _ = startServer(t, dev, "resume", init)
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
	file, err := unix.Open(dir+"/data", unix.O_RDONLY|unix.O_DIRECT, 0)
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
				if err := unix.Stat(dir+"/none", &st); !errors.Is(err, unix.ENOENT) {
					return fmt.Errorf("stat of a missing name: got %v, want ENOENT", err)
				}
				off := random.Int64N(dataSize/4096-16) * 4096
				n, err := unix.Pread(file, buf, off)
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
			_, err := Resume(dev, newTestFS(), c.opts, c.init)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Resume: got %v, want the error %s", err, c.want)
			}
		})
	}
	if _, err := Resume(dev, newTestFS(), resumeOptions(), bytesOf(&withResend)); err != nil {
		t.Errorf("Resume: %v", err)
	}
}

// TestResentRequestsAreMarked stops a server with a request in progress.
func TestResentRequestsAreMarked(t *testing.T) {
	testutil.NeedsFUSE(t)
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
	fs.lookup = func(h *fuse.InHeader) { marked <- Resent(h) }
	s, err := Resume(dev, fs, resumeOptions(), init)
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
