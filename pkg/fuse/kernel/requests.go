package kernel

import (
	"bytes"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

const (
	// signalPoll is the interval of checks of interrupted requests. A fatal signal may follow a
	// harmless one, and the kernel reports only the first signal, so polling is necessary.
	signalPoll = 50 * time.Millisecond
	// maxEarly bounds the INTERRUPTs that are kept for requests that have not begun, and keepEarly
	// is how long they are kept.
	maxEarly  = 1024
	keepEarly = ledger.Time(5 * time.Second)
)

// Requests are the requests of a file system in progress, on whatever connection. They end a
// request, see Request.Done, when no program needs its result any more. Their zero value has no
// requests. The methods are safe for concurrent use.
//
// One timer checks all interrupted requests, and runs only while there are some. A goroutine per
// request would cost more than most requests.
type Requests struct {
	// Ended, if not nil, is called for each request that ends by a fatal signal, or with the
	// connection. It must not use the Requests. Panicked, if not nil, is called for a panic of the
	// timer. Both are set before the first request.
	Ended    func()
	Panicked func(any)

	mu      sync.Mutex
	active  []*Request
	timer   *time.Timer // nil before the first INTERRUPT
	armed   bool
	aborted bool
	// INTERRUPTs whose requests have not begun: another goroutine has read the request. Those whose
	// requests have ended stay here, too.
	early     []uint64
	lastEarly ledger.Time
}

// begin adds a request.
func (w *Requests) begin(r *Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.done == nil || r.ended {
		r.done, r.ended = make(chan struct{}), false
	}
	r.interrupted, r.began, r.index = false, r.Times.Start(), len(w.active)
	w.active = append(w.active, r)
	if w.aborted {
		r.endEarly()
	}
	if len(w.early) == 0 {
		return
	}
	if r.began > w.lastEarly+keepEarly {
		w.early = w.early[:0]
	} else if i := slices.Index(w.early, r.Unique); i >= 0 {
		w.early = slices.Delete(w.early, i, i+1)
		w.interrupt(r)
	}
}

// end removes a request.
func (w *Requests) end(r *Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := len(w.active) - 1
	moved := w.active[last]
	w.active[r.index], moved.index = moved, r.index
	w.active[last] = nil
	w.active = w.active[:last]
}

// interrupt handles an INTERRUPT for a request in progress: the calling thread has a signal. Any
// signal ends the wait for a lock. The caller holds mu.
func (w *Requests) interrupt(r *Request) {
	r.interrupted = true
	if r.Op == OpSetLkw {
		r.endEarly()
		return
	}
	if w.armed || w.aborted {
		return
	}
	w.armed = true
	if w.timer == nil {
		w.timer = time.AfterFunc(signalPoll, w.check)
	} else {
		w.timer.Reset(signalPoll)
	}
}

// interruptNumber handles an INTERRUPT for the request with a number.
func (w *Requests) interruptNumber(unique uint64, now ledger.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.active { // INTERRUPTs are rare
		if r.Unique == unique {
			w.interrupt(r)
			return
		}
	}
	if len(w.early) == maxEarly {
		w.early = slices.Delete(w.early, 0, 1)
	}
	w.early, w.lastEarly = append(w.early, unique), now
}

// Interrupt acts as INTERRUPTs for the requests in progress for which match returns true. match
// must not use the Requests.
func (w *Requests) Interrupt(match func(*Request) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.active {
		if match(r) {
			w.interrupt(r)
		}
	}
}

// Abort ends all current and later requests.
func (w *Requests) Abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.aborted = true
	for _, r := range w.active {
		r.endEarly()
	}
}

// Disconnect is Abort after the end of the connection, and calls Ended.
func (w *Requests) Disconnect() {
	w.mu.Lock()
	for _, r := range w.active {
		if !r.ended {
			w.countEnded()
		}
	}
	w.mu.Unlock()
	w.Abort()
}

// Close ends the timer. No request may be in progress.
func (w *Requests) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer != nil {
		w.timer.Stop()
	}
}

func (w *Requests) countEnded() {
	if w.Ended != nil {
		w.Ended()
	}
}

// A Waiting is a request in progress.
type Waiting struct {
	Op       Op
	PID, UID uint32 // as Request.Caller
	Age      time.Duration
}

// Oldest returns the oldest request in progress. It leaves out the waits for locks of other
// programs, which may take any time. ok is false if there is no request.
func (w *Requests) Oldest() (oldest Waiting, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var first *Request
	for _, r := range w.active {
		if r.Op != OpSetLkw && (first == nil || r.began < first.began) {
			first = r
		}
	}
	if first == nil {
		return oldest, false
	}
	pid, uid := first.Caller()
	return Waiting{first.Op, pid, uid, time.Duration(ledger.Now() - first.began)}, true
}

// check ends the interrupted requests whose threads have a fatal signal.
func (w *Requests) check() {
	defer func() {
		if v := recover(); v != nil && w.Panicked != nil {
			w.Panicked(v)
		}
	}()
	type candidate struct {
		r      *Request
		unique uint64 // no two requests have the same
		pid    uint32
	}
	var candidates []candidate
	w.mu.Lock()
	for _, r := range w.active {
		if r.interrupted && !r.ended {
			pid, _ := r.Caller()
			candidates = append(candidates, candidate{r, r.Unique, pid})
		}
	}
	w.mu.Unlock()

	candidates = slices.DeleteFunc(candidates, func(c candidate) bool { return !terminating(c.pid) })

	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range candidates {
		if c.r.index < len(w.active) && w.active[c.r.index] == c.r && c.r.Unique == c.unique {
			c.r.endEarly()
			w.countEnded()
		}
	}
	w.armed = !w.aborted && slices.ContainsFunc(w.active, func(r *Request) bool { return r.interrupted && !r.ended })
	if w.armed {
		w.timer.Reset(signalPoll)
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
		mask, ok := StatusField(b, field)
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
	_, alive := StatusField(status, "\nVmSize:")
	return !alive
}

// StatusField returns the value of a line of /proc/PID/status. name has the form "\nName:".
func StatusField(status []byte, name string) ([]byte, bool) {
	_, rest, ok := bytes.Cut(status, []byte(name))
	if !ok {
		return nil, false
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return bytes.TrimSpace(line), true
}
