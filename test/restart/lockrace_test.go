package restart

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/lockrace"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestLocksExcludeDuringRestarts kills the daemon while processes lock a file of its mount, and of
// the mount of another client. No lock may end before its owner releases it.
func TestLocksExcludeDuringRestarts(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	const name = "raced"
	x, _ := embedded(t)
	r := newRig(t, x)
	kit.Must(t, os.WriteFile(filepath.Join(x.dir, name), nil, 0o666))
	other := mounts.MountProcess(t, x.source, x.options...)
	race := lockrace.Race{Kinds: []string{"fcntl", "ofd", "flock", "fcntl", "ofd", "flock"},
		Marker: filepath.Join(t.TempDir(), "marker"), Rounds: lockrace.Rounds(t, 100)}
	for i := range race.Kinds {
		race.Paths = append(race.Paths, filepath.Join([]string{r.dir, r.dir, r.dir, r.dir, other, other}[i], name))
	}
	var lost, rounds int
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		lost, rounds, err = race.Run()
	}()
	kills := 0
	for running := true; running; kills++ {
		select {
		case <-done:
			running = false
		case <-time.After(rand.N(300 * time.Millisecond)):
		}
		r.kill(syscall.SIGKILL)
		r.start()
		r.waitState(control.StateMounted)
	}
	kit.Must(t, err)
	if want := race.Rounds * len(race.Kinds); lost > 0 || rounds != want {
		t.Errorf("locks lost: got %d in %d rounds, want 0 in %d", lost, rounds, want)
	}
	t.Logf("%d rounds, %d kills", rounds, kills)
	kit.Must(t, os.WriteFile(filepath.Join(r.dir, name), make([]byte, 1<<20), 0o666)) // registers memory
	r.unmount()
}
