package vfs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestExitingProcess checks which interrupted threads get no reply: those that are ending.
func TestExitingProcess(t *testing.T) {
	if terminating(uint32(os.Getpid())) {
		t.Error("terminating: got true for this process, want false")
	}
	// A child that has exited but was not waited for has released its memory.
	cmd := exec.Command("true")
	must(t, cmd.Start())
	defer cmd.Wait()
	kit.Eventually(t, "zombie", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
		must(t, err)
		state, _ := statusField(b, "\nState:")
		return state[0] == 'Z'
	})
	if !terminating(uint32(cmd.Process.Pid)) {
		t.Error("terminating: got false for a zombie, want true")
	}
}

// TestOldest checks that Oldest finds the request that began first, and leaves out waits for locks.
func TestOldest(t *testing.T) {
	fs := &FS{}
	w := &fs.interrupts
	defer w.stop()
	if r, ok := fs.Oldest(); ok {
		t.Errorf("without requests: got %+v, want none", r)
	}
	lock := w.begin(kernel.OpSetLkw, nil, 1)
	if r, ok := fs.Oldest(); ok {
		t.Errorf("with a wait for a lock: got %+v, want none", r)
	}
	read, write := w.begin(kernel.OpRead, nil, 2), w.begin(kernel.OpWrite, nil, 3)
	read.setOwner(2, 1000)
	for _, r := range []*request{lock, read, write} {
		r.began -= 1000
	}
	read.began -= 1000
	r, ok := fs.Oldest()
	if want := (Owner{PID: 2, UID: 1000}); !ok || r.Op != kernel.OpRead || r.Owner != want || r.Age < 2000 ||
		r.Age > time.Hour {
		t.Errorf("got %+v, %t, want the READ of %+v", r, ok, want)
	}
	w.finish(read, false)
	if r, ok := fs.Oldest(); !ok || r.Op != kernel.OpWrite {
		t.Errorf("after the READ: got %+v, %t, want the WRITE", r, ok)
	}
	w.finish(write, false)
	w.finish(lock, false)
	if r, ok := fs.Oldest(); ok {
		t.Errorf("after all requests: got %+v, want none", r)
	}
}

func TestOwnerOf(t *testing.T) {
	r := &request{}
	r.setOwner(4711, 4294967294)
	derived, cancel := context.WithCancel(context.WithValue(context.Background(), ownerKey{}, r))
	defer cancel()
	for name, tt := range map[string]struct {
		ctx  context.Context
		want Owner
		ok   bool
	}{
		"request":                   {r, Owner{PID: 4711, UID: 4294967294}, true},
		"derived from request":      {derived, Owner{PID: 4711, UID: 4294967294}, true},
		"background":                {background{}, Owner{WriteBack: true}, true},
		"other context":             {context.Background(), Owner{}, false},
		"context with other values": {context.WithValue(context.Background(), otherKey{}, 1), Owner{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got, ok := OwnerOf(tt.ctx); got != tt.want || ok != tt.ok {
				t.Errorf("got %+v, %v, want %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
	if r.Value("other") != nil || (background{}).Value("other") != nil {
		t.Error("Value of another key: got a value, want nil")
	}
	var ctx context.Context = r
	if n := testing.AllocsPerRun(100, func() { OwnerOf(ctx) }); n != 0 {
		t.Errorf("allocations of OwnerOf: got %v, want 0", n)
	}
}

// otherKey is a context key of another package.
type otherKey struct{}
