package restart

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// killsEnv is the number of kills of TestKillsWithURing. `make soak` sets 1000.
const killsEnv = "NFSRDMAD_KILLS"

func killsOf(t *testing.T) int {
	t.Helper()
	s := os.Getenv(killsEnv)
	if s == "" {
		return 5
	}
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		t.Fatalf("%s=%s: want a number above 0", killsEnv, s)
	}
	return n
}

// checkedKills is the number of kills after which each task must have continued.
const checkedKills = 5

// TestKillsWithURing kills the daemon at random moments while programs call it. Calls that begin
// while the daemon dies may fail with ECANCELED, and succeed when they are made again. Any other
// error, other data, and a call that does not return fail the test.
func TestKillsWithURing(t *testing.T) {
	kit.NeedsURing(t)
	kills := killsOf(t)
	if !mounts.InOwnProcess(t) {
		return
	}
	seed := rand.Uint64()
	t.Log("seed:", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	x, _ := embedded(t)
	r := newRig(t, x, "front=uring")
	if st := r.status(); st.Front != "uring" {
		t.Fatalf("status: got front %q (%s), want uring", st.Front, st.FrontReason)
	}
	w := startWorker(t, r.dir)
	w.do("ok", "load %d %s %s", seed, x.dir, strings.Join(canceledTasks, " "))
	w.advances(canceledTasks) // their directories exist
	begin := time.Now()
	for k := range kills {
		time.Sleep(time.Duration(rng.Int64N(int64(200 * time.Millisecond))))
		r.kill(syscall.SIGKILL)
		r.start()
		if k%checkedKills == 0 || k == kills-1 {
			r.waitState(control.StateMounted)
			w.advances(canceledTasks)
		}
		if k%100 == 99 {
			t.Logf("%d kills after %v", k+1, time.Since(begin).Round(time.Second))
		}
	}
	calls, canceled := w.counts(canceledTasks)
	sums := endLoads(t, []*worker{w})
	t.Logf("%d kills in %v: %d calls, %d of them failed with ECANCELED", kills, time.Since(begin).Round(time.Second),
		calls, canceled)
	w.kill()
	checkSums(t, x.dir, sums, statFiles)
	// The kernel can give a RELEASE to the dying daemon, and a LOOKUP whose reference is then never
	// released. The file or directory then stays open in the daemon until the unmount.
	r.lostFiles = 1 + kills/50
	r.unmount()
}

// advances waits until each task has made a call.
func (w *worker) advances(tasks []string) {
	w.t.Helper()
	for _, name := range tasks {
		before, _ := w.counts([]string{name})
		eventually(w.t, "a call of task "+name, func() error {
			if now, _ := w.counts([]string{name}); now == before {
				return fmt.Errorf("task has made %d calls", now)
			}
			return nil
		})
	}
}

// counts returns the number of calls of tasks, and of those that failed with ECANCELED.
func (w *worker) counts(tasks []string) (calls, canceled int) {
	w.t.Helper()
	for _, name := range tasks {
		w.send("calls %s", name)
		var a, b int
		text := w.result()
		if n, err := fmt.Sscanf(text, "%d %d", &a, &b); n != 2 || err != nil {
			w.t.Fatalf("worker: %s", text)
		}
		calls, canceled = calls+a, canceled+b
	}
	return calls, canceled
}
