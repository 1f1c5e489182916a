package vfs

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

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A request is one request from the kernel and the context of its RPCs. The channel of Done is
// closed when the calling thread gets a fatal signal or when the mount is aborted.
type request struct {
	cancel <-chan struct{} // closed when the kernel sends INTERRUPT for any signal
	pid    uint32          // calling thread; 0 when it is in another PID namespace
	cred   []byte
	times  ledger.Times  // since begin
	calls  int           // RPCs that have ended
	moved  int           // file bytes read or written
	status fuse.Status   // set by end
	tag    any           // of Options.Tag
	owner  atomic.Uint64 // for OwnerOf
	state  *State        // nil if the mount is not kept
	unique uint64        // number of the request, without the mark of one that is sent again; set by begin
	kept   *requestState // nil if the request has no record
	target target        // of a READ

	// Guarded by interrupts.mu: what begin sets.
	op    kernel.Op
	began ledger.Time

	done  chan struct{}
	ended bool   // guarded by interrupts.mu: done is closed
	index int    // guarded by interrupts.mu: index in active
	gen   uint64 // guarded by interrupts.mu: changes when the struct is reused
}

var _ context.Context = (*request)(nil)

// Deadline returns no deadline.
func (r *request) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done returns a channel that is closed when the request should end.
func (r *request) Done() <-chan struct{} { return r.done }

// Err returns context.Canceled after Done is closed.
func (r *request) Err() error {
	select {
	case <-r.done:
		return context.Canceled
	default:
		return nil
	}
}

// interruptPoll is the interval of checks of interrupted requests. A fatal signal may follow a
// harmless one, and the kernel reports only the first signal, so polling is necessary.
const interruptPoll = 50 * time.Millisecond

// interrupts watches the active requests for fatal signals. One timer serves all requests and runs
// only while requests are active. A goroutine per request would cost more than most requests.
type interrupts struct {
	onInterrupt func()    // called for each request that ended early
	onPanic     func(any) // called for a panic of the timer

	mu      sync.Mutex
	active  []*request
	timer   *time.Timer
	armed   bool
	aborted bool
	ended   []*request // have ended, and their reply is not written yet
	pool    []*request
}

func (w *interrupts) begin(op kernel.Op, cancel <-chan struct{}, pid uint32) *request {
	now := ledger.Now()
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
	r.cancel, r.pid, r.index, r.op, r.began = cancel, pid, len(w.active), op, now
	r.gen++
	w.active = append(w.active, r)
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

// maxEnded bounds the requests whose reply is not written yet. Each worker of the connection has at most
// one.
const maxEnded = 1024

// finish stops watching r and reuses it: at once, or with keep after takeEnded. The caller must not
// use r afterwards.
func (w *interrupts) finish(r *request, keep bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := len(w.active) - 1
	w.active[r.index] = w.active[last]
	w.active[r.index].index = r.index
	w.active[last] = nil
	w.active = w.active[:last]
	r.cancel, r.cred, r.state, r.kept = nil, nil, nil, nil
	switch {
	case !keep:
		w.pool = append(w.pool, r)
	case len(w.ended) < maxEnded:
		w.ended = append(w.ended, r)
	default: // of a reply that was never written
		w.pool = append(w.pool, w.ended[0])
		w.ended[0] = r
	}
}

// takeEnded returns what finish has kept of a request, and reuses the request. ok is false if there
// is none.
func (w *interrupts) takeEnded(unique uint64) (e Ended, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, r := range w.ended {
		if r.unique != unique {
			continue
		}
		last := len(w.ended) - 1
		w.ended[i], w.ended[last] = w.ended[last], nil
		w.ended = w.ended[:last]
		e = Ended{Op: r.op, Owner: r.caller(), Status: r.status, Calls: r.calls, Bytes: r.moved, Times: r.times,
			Tag: r.tag}
		r.tag = nil
		w.pool = append(w.pool, r)
		return e, true
	}
	return e, false
}

func (r *request) end() {
	if !r.ended {
		r.ended = true
		close(r.done)
	}
}

// abort ends all current and later requests.
func (w *interrupts) abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.aborted = true
	for _, r := range w.active {
		r.end()
	}
}

// disconnect ends all current and later requests, because no program waits for them.
func (w *interrupts) disconnect() {
	w.mu.Lock()
	for _, r := range w.active {
		if !r.ended {
			w.onInterrupt()
		}
	}
	w.mu.Unlock()
	w.abort()
}

// stop ends the timer. No request may be active.
func (w *interrupts) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
	}
}

func (w *interrupts) tick() {
	defer func() {
		if v := recover(); v != nil {
			w.onPanic(v)
		}
	}()
	type candidate struct {
		r   *request
		gen uint64
		pid uint32
	}
	var interrupted []candidate
	w.mu.Lock()
	for _, r := range w.active {
		select {
		case <-r.cancel:
			if !r.ended {
				interrupted = append(interrupted, candidate{r, r.gen, r.pid})
			}
		default:
		}
	}
	if len(interrupted) == 0 {
		w.rearm()
		w.mu.Unlock()
		return
	}
	w.mu.Unlock()

	for i := range interrupted {
		if !terminating(interrupted[i].pid) {
			interrupted[i].r = nil
		}
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range interrupted {
		if s.r != nil && s.r.gen == s.gen && s.r.index < len(w.active) && w.active[s.r.index] == s.r {
			s.r.end()
			w.onInterrupt()
		}
	}
	w.rearm()
}

// rearm restarts the timer while requests are active. Only tick calls it, with mu held.
func (w *interrupts) rearm() {
	w.armed = len(w.active) > 0 && !w.aborted
	if w.armed {
		w.timer.Reset(interruptPoll)
	}
}

// terminating reports whether the thread has a fatal signal pending or is exiting. An exiting
// thread closes its files, and their data is written in the background. For a fatal signal the
// kernel makes SIGKILL pending for each thread of the process, until the thread begins to exit. A
// thread in another PID namespace counts as terminating, because the daemon cannot see the signals
// of this thread.
func terminating(pid uint32) bool {
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

// exiting reports whether a thread is exiting, from its /proc/PID/status. A thread releases its
// memory, and with it the Vm lines, before it closes its files. /proc/PID/stat contains the exit
// flag, but reading it blocks during an exec, which may wait for this daemon.
func exiting(status []byte) bool {
	_, alive := statusField(status, "\nVmSize:")
	return !alive
}

// statusField returns the value of a line of /proc/PID/status. name has the form "\nName:".
func statusField(status []byte, name string) ([]byte, bool) {
	_, rest, ok := bytes.Cut(status, []byte(name))
	if !ok {
		return nil, false
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return bytes.TrimSpace(line), true
}

// begin counts a request, starts its timer, and finds the caller's credential.
func (fs *FS) begin(k *kernel.Request) *request {
	fs.checkFailed()
	fs.Counters.Ops[k.Op].Add(1)
	h := k.Header
	r := fs.interrupts.begin(k.Op, k.Interrupted(), h.Pid)
	r.times.Begin(r.began)
	r.calls, r.moved, r.unique = 0, 0, kernel.Unique(h)
	if fs.opts.Tag != nil {
		r.tag = fs.opts.Tag()
	}
	pid := h.Pid
	if fs.opts.Guest { // a process of the virtual machine
		pid = 0
	}
	r.setOwner(pid, h.Uid)
	if !usesOpenCred(k.Op) {
		r.cred = fs.creds.of(h.Uid, h.Gid, h.Pid)
	}
	if fs.state != nil {
		r.state = fs.state
		if kernel.Resent(h) {
			fs.claim(r)
		}
	}
	return r
}

// usesOpenCred reports whether the calls of a request use only the credential of the open file. The
// kernel's requests to write pages have no caller.
func usesOpenCred(op kernel.Op) bool {
	switch op {
	case kernel.OpRead, kernel.OpWrite, kernel.OpFlush, kernel.OpFsync, kernel.OpReadDir, kernel.OpReadDirPlus:
		return true
	}
	return false
}

// onNode is begin for a request that names a node. The error is ESTALE when the node is not in the
// inode table, and the error of an earlier process if that has ended the request.
func (fs *FS) onNode(k *kernel.Request) (*request, *inode, error) {
	r := fs.begin(k)
	ino := fs.inodes.get(k.Header.NodeId)
	if ino == nil {
		return r, nil, syscall.ESTALE
	}
	return r, ino, r.earlierError()
}

// end finishes r and returns the status for the kernel.
func (fs *FS) end(r *request, err error) fuse.Status {
	op, status := r.op, toStatus(err)
	switch {
	case status != fuse.EINTR:
	case fs.isAborted():
		status = fuse.EIO // no signal arrived, and a retry would fail again
	case r.Err() == nil && nfs.IsBusy(err):
		status = fuse.Status(fs.opts.BusyErrno)
	}
	r.keepResult(status)
	if fs.opts.Observe != nil || fs.opts.Ended != nil {
		r.status = status
		r.times.Mark(ledger.PhaseLocal, ledger.Now())
	}
	if fs.opts.Observe != nil {
		fs.opts.Observe(Sample{Op: op, Owner: r.caller(), Bytes: r.moved, Duration: r.times.Total()})
	}
	fs.interrupts.finish(r, fs.opts.Ended != nil)
	if status != fuse.OK {
		fs.Counters.Errors[op].Add(1)
	}
	return status
}

// background is the context of work that serves no single request. background ends when the mount
// is aborted.
type background struct{ fs *FS }

func (background) Deadline() (time.Time, bool) { return time.Time{}, false }
func (b background) Done() <-chan struct{}     { return b.fs.aborted }
func (b background) Err() error {
	if b.fs.isAborted() {
		return context.Canceled
	}
	return nil
}
