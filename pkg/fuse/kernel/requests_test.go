package kernel

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestExitingProcess checks which interrupted threads get no reply: those that are ending.
func TestExitingProcess(t *testing.T) {
	if terminating(uint32(os.Getpid())) {
		t.Error("terminating: got true for this process, want false")
	}
	// A child that has exited but was not waited for has released its memory.
	cmd := exec.Command("true")
	kit.Must(t, cmd.Start())
	defer cmd.Wait()
	kit.Eventually(t, "zombie", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
		kit.Must(t, err)
		state, _ := StatusField(b, "\nState:")
		return state[0] == 'Z'
	})
	if !terminating(uint32(cmd.Process.Pid)) {
		t.Error("terminating: got false for a zombie, want true")
	}
}

// begun returns a request that has begun at a time.
func (w *Requests) begun(op Op, pid uint32, at ledger.Time) *Request {
	r := &Request{Op: op, Unique: uint64(pid)}
	r.owner.Store(1000<<32 | uint64(pid))
	r.Times.Begin(at)
	w.begin(r)
	return r
}

// TestOldest checks that Oldest finds the request that began first, and leaves out waits for locks.
func TestOldest(t *testing.T) {
	var w Requests
	want := func(when string, want *Request) {
		t.Helper()
		got, ok := w.Oldest()
		if ok != (want != nil) || ok && (got.Op != want.Op || got.PID != uint32(want.Unique) || got.UID != 1000 ||
			got.Age < 2000 || got.Age > time.Hour) {
			t.Errorf("%s: got %+v, %t, want %+v", when, got, ok, want)
		}
	}
	want("without requests", nil)
	now := ledger.Now()
	lock := w.begun(OpSetLkw, 1, now-4000)
	want("with a wait for a lock", nil)
	read, write := w.begun(OpRead, 2, now-3000), w.begun(OpWrite, 3, now-2000)
	want("with three requests", read)
	w.end(read)
	want("after the READ", write)
	w.end(write)
	w.end(lock)
	want("after all requests", nil)
}

// TestInterrupt checks which requests an INTERRUPT ends: those of threads that are ending, and
// waits for locks.
func TestInterrupt(t *testing.T) {
	var ended atomic.Int32
	w := Requests{Ended: func() { ended.Add(1) }}
	defer w.Close()
	now := ledger.Now()
	w.interruptNumber(5, now) // before the request begins
	w.interruptNumber(6, now)
	for _, c := range []struct {
		name   string
		op     Op
		unique uint64
		alive  bool
		early  bool
		want   bool
	}{
		{"thread of another PID namespace", OpRead, 1, false, false, true},
		{"living thread", OpRead, 2, true, false, false},
		{"wait for a lock", OpSetLkw, 3, true, false, true},
		{"INTERRUPT before the request", OpRead, 5, false, true, true},
		{"wait for a lock, INTERRUPT before", OpSetLkw, 6, true, true, true},
	} {
		r := &Request{Op: c.op, Unique: c.unique}
		if c.alive {
			r.owner.Store(uint64(os.Getpid()))
		}
		r.Times.Begin(now)
		w.begin(r)
		if !c.early {
			w.interruptNumber(c.unique, now)
		}
		w.check()
		if (r.Err() != nil) != c.want {
			t.Errorf("%s: got error %v, want one: %t", c.name, r.Err(), c.want)
		}
		w.end(r)
	}
	w.Interrupt(func(*Request) bool { t.Error("a request is still in progress"); return false })
	if n := ended.Load(); n != 2 || len(w.early) != 0 {
		t.Errorf("got %d calls of Ended and %d early INTERRUPTs, want 2 and none", n, len(w.early))
	}
	w.interruptNumber(7, now)
	old := w.begun(OpRead, 7, now+keepEarly+1)
	if old.interrupted || len(w.early) != 0 {
		t.Error("an old INTERRUPT is kept")
	}
	for range 2 * maxEarly {
		w.interruptNumber(8, now)
	}
	if len(w.early) != maxEarly {
		t.Errorf("INTERRUPTs without a request: got %d, want %d", len(w.early), maxEarly)
	}
}

// TestTimerEndsRequests waits for the timer.
func TestTimerEndsRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w Requests
		for range 2 { // the second one resets the timer
			r := w.begun(OpRead, 0, ledger.Now())
			w.interruptNumber(0, ledger.Now())
			start := time.Now()
			<-r.Done()
			if d := time.Since(start); d != signalPoll {
				t.Errorf("end of an interrupted request: got %v, want %v", d, signalPoll)
			}
			w.end(r)
			synctest.Wait()
			if w.armed {
				t.Error("the timer runs without a request")
			}
		}
	})
}

// TestAbortEndsRequests checks current and later requests, and which of them count as ended.
func TestAbortEndsRequests(t *testing.T) {
	ended := 0
	w := Requests{Ended: func() { ended++ }}
	w.begun(OpRead, 1, ledger.Now())
	w.Disconnect()
	w.Disconnect()
	r := w.begun(OpRead, 2, ledger.Now())
	if r.Err() == nil || ended != 1 {
		t.Errorf("request after the end: got error %v and %d calls of Ended, want an error and 1", r.Err(), ended)
	}
}

// TestRequestOf checks that a context leads to its Request, and the Request to its caller.
func TestRequestOf(t *testing.T) {
	fs := newTestFS()
	var caller [2]uint32
	fs.lookup = func(r *Request) fuse.Status {
		ctx := context.WithValue(r, t, 1)
		if RequestOf(ctx) != r || RequestOf(context.Background()) != nil || r.Tag != nil || r.Calls != 0 ||
			r.Bytes != 0 {
			t.Errorf("got request %p with %+v, want %p as new", RequestOf(ctx), r, r)
		}
		caller[0], caller[1] = r.Caller()
		r.AddCall(new(ledger.Times))
		r.Tag, r.Bytes = "tag", 1
		return fuse.OK
	}
	in := fuse.InHeader{Caller: fuse.Caller{Pid: 4711, Owner: fuse.Owner{Uid: math.MaxUint32 - 1}}}
	q := NewHandler(fs, options(&logBuffer{})).NewRequest(&recorder{room: 1000})
	for range 2 {
		q.Handle(message(OpLookup, in, "data\x00"))
	}
	if caller != [...]uint32{4711, math.MaxUint32 - 1} {
		t.Errorf("caller: got %d", caller)
	}
}
