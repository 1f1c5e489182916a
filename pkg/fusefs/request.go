package fusefs

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// A request is one request from the kernel, as the context of the RPCs it needs. Its Done channel
// is closed when the caller was hit by a deadly signal, or when the mount is aborted.
type request struct {
	cancel <-chan struct{} // closed by go-fuse when the kernel sends INTERRUPT: any signal
	pid    uint32          // thread that made the call; 0 when it lives in another PID namespace
	cred   []byte
	start  time.Time     // zero when nobody asks
	owner  atomic.Uint64 // for OwnerOf

	done  chan struct{}
	ended bool   // guarded by interrupts.mu: done is closed
	index int    // guarded by interrupts.mu: place in live
	gen   uint64 // guarded by interrupts.mu: changes when the struct is used again
}

var _ context.Context = (*request)(nil)

// Deadline is none.
func (r *request) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done is closed when the request should be given up.
func (r *request) Done() <-chan struct{} { return r.done }

// Err is context.Canceled once Done is closed.
func (r *request) Err() error {
	select {
	case <-r.done:
		return context.Canceled
	default:
		return nil
	}
}

// interruptPoll is how often interrupted requests are looked at. A deadly signal may follow a
// harmless one, and the kernel tells of the first only, so there is no way around looking.
const interruptPoll = 50 * time.Millisecond

// interrupts watches the requests that are being worked on. One timer serves all of them and runs
// only while there are any, because a goroutine for each would cost more than most requests do.
type interrupts struct {
	onInterrupt func() // called for each request that was given up

	mu      sync.Mutex
	live    []*request
	timer   *time.Timer
	armed   bool
	aborted bool
	device  *fuseDevice // nil while nothing is mounted
	pool    []*request
}

// watch names the device that the requests come from.
func (w *interrupts) watch(device *fuseDevice) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.device = device
}

func (w *interrupts) begin(cancel <-chan struct{}, pid uint32) *request {
	w.mu.Lock()
	defer w.mu.Unlock()
	var r *request
	if n := len(w.pool); n > 0 {
		r, w.pool = w.pool[n-1], w.pool[:n-1]
	} else {
		r = &request{}
	}
	if r.done == nil || r.ended {
		r.done, r.ended = make(chan struct{}), false
	}
	r.cancel, r.pid, r.index = cancel, pid, len(w.live)
	r.gen++
	w.live = append(w.live, r)
	if w.aborted {
		r.end()
		return r
	}
	if !w.armed {
		w.armed = true
		if w.timer == nil {
			w.timer = time.AfterFunc(interruptPoll, w.tick)
		} else {
			w.timer.Reset(interruptPoll)
		}
	}
	return r
}

// finish takes r off the watch; r must not be used afterwards.
func (w *interrupts) finish(r *request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := len(w.live) - 1
	w.live[r.index] = w.live[last]
	w.live[r.index].index = r.index
	w.live[last] = nil
	w.live = w.live[:last]
	r.cancel, r.cred = nil, nil
	w.pool = append(w.pool, r)
}

func (r *request) end() {
	if !r.ended {
		r.ended = true
		close(r.done)
	}
}

// abort ends all requests, now and later.
func (w *interrupts) abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.aborted = true
	for _, r := range w.live {
		r.end()
	}
}

// stop ends the timer. No request may be live.
func (w *interrupts) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
	}
}

func (w *interrupts) tick() {
	type suspect struct {
		r   *request
		gen uint64
		pid uint32
	}
	var suspects []suspect
	w.mu.Lock()
	for _, r := range w.live {
		select {
		case <-r.cancel:
			if !r.ended {
				suspects = append(suspects, suspect{r, r.gen, r.pid})
			}
		default:
		}
	}
	if len(suspects) == 0 {
		w.rearm()
		w.mu.Unlock()
		return
	}
	device := w.device
	w.mu.Unlock()

	// go-fuse cancels every request when the kernel has ended the connection, and then there is
	// nobody left to answer.
	over := device != nil && device.dead()
	for i := range suspects {
		if !over && !dying(suspects[i].pid) {
			suspects[i].r = nil
		}
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range suspects {
		if s.r != nil && s.r.gen == s.gen && s.r.index < len(w.live) && w.live[s.r.index] == s.r {
			s.r.end()
			w.onInterrupt()
		}
	}
	w.rearm()
}

// rearm is called with mu held, by tick only.
func (w *interrupts) rearm() {
	w.armed = len(w.live) > 0 && !w.aborted
	if w.armed {
		w.timer.Reset(interruptPoll)
	}
}

// dying tells whether the thread has a deadly signal pending, or ends already and closes its files:
// what it wrote is written back behind it. The kernel turns every signal that will end a process
// into a SIGKILL pending for each of its threads, which is gone once they begin to end. A thread
// that cannot be seen counts as dying: nobody could end its call otherwise.
func dying(pid uint32) bool {
	if pid == 0 {
		return true
	}
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return true
	}
	for _, field := range []string{"\nSigPnd:", "\nShdPnd:"} {
		mask, ok := statusField(b, field)
		if !ok {
			return true
		}
		v, err := strconv.ParseUint(string(mask), 16, 64)
		if err != nil || v&(1<<(uint(syscall.SIGKILL)-1)) != 0 {
			return true
		}
	}
	return exiting(b)
}

// exiting reads /proc/PID/status: a thread lets go of its memory, and with it of these lines,
// before it closes its files. Not /proc/PID/stat, which has the flag itself but waits for whoever
// is in the middle of an exec, and that may be waiting for us.
func exiting(status []byte) bool {
	_, alive := statusField(status, "\nVmSize:")
	return !alive
}

// statusField is the value of a line of /proc/PID/status; name is "\nName:".
func statusField(status []byte, name string) ([]byte, bool) {
	_, rest, ok := bytes.Cut(status, []byte(name))
	if !ok {
		return nil, false
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return bytes.TrimSpace(line), true
}

// begin starts the work on a request of the kernel's: it counts and times it, and finds the
// caller's credential.
func (fs *FS) begin(op Op, cancel <-chan struct{}, h *fuse.InHeader) *request {
	fs.Counters.Ops[op].Add(1)
	r := fs.interrupts.begin(cancel, h.Pid)
	if fs.opts.Observe != nil {
		r.start = time.Now()
	}
	r.setOwner(h.Pid, h.Uid)
	r.cred = fs.creds.of(h.Uid, h.Gid, h.Pid)
	return r
}

// end finishes the work on r and is the answer to the kernel.
func (fs *FS) end(op Op, r *request, err error) fuse.Status {
	if fs.opts.Observe != nil {
		fs.opts.Observe(op, time.Since(r.start))
	}
	fs.interrupts.finish(r)
	status := toStatus(err)
	if status == fuse.EINTR && fs.isAborted() {
		status = fuse.EIO // no signal came, and there is no use in trying again
	}
	if status != fuse.OK {
		fs.Counters.Errors[op].Add(1)
	}
	return status
}

// background is the context of work that no request waits for alone: it ends when the mount is
// aborted.
type background struct{ fs *FS }

func (background) Deadline() (time.Time, bool) { return time.Time{}, false }
func (b background) Done() <-chan struct{}     { return b.fs.aborted }
func (b background) Err() error {
	if b.fs.isAborted() {
		return context.Canceled
	}
	return nil
}
