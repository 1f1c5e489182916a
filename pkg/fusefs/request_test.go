package fusefs

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// TestObserveTimesRequests checks that Observe gets a time for each request that the kernel waits
// for.
func TestObserveTimesRequests(t *testing.T) {
	e := startExport(t)
	var mu sync.Mutex
	seen, moved := make(map[Op]int), make(map[Op]int)
	m := e.mount(t, mountConfig{opts: Options{Observe: func(s Sample) {
		mu.Lock()
		defer mu.Unlock()
		seen[s.Op]++
		moved[s.Op] += s.Bytes
		if s.Duration <= 0 || s.Duration > testTimeout {
			t.Errorf("time of %v: got %v, want above 0 and below testTimeout", s.Op, s.Duration)
		}
		if s.Owner.UID != uint32(os.Getuid()) {
			t.Errorf("owner of %v: got uid %d, want %d", s.Op, s.Owner.UID, os.Getuid())
		}
	}}})
	must(t, os.WriteFile(m.path("file"), []byte("xyz"), 0o644))
	wantContent(t, m.path("file"), []byte("xyz"))
	mu.Lock()
	defer mu.Unlock()
	for _, op := range []Op{OpCreate, OpWrite, OpFlush, OpOpen, OpRead} {
		if seen[op] == 0 || uint64(seen[op]) != m.fs.Counters.Ops[op].Load() {
			t.Errorf("%v: observed %d times, want %d", op, seen[op], m.fs.Counters.Ops[op].Load())
		}
	}
	if moved[OpWrite] != 3 || moved[OpRead] != 3 || moved[OpOpen] != 0 {
		t.Errorf("bytes: got %v, want 3 of read and write", moved)
	}
}

// TestRequestDoesNotAllocate checks that begin and end of a request do not allocate.
func TestRequestDoesNotAllocate(t *testing.T) {
	var sum time.Duration
	fs := &FS{creds: newCredentials(new(Counters), nil),
		opts: Options{Observe: func(s Sample) { sum += s.Duration }}}
	defer fs.interrupts.stop()
	var h fuse.InHeader // pid 0, so that no groups are read from /proc
	if n := testing.AllocsPerRun(1000, func() { fs.end(OpRead, fs.begin(OpRead, nil, &h), nil) }); n != 0 {
		t.Errorf("allocations per request: got %v, want 0", n)
	}
	if sum == 0 {
		t.Error("observed time: got 0, want more")
	}
}

func TestExitingProcess(t *testing.T) {
	own, err := os.ReadFile("/proc/self/status")
	must(t, err)
	if exiting(own) {
		t.Error("exiting: got true for this process, want false")
	}
	// A child that has exited but was not waited for has released its memory.
	cmd := exec.Command("true")
	must(t, cmd.Start())
	defer cmd.Wait()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
		must(t, err)
		if state, _ := statusField(b, "\nState:"); len(state) > 0 && state[0] == 'Z' {
			if !exiting(b) {
				t.Errorf("exiting: got false for a zombie, want true:\n%s", b)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("the child did not become a zombie")
		}
	}
}
