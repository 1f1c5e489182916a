package front

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serverEnv makes the test binary another process. "resume" continues the connection of descriptor
// 3, whose INIT request comes through descriptor 4. See also getStuck and callForTest.
const serverEnv = "NFSRDMAD_FRONT_TEST_SERVER"

func serveForTest(string) error {
	dev, err := newDevice(3)
	if err != nil {
		return err
	}
	init, err := io.ReadAll(os.NewFile(4, "init"))
	if err != nil {
		return err
	}
	s, err := Resume(dev, newTestFS(), resumeOptions(), init, nil)
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

// startServer starts a process that continues the connection of dev.
func startServer(t *testing.T, dev *os.File, init []byte) *exec.Cmd {
	t.Helper()
	r, w, err := os.Pipe()
	kit.Must(t, err)
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), serverEnv+"=resume")
	c.Stderr = os.Stderr
	c.ExtraFiles = []*os.File{dev, r}
	kit.Must(t, c.Start())
	_, err = w.Write(init)
	kit.Must(t, errors.Join(err, r.Close(), w.Close()))
	return c
}

func TestResumeErrors(t *testing.T) {
	withResend := fuse.InitIn{Major: 7, Minor: 40, Flags: 1 << 30, Flags2: fuse.CAP_HAS_RESEND >> 32}
	withResend.Opcode = opInit
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
	kit.Must(t, err)
	if keep {
		kit.Must(t, first.KeepRequests())
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
	kit.Must(t, dev.Use(func(fd int) {
		first.fd = fd
		buf := first.beginRead(false)
		for unique == 0 {
			n, err := readRequest(fd, buf)
			kit.Must(t, err)
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
	in := <-began
	if !Resent(&in) || Unique(&in) != unique {
		t.Errorf("request that was sent again: got %#x, want %#x with the bit", in.Unique, unique)
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
			kit.Must(t, err)
			defer r.Close()
			c.front.fd = int(w.Fd())
			reply := make([]byte, headerSize)
			(&worker{s: c.front}).Send(reply[:putError(reply, unique, unix.EIO)], nil)
			kit.Must(t, w.Close())
			got, err := io.ReadAll(r)
			kit.Must(t, err)
			if n := binary.NativeEndian.Uint64(got[8:]); len(got) != headerSize || n != c.want {
				t.Errorf("got %d bytes and number %#x, want %#x", len(got), n, c.want)
			}
		})
	}
}
