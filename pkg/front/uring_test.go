package front

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestURingUsesQueues checks that requests come through the rings.
func TestURingUsesQueues(t *testing.T) {
	fs := newTestFS()
	held, release := make(chan struct{}), make(chan struct{})
	fs.read = func(_ <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		close(held)
		<-release
		return fs.result(make([]byte, in.Size)), fuse.OK
	}
	m := mountURing(t, fs)
	if n, err := cpuQueues(); err != nil || len(m.front.rings.queues) != n || n < runtime.NumCPU() {
		t.Errorf("queues: got %d, want %d, at least %d: %v", len(m.front.rings.queues), n, runtime.NumCPU(), err)
	}
	fd := open(t, m.path("data"), unix.O_RDONLY|unix.O_DIRECT)
	var reader sync.WaitGroup
	reader.Go(func() {
		if _, err := unix.Pread(fd, make([]byte, 4096), 0); err != nil {
			t.Error(err)
		}
	})
	<-held
	busy := int(m.front.rings.total.Load())
	for i := range m.front.rings.queues {
		busy -= int(m.front.rings.queues[i].idle.Load())
	}
	if busy != 1 {
		t.Errorf("entries with a request: got %d, want 1", busy)
	}
	close(release)
	reader.Wait()
}

// TestURingRequestsAreInterrupted interrupts threads that wait for a READ: the INTERRUPT comes
// through /dev/fuse. The signal comes when the READ has begun: the kernel drops an interrupt that
// comes before it has copied the request to the ring.
func TestURingRequestsAreInterrupted(t *testing.T) {
	fs := newTestFS()
	begun := make(chan struct{}, 1)
	fs.read = func(cancel <-chan struct{}, _ *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		begun <- struct{}{}
		select {
		case <-cancel:
			return nil, fuse.EINTR
		case <-time.After(testTimeout):
			return nil, fuse.EIO
		}
	}
	m := mountURing(t, fs)
	fd := open(t, m.path("data"), unix.O_RDONLY|unix.O_DIRECT)
	for range 50 {
		thread, result := make(chan int), make(chan error)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine
			thread <- unix.Gettid()
			_, err := unix.Pread(fd, make([]byte, 4096), 0)
			result <- err
		}()
		tid := <-thread
		<-begun
		for done := false; !done; {
			must(t, unix.Tgkill(os.Getpid(), tid, unix.SIGURG)) // Go ignores it otherwise
			select {
			case err := <-result:
				if err != unix.EINTR {
					t.Fatalf("interrupted read: got %v, want EINTR", err)
				}
				done = true
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// TestURingRefused switches FUSE over io_uring off: the mount uses /dev/fuse.
func TestURingRefused(t *testing.T) {
	fs := newTestFS()
	k := newKernel(t)
	s := k.serveFront(fs, newURingFront)
	if err := s.Refused(); err == nil || s.URing() {
		t.Errorf("a kernel that does not offer io_uring: got %v, io_uring %t", err, s.URing())
	}
	k.sendRead(4, 4096)
	if errno, data := k.receive(4); errno != 0 || len(data) != 4096 {
		t.Errorf("READ: got %v and %d bytes, want 4096", errno, len(data))
	}
}

// TestURingRefusedOnFaultyKernel mounts on a kernel that offers FUSE over io_uring and has a known
// fault: the mount uses /dev/fuse.
func TestURingRefusedOnFaultyKernel(t *testing.T) {
	kit.NeedsURing(t)
	before := hostRelease
	hostRelease = func() string { return "6.15.3-generic" }
	t.Cleanup(func() { hostRelease = before })
	const want = "Linux 6.15.3-generic can damage"
	m := mountFront(t, newTestFS(), newURingFront)
	if err := m.front.Refused(); err == nil || !strings.Contains(err.Error(), want) || m.front.URing() {
		t.Errorf("front: got io_uring %t, refused: %v, want %q", m.front.URing(), err, want)
	}
	// Package os would add the file to the poller of this process, which then waits for POLL.
	if _, err := unix.Pread(open(t, m.path("data"), unix.O_RDONLY), make([]byte, 1), 0); err != nil {
		t.Error(err)
	}
	if err := URingAvailable(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("URingAvailable: got %v, want %q", err, want)
	}
}

// TestURingLimit holds more requests than there can be entries: others wait, and none is lost.
func TestURingLimit(t *testing.T) {
	fs := newTestFS()
	release := make(chan struct{})
	fs.read = func(_ <-chan struct{}, in *fuse.ReadIn) (fuse.ReadResult, fuse.Status) {
		<-release
		return fs.result(make([]byte, in.Size)), fuse.OK
	}
	m := mountURing(t, fs)
	fd := open(t, m.path("data"), unix.O_RDONLY|unix.O_DIRECT)
	var readers sync.WaitGroup
	for i := range maxEntries + 40 {
		readers.Go(func() {
			if _, err := unix.Pread(fd, make([]byte, 4096), int64(i%700)*4096); err != nil {
				t.Error(err)
			}
		})
	}
	await(t, "all entries to be used", func() bool { return m.front.rings.total.Load() >= maxEntries })
	time.Sleep(50 * time.Millisecond)
	close(release)
	readers.Wait()
	if n := m.front.rings.total.Load(); n > maxEntries+int32(len(m.front.rings.queues)) {
		t.Errorf("entries: got %d, want at most %d", n, maxEntries)
	}
	if s := fs.warnings.String(); strings.Count(s, "1024 requests are in progress") != 1 {
		t.Errorf("warnings: got %q, want one about the limit", s)
	}
}

// TestURingInterruptsFlushOfKilledProcess kills a process whose FLUSH waits. The signal comes
// before the kernel makes the FLUSH, so the kernel sends no INTERRUPT.
func TestURingInterruptsFlushOfKilledProcess(t *testing.T) {
	fs := newTestFS()
	began, interrupted := make(chan struct{}, 1), make(chan struct{}, 1)
	fs.flush = func(cancel <-chan struct{}) fuse.Status {
		began <- struct{}{}
		select {
		case <-cancel:
			interrupted <- struct{}{}
		case <-fs.end:
		}
		return fuse.OK
	}
	m := mountURing(t, fs)
	cmd := exec.Command("sh", "-c", `exec 3<"$0"; kill -KILL $$`, m.path("data"))
	must(t, cmd.Start())
	<-began
	_ = cmd.Wait()
	select {
	case <-interrupted:
	case <-time.After(testTimeout):
		t.Error("the FLUSH of a killed process was not interrupted")
	}
}

// TestURingNeedsAllCPUs serves from a process that may not run on all CPUs.
func TestURingNeedsAllCPUs(t *testing.T) {
	kit.NeedsURing(t)
	if runtime.NumCPU() == 1 {
		t.Skip("the host has one CPU")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all unix.CPUSet
	must(t, unix.SchedGetaffinity(os.Getpid(), &all))
	defer func() { must(t, unix.SchedSetaffinity(os.Getpid(), &all)) }()
	var one unix.CPUSet
	one.Set(0)
	must(t, unix.SchedSetaffinity(os.Getpid(), &one))
	if err := URingAvailable(); err == nil || !strings.Contains(err.Error(), "may not run on CPU 1") {
		t.Errorf("URingAvailable: got %v", err)
	}
}

// TestOnCPURestoresThread checks that a thread may run on all its CPUs again. The main thread would
// stay on one CPU for the rest of the process.
func TestOnCPURestoresThread(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, during, after unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &before))
	onCPU(0, func() { must(t, unix.SchedGetaffinity(0, &during)) })
	must(t, unix.SchedGetaffinity(0, &after))
	if during.Count() != 1 || !during.IsSet(0) {
		t.Errorf("CPUs during the call: got %v, want only 0", during)
	}
	if after != before {
		t.Errorf("CPUs after the call: got %v, want %v", after, before)
	}
}
