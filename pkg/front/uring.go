package front

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/kernelfault"
)

const (
	// queueEntries is the number of entries that each queue has at first.
	queueEntries = 2
	// maxQueues bounds the possible CPUs of a host.
	maxQueues = 512
	// maxEntries bounds the entries of a connection, and so its threads and its memory: each entry
	// has a buffer for the largest request. Further requests wait in the kernel.
	maxEntries = 1024
	// parkTimeout bounds the time that Park needs, parkPause is the pause between its checks, and
	// refillPause the pause before it sends requests again.
	parkTimeout, parkPause, refillPause = 3 * time.Second, time.Millisecond, 100 * time.Millisecond
)

const (
	enableURing  = "/sys/module/fuse/parameters/enable_uring"
	possiblePath = "/sys/devices/system/cpu/possible"
	onlinePath   = "/sys/devices/system/cpu/online"
)

// URingOptions are the options of NewURing and Resume.
type URingOptions struct {
	// Dir is the mount point. Calls of statfs(2) about it make the kernel send requests.
	Dir string
}

// rings are the entries of a connection with FUSE over io_uring. The kernel has a queue for each
// possible CPU, and sends a request to the queue of the CPU on which the caller runs. A request
// occupies an entry until its reply.
type rings struct {
	mem      *ringMemory
	dir      string // the mount point
	queues   []ringQueue
	first    []*entry // those that do not run
	entries  [maxEntries]atomic.Pointer[entry]
	total    atomic.Int32 // entries that have memory
	kicks    atomic.Uint64
	full     sync.Once // logs that there are maxEntries
	parking  atomic.Bool
	watching atomic.Bool   // watchSignals runs
	parked   chan struct{} // never closed
}

// A ringQueue is the queue of one CPU.
type ringQueue struct {
	idle    atomic.Int32 // entries that wait for a request
	growing atomic.Bool  // a goroutine adds entries
}

// NewURing is NewDevFuse with FUSE over io_uring. If that is not possible, the connection uses
// /dev/fuse, and Refused tells why.
func NewURing(dev *Device, fs FileSystem, opts *fuse.MountOptions, ropts URingOptions) (*DevFuse, error) {
	withURing := *opts
	withURing.ExtraCapabilities |= fuse.CAP_OVER_IO_URING
	s := newDevFuse(dev, fs, &withURing)
	prepare := func(out *fuse.InitOut) { s.makeRings(out, ropts) }
	var err error
	if closed := dev.Use(func(fd int) { err = s.negotiate(fd, prepare) }); closed != nil {
		err = closed
	}
	if err != nil {
		s.rings.close()
		return nil, fmt.Errorf("negotiate the FUSE protocol: %w", err)
	}
	return s, nil
}

// resumeRings continues with the memory of another process.
func (s *DevFuse) resumeRings(mem *os.File, ropts URingOptions) error {
	m, err := openRingMemory(mem)
	if err == nil {
		if err = s.restoreRings(m, ropts); err != nil {
			s.rings.close()
		}
	}
	if err != nil {
		return fmt.Errorf("io_uring: %w", err)
	}
	return nil
}

// Refused returns why a connection of NewURing uses /dev/fuse, or nil.
func (s *DevFuse) Refused() error { return s.refused }

// URing reports whether the connection uses io_uring.
func (s *DevFuse) URing() bool { return s.rings != nil }

// makeRings makes the entries before the reply to INIT. Without them the kernel would wait for
// ever, so it removes the capability from the reply when it fails.
func (s *DevFuse) makeRings(out *fuse.InitOut, ropts URingOptions) {
	const capability = fuse.CAP_OVER_IO_URING >> 32
	if out.Flags2&capability == 0 {
		s.refused = notOffered()
		return
	}
	err, _ := kernelfault.URing(hostRelease())
	if err == nil {
		err = s.newRings(max(minReadBuffer, int(out.MaxWrite), int(out.MaxPages)*os.Getpagesize()), ropts)
	}
	if err != nil {
		s.rings.close()
		s.rings, s.refused = nil, err
		out.Flags2 &^= capability
	}
}

// notOffered explains why the kernel does not offer FUSE over io_uring.
func notOffered() error {
	b, err := os.ReadFile(enableURing)
	switch {
	case err != nil:
		return errors.New("the kernel has no FUSE over io_uring; use Linux 6.14 or later")
	case strings.TrimSpace(string(b)) != "Y":
		return fmt.Errorf("FUSE over io_uring is off; write Y to %s", enableURing)
	}
	return errors.New("the kernel does not offer FUSE over io_uring")
}

// hostRelease returns the release of the running kernel. Tests replace it.
var hostRelease = kernelfault.Release

// URingWarning returns a fault of the running kernel that does not keep mounts from using FUSE over
// io_uring, or nil.
func URingWarning() error {
	_, warn := kernelfault.URing(hostRelease())
	return warn
}

// URingAvailable returns why the host cannot use FUSE over io_uring, or nil.
func URingAvailable() error {
	b, err := os.ReadFile(enableURing)
	if err != nil || strings.TrimSpace(string(b)) != "Y" {
		return notOffered()
	}
	if refuse, _ := kernelfault.URing(hostRelease()); refuse != nil {
		return refuse
	}
	if _, err := cpuQueues(); err != nil {
		return err
	}
	r, err := newIORing()
	if err == nil {
		r.close()
	}
	return err
}

// cpuQueues returns the number of queues of a connection, which is that of the possible CPUs. The
// process must be able to run on each CPU that can have requests, see kick.
func cpuQueues() (int, error) {
	possible, err := readCPUs(possiblePath)
	if err != nil {
		return 0, err
	}
	online, err := readCPUs(onlinePath)
	if err != nil {
		return 0, err
	}
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(os.Getpid(), &allowed); err != nil {
		return 0, os.NewSyscallError("sched_getaffinity", err)
	}
	for _, cpu := range online {
		if !allowed.IsSet(cpu) {
			return 0, fmt.Errorf("the daemon may not run on CPU %d: FUSE over io_uring needs all CPUs", cpu)
		}
	}
	n := possible[len(possible)-1] + 1
	if n > maxQueues {
		return 0, fmt.Errorf("the host has %d possible CPUs; FUSE over io_uring is limited to %d here", n, maxQueues)
	}
	return n, nil
}

// readCPUs reads a list of CPUs in the format of the kernel, for example 0-3,8. It is not empty.
func readCPUs(path string) ([]int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var cpus []int
	for r := range strings.SplitSeq(strings.TrimSpace(string(b)), ",") {
		from, to, isRange := strings.Cut(r, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || first < 0 || last > 1<<16 || last < first {
			return nil, fmt.Errorf("%s: unknown format %q", path, b)
		}
		for ; first <= last; first++ {
			cpus = append(cpus, first)
		}
	}
	return cpus, nil
}

// newRings makes the first entries of a new connection.
func (s *DevFuse) newRings(payload int, ropts URingOptions) error {
	n, err := cpuQueues()
	if err != nil {
		return err
	}
	m, err := newRingMemory(payload, n)
	if err != nil {
		return err
	}
	s.useRings(m, n, ropts)
	for i := range n * queueEntries {
		e, err := s.newEntry(i % n)
		if err != nil {
			return err
		}
		s.rings.first = append(s.rings.first, e)
	}
	return nil
}

func (s *DevFuse) useRings(m *ringMemory, queues int, ropts URingOptions) {
	s.rings = &rings{mem: m, dir: ropts.Dir, queues: make([]ringQueue, queues), parked: make(chan struct{})}
	s.rings.kicks.Store(rand.Uint64N(1 << 60))
}

// restoreRings makes the entries of another process again.
func (s *DevFuse) restoreRings(m *ringMemory, ropts URingOptions) error {
	n, err := cpuQueues()
	if err == nil && n != int(m.header().queues) {
		err = fmt.Errorf("the connection has %d queues, want %d", m.header().queues, n)
	}
	if err != nil {
		m.close()
		return err
	}
	s.useRings(m, n, ropts)
	for i := range maxEntries {
		e := entry{mem: m.slot(i)}
		queue := e.record().queue
		if queue > uint64(n) {
			return fmt.Errorf("entry %d has queue %d of %d", i, queue, n)
		}
		if queue == 0 {
			break
		}
		old, err := s.newEntry(int(queue) - 1)
		if err != nil {
			return err
		}
		s.rings.first = append(s.rings.first, old)
	}
	return nil
}

// close releases entries that do not run, and the memory.
func (r *rings) close() {
	if r == nil {
		return
	}
	for _, e := range r.first {
		e.ring.close()
	}
	r.mem.close()
}

// serveRings starts the entries.
func (s *DevFuse) serveRings() {
	var registered sync.WaitGroup
	for _, e := range s.rings.first {
		registered.Add(1)
		s.workers.Go(func() { e.run(registered.Done) })
	}
	s.rings.first = nil
	if s.resumed {
		s.workers.Go(func() {
			registered.Wait()
			online, _ := readCPUs(onlinePath)
			for _, cpu := range online {
				s.kick(cpu)
			}
		})
	}
}

// grow adds entries to a queue whose entries all have a request. A request that waits, for example
// for a lock, must not delay others.
func (s *DevFuse) grow(queue int) {
	q := &s.rings.queues[queue]
	if q.idle.Load() > 0 || s.disconnected.Load() || s.rings.parking.Load() || !q.growing.CompareAndSwap(false, true) {
		return
	}
	s.workers.Go(func() {
		for q.idle.Load() <= 0 && s.addEntry(queue) {
			s.kick(queue)
		}
		q.growing.Store(false)
		s.grow(queue)
	})
}

// addEntry adds one entry to a queue. It reports false when there are enough entries.
func (s *DevFuse) addEntry(queue int) bool {
	if s.disconnected.Load() || s.rings.parking.Load() {
		return false
	}
	e, err := s.newEntry(queue)
	if err != nil {
		s.rings.full.Do(func() { s.fs.Warn("FUSE over io_uring has too few threads: requests may wait", "error", err) })
		return false
	}
	registered := make(chan struct{})
	s.workers.Go(func() { e.run(func() { close(registered) }) })
	<-registered
	return true
}

// kick makes a queue take the requests that wait in it. The kernel gives a new entry only to a new
// request; requests that wait get an entry only after a reply. So kick makes the kernel send a
// request to the queue of this CPU.
func (s *DevFuse) kick(cpu int) {
	s.workers.Go(func() {
		err := errNoFile
		onCPU(cpu, func() { err = s.retrieve() })
		if err != nil && !s.disconnected.Load() {
			s.dev.touch(cpu, s.rings.dir, s.gone)
		}
	})
}

// onCPU calls f on a CPU. It does nothing if the CPU is offline, which then has no requests. The
// thread may run on all its CPUs again afterwards: the main thread of the process never ends, and
// other goroutines use it.
func onCPU(cpu int, f func()) {
	runtime.LockOSThread()
	var before, one unix.CPUSet
	one.Set(cpu)
	if unix.SchedGetaffinity(0, &before) == nil && unix.SchedSetaffinity(0, &one) == nil {
		f()
		if unix.SchedSetaffinity(0, &before) != nil {
			return // a locked thread ends with its goroutine
		}
	}
	runtime.UnlockOSThread()
}

// errNoFile means that the kernel does not know one of the regular files of the latest requests.
var errNoFile = errors.New("no regular file is known")

// retrieve makes the kernel send a NOTIFY_REPLY to the queue of the CPU of this thread. It does not
// wait for the reply. FUSE_NOTIFY_RETRIEVE needs a regular file that the kernel knows.
func (s *DevFuse) retrieve() error {
	var out struct {
		fuse.OutHeader
		notifyUnique, node, offset uint64
		size, padding              uint32
	}
	out.Length, out.Status = uint32(unsafe.Sizeof(out)), notifyRetrieve
	files := &s.rings.mem.header().files
	for i := range files {
		if out.node = atomic.LoadUint64(&files[i]); out.node == 0 {
			continue
		}
		// The kernel's own numbers are smaller, and even.
		out.notifyUnique = 1<<62 | s.rings.kicks.Add(1)<<1&(1<<62-1)
		if _, err := unix.Write(s.fd, bytesOf(&out)); err == nil {
			return nil
		}
	}
	return errNoFile
}

// notifyRetrieve is FUSE_NOTIFY_RETRIEVE of include/uapi/linux/fuse.h.
const notifyRetrieve = 5

// Park stops the handling of requests, for a process that then exits and leaves the connection to
// the next process. Requests that come later, and those in progress, are for the next process. The
// kernel loses a request that it gives to an exiting thread, so Park also gives a request to each
// entry that waits for one. Park needs no more than three seconds. It does nothing on a connection
// without io_uring.
func (s *DevFuse) Park() {
	if s.rings == nil || s.rings.parking.Swap(true) {
		return
	}
	online, _ := readCPUs(onlinePath)
	var fillers sync.WaitGroup
	for _, cpu := range online {
		fillers.Go(func() { onCPU(cpu, func() { s.fill(cpu) }) })
	}
	fillers.Wait()
}

// fill gives a request to each entry of the queue of this thread's CPU.
func (s *DevFuse) fill(cpu int) {
	q := &s.rings.queues[cpu]
	var again time.Time // when to send requests again
	for deadline := time.Now().Add(parkTimeout); !s.disconnected.Load(); time.Sleep(parkPause) {
		n, now := q.idle.Load(), time.Now()
		switch {
		case n <= 0:
			return
		case now.Before(again):
		case now.Before(deadline) && s.send(cpu, int(n)):
			again = now.Add(refillPause)
		default:
			s.fs.Warn("calls may fail with ECANCELED: threads of FUSE over io_uring did not react in time", "cpu", cpu,
				"threads", n)
			return
		}
	}
}

// send makes the kernel send requests to the queue of this thread's CPU. It returns false if it
// cannot. This process must not wait for its own replies.
func (s *DevFuse) send(cpu, n int) bool {
	for ; n > 0 && s.retrieve() == nil; n-- {
	}
	if n > 0 && s.dev.helper.Load() == nil {
		return false
	}
	for range n {
		go s.dev.touch(cpu, s.rings.dir, s.gone)
	}
	return true
}
