package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// loadScript reads and writes files of the mount $0 and compares them with the files of the server
// in $1, until the file $3 exists. $2 is the number of the user.
const loadScript = `set -e; while [ ! -e "$3" ]; do
	dd if="$0/r$2" iflag=direct bs=64k status=none | cmp - "$1/r$2"
	dd if="$1/r$2" of="$0/w$2" bs=64k status=none conv=fsync
	cmp "$1/r$2" "$1/w$2"; echo done; done`

// TestStoppedDaemonFailsNoCall stops the daemon for longer than all timeouts of its soft mount
// while calls are pending. The server answers during the stop. No call may fail, and the connection
// must stay.
func TestStoppedDaemonFailsNoCall(t *testing.T) {
	t.Parallel()
	const (
		users = 12
		size  = 256 << 10
		stop  = 12 * time.Second // longer than timeo, and than keepalive twice
	)
	files := map[string]int{}
	for i := range users {
		files[fmt.Sprint("r", i)] = size
	}
	h := newPausableMount(t, "soft,timeo=100,retrans=0,keepalive=5,actimeo=0,slots=4", files)
	if err := os.Chmod(filepath.Join(h.dir, "export"), 0o777); err != nil { // the server squashes root
		t.Fatal(err)
	}
	stopFile := filepath.Join(h.dir, "stop")
	var load sync.WaitGroup
	end := sync.OnceFunc(func() {
		if err := os.WriteFile(stopFile, nil, 0o600); err != nil {
			t.Error(err)
		}
		load.Wait()
	})
	t.Cleanup(end) // before newPausableMount unmounts
	var rounds atomic.Int64
	for i := range users {
		cmd := exec.Command("sh", "-c", loadScript, h.mnt, filepath.Join(h.dir, "export"), fmt.Sprint(i), stopFile)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		load.Go(func() {
			for s := bufio.NewScanner(out); s.Scan(); {
				rounds.Add(1)
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("user %d: %v", i, err)
			}
		})
	}
	h.waitRounds(t, &rounds, users)
	h.pause(t)
	h.waitStatus(t, "keepalive call and calls that wait for a slot", func(s *control.MountStatus) bool {
		ping := callOf(s, func(c *control.PendingCall) bool { return c.Owner == control.OwnerLiveness })
		return ping != nil && len(s.Calls) > users/2
	})
	h.stopDaemon(t)
	h.resume(t) // the server answers all calls now
	time.Sleep(stop)
	h.continueDaemon(t)
	h.waitRounds(t, &rounds, users)
	end()
	if s := h.status(t); s.Connects != 1 || s.Timeouts != 0 {
		t.Errorf("got %d connects, %d timeouts, history %+v; want 1 connect and no timeout", s.Connects, s.Timeouts,
			s.History)
	}
}

// waitRounds waits for n more rounds of the load.
func (h *pausableMount) waitRounds(t *testing.T, rounds *atomic.Int64, n int64) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for before := rounds.Load(); rounds.Load() < before+n; time.Sleep(time.Millisecond) {
		if t.Failed() || time.Now().After(deadline) {
			t.Fatal("the load does not proceed")
		}
	}
}

// stopDaemon stops the daemon and returns when all its threads have stopped.
func (w *testEnv) stopDaemon(t *testing.T) {
	t.Helper()
	var ws syscall.WaitStatus
	_ = w.daemon.Process.Signal(syscall.SIGSTOP)
	if _, err := syscall.Wait4(w.daemon.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("stop the daemon: %v, status %#x", err, ws)
	}
	t.Cleanup(func() { w.continueDaemon(t) })
}

func (w *testEnv) continueDaemon(t *testing.T) {
	t.Helper()
	if err := w.daemon.Process.Signal(syscall.SIGCONT); err != nil {
		t.Errorf("continue the daemon: %v", err)
	}
}

// TestStoppedDaemonFailsNoLock stops the daemon for longer than the timeout of its soft mount while
// a lock is requested. The server answers during the stop, so the program must get the lock.
func TestStoppedDaemonFailsNoLock(t *testing.T) {
	t.Parallel()
	h := newPausableMount(t, "soft,timeo=20,retrans=0", map[string]int{"file": 1})
	f, err := os.Open(filepath.Join(h.mnt, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, how := range []int{syscall.LOCK_SH, syscall.LOCK_UN} { // connects to the lock service
		if err := syscall.Flock(int(f.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
	h.pause(t)
	locked := make(chan error, 1)
	go func() { locked <- syscall.Flock(int(f.Fd()), syscall.LOCK_SH) }()
	time.Sleep(500 * time.Millisecond) // the call is sent
	h.stopDaemon(t)
	h.resume(t)
	time.Sleep(3 * time.Second)
	h.continueDaemon(t)
	if err := <-locked; err != nil {
		t.Errorf("lock: %v", err)
	}
}
