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

// TestObserve sees a time for each operation that the kernel waits for.
func TestObserve(t *testing.T) {
	e := startExport(t)
	var mu sync.Mutex
	seen := make(map[Op]int)
	m := e.mount(t, mountConfig{opts: Options{Observe: func(op Op, d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		seen[op]++
		if d <= 0 || d > testTimeout {
			t.Errorf("%v took %v", op, d)
		}
	}}})
	must(t, os.WriteFile(m.path("file"), []byte("x"), 0o644))
	wantContent(t, m.path("file"), []byte("x"))
	mu.Lock()
	defer mu.Unlock()
	for _, op := range []Op{OpCreate, OpWrite, OpFlush, OpOpen, OpRead} {
		if seen[op] == 0 || uint64(seen[op]) != m.fs.Counters.Ops[op].Load() {
			t.Errorf("%v: %d times, of %d", op, seen[op], m.fs.Counters.Ops[op].Load())
		}
	}
}

// What surrounds each request allocates nothing once it is warm.
func TestRequestAllocatesNothing(t *testing.T) {
	var sum time.Duration
	fs := &FS{creds: newCredentials(), opts: Options{Observe: func(_ Op, d time.Duration) { sum += d }}}
	defer fs.interrupts.stop()
	var h fuse.InHeader // of no process, whose groups would be read again now and then
	if n := testing.AllocsPerRun(1000, func() { fs.end(OpRead, fs.begin(OpRead, nil, &h), nil) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if sum == 0 {
		t.Error("no time was observed")
	}
}

func TestExiting(t *testing.T) {
	own, err := os.ReadFile("/proc/self/status")
	must(t, err)
	if exiting(own) {
		t.Error("this process ends")
	}
	// A child that nobody has waited for yet has let go of its memory.
	cmd := exec.Command("true")
	must(t, cmd.Start())
	defer cmd.Wait()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
		must(t, err)
		if state, _ := statusField(b, "\nState:"); len(state) > 0 && state[0] == 'Z' {
			if !exiting(b) {
				t.Errorf("a process that has ended is not taken for one:\n%s", b)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal("the child does not end")
		}
	}
}
