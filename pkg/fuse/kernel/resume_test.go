package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serverEnv makes the test binary another process. "resume" continues the connection of descriptor
// 3, whose INIT request comes through descriptor 4. "resume kept" also has the memory of
// KeepRequests as descriptor 5. See also getStuck, callForTest and useForTest.
const serverEnv = "NFSRDMAD_FRONT_TEST_SERVER"

func serveForTest(mode string) error {
	dev, err := newDevice(3)
	if err != nil {
		return err
	}
	init, err := io.ReadAll(os.NewFile(4, "init"))
	if err != nil {
		return err
	}
	var mem *os.File
	if mode == "resume kept" {
		mem = os.NewFile(5, "memory")
		defer mem.Close()
	}
	fs := newTestFS()
	fs.delay = 2 * time.Millisecond // a process that is killed has requests in progress
	s, err := Resume(dev, fs, resumeOptions(), init, mem)
	if err != nil {
		return err
	}
	s.Serve()
	return nil
}

func resumeOptions() Options {
	o := options(os.Stderr)
	o.Capabilities |= fuse.CAP_HAS_RESEND
	return o
}

// startServer starts a process that continues the connection of dev. mem is what Memory returned.
func startServer(t *testing.T, dev *os.File, init []byte, mem *os.File) *exec.Cmd {
	t.Helper()
	r, w, err := os.Pipe()
	kit.Must(t, err)
	c := exec.Command("/proc/self/exe")
	mode := "resume"
	c.ExtraFiles = []*os.File{dev, r}
	if mem != nil {
		mode = "resume kept"
		c.ExtraFiles = append(c.ExtraFiles, mem)
	}
	c.Env = append(os.Environ(), serverEnv+"="+mode)
	c.Stderr = os.Stderr
	kit.Must(t, c.Start())
	_, err = w.Write(init)
	kit.Must(t, errors.Join(err, r.Close(), w.Close()))
	return c
}

// TestResumeAfterKill kills the process that serves a mount, again and again. The program on the
// mount must see a pause and no error.
func TestResumeAfterKill(t *testing.T) {
	t.Run("resent", func(t *testing.T) { testResumeAfterKill(t, false) })
	t.Run("kept", func(t *testing.T) { testResumeAfterKill(t, true) })
}

func testResumeAfterKill(t *testing.T, keep bool) {
	kit.NeedsFUSE(t)
	dir := t.TempDir()
	dev, err := OpenDevice()
	kit.Must(t, err)
	defer dev.Close()
	kit.Must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	first, err := NewDevFuse(dev, newTestFS(), resumeOptions())
	kit.Must(t, err)
	if keep {
		kit.Must(t, first.KeepRequests())
		defer first.memory.close()
	}
	mem, err := first.Memory()
	kit.Must(t, err)
	file, err := dev.File()
	kit.Must(t, err)
	defer func() { _ = errors.Join(file.Close(), mem.Close()) }()
	server := startServer(t, file, first.Init(), mem)

	// The program starts no other: a new process closes its copies of the descriptors of open files,
	// and waits for the server. The signals of Go's scheduler would interrupt calls.
	calls, callsEnd, err := os.Pipe()
	kit.Must(t, err)
	program := exec.Command("/proc/self/exe")
	program.Env = append(os.Environ(), serverEnv+"=use:"+dir, "GODEBUG=asyncpreemptoff=1")
	program.Stderr = os.Stderr
	program.ExtraFiles = []*os.File{callsEnd}
	kit.Must(t, program.Start())
	kit.Must(t, callsEnd.Close())
	for range killsOfServer {
		kit.Must(t, calls.SetReadDeadline(time.Now().Add(kit.Timeout)))
		if _, err := io.ReadFull(calls, make([]byte, callsPerKill)); err != nil {
			t.Errorf("wait for calls on the mount: %v", err)
			_ = unix.Unmount(dir, unix.MNT_FORCE) // ends the calls
			break
		}
		kit.Must(t, server.Process.Kill())
		_ = server.Wait()
		server = startServer(t, file, first.Init(), mem)
	}
	kit.Must(t, calls.Close()) // ends the program
	if err := program.Wait(); err != nil {
		t.Errorf("program on the mount: %v", err)
	}
	kit.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
	_ = server.Wait()
}

// The server is killed killsOfServer times, each time after callsPerKill calls.
const killsOfServer, callsPerKill = 8, 20

// useForTest makes calls on the mount at dir from several threads, and writes a byte to descriptor 3
// for each, until nothing reads there.
func useForTest(dir string) error {
	signal.Ignore(unix.SIGPIPE)
	calls := os.NewFile(3, "calls")
	file, err := unix.Open(dir+"/data", unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	var group errgroup.Group
	for i := range 6 {
		group.Go(func() error {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			buf := make([]byte, 64<<10)
			for {
				err := unix.Stat(dir+"/none", new(unix.Stat_t))
				if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINTR) { // EINTR: Go's runtime
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
					return nil
				}
			}
		})
	}
	return group.Wait()
}

func TestResumeErrors(t *testing.T) {
	withResend := fuse.InitIn{Major: 7, Minor: 40, Flags: 1 << 30, Flags2: fuse.CAP_HAS_RESEND >> 32}
	withResend.Opcode = uint32(OpInit)
	old := withResend
	old.Flags2 = 0
	protocol6 := withResend
	protocol6.Major, protocol6.Minor = 6, 0
	dev, err := OpenDevice()
	kit.Must(t, err)
	defer dev.Close()
	for _, c := range []struct {
		name string
		init []byte
		opts Options
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
	kit.Must(t, err)
	defer dev.Close()
	kit.Must(t, dev.Use(func(fd int) { mountTest(t, dir, fd) }))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	fs := newTestFS()
	began, interrupted := make(chan uint64, 2), make(chan struct{}, 2)
	wait := func(r *Request) fuse.Status {
		if !r.Resent {
			t.Error("request that was sent again: it is not marked")
		}
		began <- r.Unique
		<-r.Done()
		interrupted <- struct{}{}
		return fuse.EINTR
	}
	first, err := NewDevFuse(dev, fs, resumeOptions())
	kit.Must(t, err)
	if keep {
		kit.Must(t, first.KeepRequests())
		defer first.memory.close()
	}
	kind, name, _ := strings.Cut(call, " ")
	program := startCall(t, kind+" "+dir+"/"+name)
	ended := waitFor(program)
	// The first process handles requests until one of the kind that waits, and is gone.
	op := OpRead
	if kind == "stat" {
		op = OpLookup
	}
	w := first.newWorker()
	unique := uint64(0)
	kit.Must(t, dev.Use(func(fd int) {
		first.fd = fd
		buf := first.beginRead(false)
		for unique == 0 {
			n, err := readRequest(fd, buf)
			kit.Must(t, err)
			if h := header(buf[:n]); Op(h.Opcode) == op {
				unique = h.Unique
			} else {
				w.request.Handle(Message{In: buf[:n], Received: ledger.Now()})
				h.Unique = 0
			}
		}
	}))
	if kind == "stat" {
		fs.lookup = wait
	} else {
		fs.read = func(r *Request, _ *fuse.ReadIn) ([][]byte, fuse.Status) {
			return nil, wait(r)
		}
	}
	if !late {
		kit.Must(t, program.Process.Kill())
		// The kernel would drop the request if the signal came while it waits to be sent again.
		kit.Eventually(t, "the INTERRUPT", func() bool {
			n, ready := 0, []unix.PollFd{{Events: unix.POLLIN}}
			kit.Must(t, dev.Use(func(fd int) {
				ready[0].Fd = int32(fd)
				n, err = unix.Poll(ready, 0)
			}))
			return err == nil && n == 1
		})
	}
	mem, err := first.Memory()
	kit.Must(t, err)
	if mem != nil {
		defer mem.Close()
	}
	s, err := Resume(dev, fs, resumeOptions(), first.Init(), mem)
	kit.Must(t, err)
	served := make(chan struct{})
	go func() {
		s.Serve()
		close(served)
	}()
	if got := <-began; got != unique {
		t.Errorf("request that was sent again: got %#x, want %#x", got, unique)
	}
	if late {
		time.Sleep(20 * time.Millisecond)
		kit.Must(t, program.Process.Kill())
	}
	select {
	case <-interrupted:
	case <-time.After(kit.Timeout):
		t.Error("the request was not interrupted")
	}
	_ = unix.Unmount(dir, unix.MNT_FORCE)
	_ = unix.Unmount(dir, unix.MNT_DETACH)
	<-ended
	<-served
}
