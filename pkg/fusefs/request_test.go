package fusefs

import (
	"os"
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
	for stat, want := range map[string]bool{
		"1 (sh) S 0 1 1 0 -1 4194560 16 0":     false,
		"1 (sh) S 0 1 1 0 -1 4194564 16 0":     true,
		"1 (a) b) c) D 0 1 1 0 -1 4 16 0":      true,
		"1 (4 4 4 4 4 4 4) D 0 1 1 0 -1 8 4 4": false,
		"":                                     true,
		"1 (sh":                                true,
	} {
		if got := exiting([]byte(stat)); got != want {
			t.Errorf("%q: %v, want %v", stat, got, want)
		}
	}
	own, err := os.ReadFile("/proc/self/stat")
	must(t, err)
	if exiting(own) {
		t.Error("this process ends")
	}
}
