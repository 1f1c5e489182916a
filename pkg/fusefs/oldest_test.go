package fusefs

import (
	"testing"
	"time"
)

// TestOldest checks that Oldest finds the request that began first, and leaves out waits for locks.
func TestOldest(t *testing.T) {
	fs := &FS{}
	w := &fs.interrupts
	defer w.stop()
	if r, ok := fs.Oldest(); ok {
		t.Errorf("without requests: got %+v, want none", r)
	}
	lock := w.begin(OpSetLockWait, nil, 1)
	if r, ok := fs.Oldest(); ok {
		t.Errorf("with a wait for a lock: got %+v, want none", r)
	}
	read, write := w.begin(OpRead, nil, 2), w.begin(OpWrite, nil, 3)
	read.setOwner(2, 1000)
	for _, r := range []*request{lock, read, write} {
		r.began -= 1000
	}
	read.began -= 1000
	r, ok := fs.Oldest()
	if want := (Owner{PID: 2, UID: 1000}); !ok || r.Op != OpRead || r.Owner != want || r.Age < 2000 ||
		r.Age > time.Hour {
		t.Errorf("got %+v, %t, want the READ of %+v", r, ok, want)
	}
	w.finish(read, false)
	if r, ok := fs.Oldest(); !ok || r.Op != OpWrite {
		t.Errorf("after the READ: got %+v, %t, want the WRITE", r, ok)
	}
	w.finish(write, false)
	w.finish(lock, false)
	if r, ok := fs.Oldest(); ok {
		t.Errorf("after all requests: got %+v, want none", r)
	}
}
