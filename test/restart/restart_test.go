package restart

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// restartsEnv is the number of planned restarts, and of kills, of a soak run. `make soak` sets 20.
const restartsEnv = "NFSRDMAD_RESTARTS"

// An amount is how much a run does.
type amount struct {
	kills, leaves int // ends of the daemon by a signal, and planned restarts
	syncs         int // rounds of write, kill and fsync
	soak          bool
}

// mustAmount returns what a routine run does, or a soak run.
func mustAmount(t *testing.T) amount {
	t.Helper()
	s := os.Getenv(restartsEnv)
	if s == "" {
		return amount{kills: 4, leaves: 2, syncs: 4}
	}
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		t.Fatalf("%s=%s: want a number above 0", restartsEnv, s)
	}
	return amount{kills: n, leaves: n, syncs: 50 * n, soak: true}
}

func TestRestartsWithEmbeddedServer(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	x.options = append(x.options, "nconnect=2")
	testRestarts(t, x, mustAmount(t))
}

// testRestarts kills the daemon at random moments, and stops it without unmounting, while programs
// work on the mount. No call may fail, no data may be lost, and nothing may be left.
func testRestarts(t *testing.T, x *export, a amount) {
	seed := rand.Uint64()
	t.Log("seed:", seed)
	r := newRig(t, x)
	other := mounts.MountProcess(t, x.source, x.options...) // a second client, which does not restart
	if x.dir == "" {
		x.dir = other
	}
	files, mapped, probe := startWorker(t, r.dir), startWorker(t, r.dir), startWorker(t, other)
	files.do("ok", "open range %s", filepath.Join(r.dir, lockedRange))
	files.do("ok", "open file %s", filepath.Join(r.dir, lockedFile))
	files.do("ok", "set range w 0 %d", lockedBytes)
	files.do("ok", "flock file ex")
	files.do("ok", "load %d %s tree append mkdir rename unlinked list sync flock", seed, x.dir)
	mapped.do("ok", "load %d %s mmap probe", seed, x.dir)
	probe.do("ok", "load %d %s probe", seed, x.dir)
	restart(t, r, files, rand.New(rand.NewPCG(seed, 0)), a)
	workers := []*worker{files, mapped, probe}
	sums := endLoads(t, workers)
	checkLockEnds(t, r, files, probe, other)
	for _, w := range workers {
		w.kill()
	}
	checkSums(t, x.dir, sums)
	r.unmount()
}

// restart ends the daemon and starts the next one, at random moments and many times. w works on the
// mount.
func restart(t *testing.T, r *rig, w *worker, rng *rand.Rand, a amount) {
	t.Helper()
	// The Go runtime ends a program at these signals, as at a crash.
	crashes := []syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV, syscall.SIGABRT, syscall.SIGQUIT}
	for kills, leaves := a.kills, a.leaves; kills+leaves > 0; {
		if rng.IntN(4) > 0 { // otherwise the daemon ends while it starts
			w.advance(rng.IntN(300))
		}
		if n := rng.IntN(kills + leaves); n < kills {
			kills--
			r.kill(crashes[kills%len(crashes)])
		} else {
			leaves--
			r.leave(leaves%2 == 0)
		}
		r.start()
	}
	r.waitState(control.StateMounted)
	w.advance(100)
}

// endLoads ends the loads of the workers. It returns the checksums of the files that remain.
func endLoads(t *testing.T, workers []*worker) map[string]string {
	t.Helper()
	for _, w := range workers {
		w.send("end")
	}
	sums := make(map[string]string)
	for _, w := range workers {
		text := w.result()
		if err := json.Unmarshal([]byte(text), &sums); err != nil { // adds to the map
			t.Fatalf("worker: %s", text)
		}
	}
	return sums
}

// checkLockEnds checks that the locks of a worker end when it unlocks.
func checkLockEnds(t *testing.T, r *rig, files, probe *worker, other string) {
	t.Helper()
	probe.do("ok", "open range %s", filepath.Join(other, lockedRange))
	probe.do("ok", "open file %s", filepath.Join(other, lockedFile))
	probe.do("EAGAIN", "set range r 99 1")
	probe.do("EAGAIN", "flock file ex")
	files.do("ok", "set range u 0 0")
	files.do("ok", "flock file un")
	probe.do("ok", "set range w 0 0")
	probe.do("ok", "flock file ex")
	files.do("EAGAIN", "set range r 0 1")
	n := r.status().Metrics.Count
	if lost, held := n("locks_lost_total"), n("locks_held"); lost != 0 || held != 0 {
		t.Errorf("got %d lost and %d held locks, want none", lost, held)
	}
}

// checkSums compares the files on the server with their checksums. There must be at least those of
// the directory that the workers list.
func checkSums(t *testing.T, dir string, left map[string]string) {
	t.Helper()
	if len(left) < listed {
		t.Errorf("workers have %d files, want at least %d", len(left), listed)
	}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), "locked-") {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		sum := sha256.Sum256(data)
		switch want, ok := left[rel]; {
		case !ok:
			t.Errorf("the server has %s, which was removed", rel)
		case want != hex.EncodeToString(sum[:]):
			t.Errorf("%s has other data on the server (%d bytes)", rel, len(data))
		}
		delete(left, rel)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for rel := range left {
		t.Errorf("the server does not have %s", rel)
	}
}

// TestSyncAfterKill kills the daemon between write(2) and fsync(2).
func TestSyncAfterKill(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	testSyncAfterKill(t, x, mustAmount(t).syncs)
}

func testSyncAfterKill(t *testing.T, x *export, rounds int) {
	r := newRig(t, x, "dirty_expire=0")
	if x.dir == "" {
		x.dir = mounts.MountProcess(t, x.source, x.options...)
	}
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	const size, part = 300_000, 100_000
	want, end := make([]byte, size), 0
	for i := range rounds {
		for k := range 4 {
			seed, off := 10*i+k, (i*7919+k*80_000)%(size-part)
			copy(want[off:], kit.RandomBytes(uint64(seed), part))
			end = max(end, off+part)
			w.do("ok", "write f %d %d %d", off, part, seed)
		}
		r.kill(syscall.SIGKILL)
		if i%2 == 0 { // the call waits for the next daemon
			w.send("sync f")
		}
		r.start()
		if i%2 == 1 {
			w.send("sync f")
		}
		w.want("ok", "fsync")
		if err := compareDirect(filepath.Join(x.dir, "file"), want[:end]); err != nil {
			t.Fatalf("round %d: on the server after fsync: %v", i, err)
		}
	}
	w.do("ok", "close f")
	r.unmount()
}

// newRigWithFile mounts x and lets a worker open a file, as f, and write 200,000 bytes to it. The
// data stays in the client.
func newRigWithFile(t *testing.T, x *export, options ...string) (*rig, *worker) {
	t.Helper()
	r := newRig(t, x, append(options, "dirty_expire=0")...)
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	w.do("ok", "write f 0 200000 1")
	return r, w
}

// TestServerDown starts the next daemon while the server does not run.
func TestServerDown(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	t.Run("continue", func(t *testing.T) {
		x, s := embedded(t)
		r, w := newRigWithFile(t, x)
		r.kill(syscall.SIGKILL)
		s.Restart(t, syscall.SIGKILL, func() {
			r.start()
			if reason := r.waitReason(); !strings.Contains(reason, "refused") {
				t.Errorf("got reason %q", reason)
			}
			r.refused([]string{"umount", r.dir}, "waits for the server", "--force")
			r.refused([]string{"umount", "--lazy", r.dir}, "waits for the server", "--force")
			w.send("check f 0 200000 1")
		})
		w.want("ok", "read")
		r.waitState(control.StateMounted)
		w.do("ok", "sync f")
		r.onServer("file", kit.RandomBytes(1, 200_000))
		w.do("ok", "close f")
		r.unmount()
	})
	t.Run("force", func(t *testing.T) {
		x, s := embedded(t)
		r, w := newRigWithFile(t, x)
		r.kill(syscall.SIGKILL)
		s.Restart(t, syscall.SIGKILL, func() {
			r.start()
			r.waitReason()
			w.send("sync f")
			r.cli("umount", "--force", r.dir)
			if got := w.result(); got == "ok" {
				t.Error("fsync succeeded after the data was lost")
			}
		})
		r.end(0) // the data was lost before the daemon stopped
		for _, want := range []string{"written data lost", "bytes=200000", "dir=" + r.dir} {
			if !strings.Contains(r.daemon.Out.String(), want) {
				t.Errorf("got log %s, want %q", r.daemon.Out.String(), want)
			}
		}
	})
}

// waitReason waits until the daemon lists the mount as restoring, with the error of an attempt to
// reach the server as reason.
func (r *rig) waitReason() (reason string) {
	r.t.Helper()
	kit.Succeeds(r.t, "reason of the mount", func() error {
		if reason = r.waitState(control.StateRestoring); strings.HasPrefix(reason, "the daemon connects") {
			return fmt.Errorf("got reason %q", reason)
		}
		return nil
	})
	return reason
}

// TestUnmountedMeanwhile detaches the mount while no daemon runs. The next daemon writes the data
// of the open file. The mount ends when the file is closed, or when the program that uses it is
// killed while no daemon runs.
func TestUnmountedMeanwhile(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprintf("program killed %t", killed), func(t *testing.T) {
			x, _ := embedded(t)
			r, w := newRigWithFile(t, x)
			r.kill(syscall.SIGKILL)
			kit.Must(t, unix.Unmount(r.dir, unix.MNT_DETACH))
			if killed {
				kit.Must(t, w.cmd.Process.Kill()) // the exit of the process waits for the daemon
			}
			r.start()
			r.ready()
			want := kit.RandomBytes(1, 200_000)
			if !killed {
				kit.Succeeds(t, "data on the server", func() error {
					return compare(filepath.Join(x.dir, "file"), want)
				})
				w.do("ok", "write f 200000 1000 2")
				w.do("ok", "check f 0 200000 1")
				w.do("ok", "close f")
				want = append(want, kit.RandomBytes(2, 1000)...)
			}
			r.mountEnds()
			r.end(0)
			r.checkLogs()
			r.onServer("file", want)
		})
	}
}

// TestOtherVersion starts a daemon that finds a mount with a state of another version. The daemon
// must leave the mount alone. The test changes the version in the state, and changes it back, while
// no daemon runs.
func TestOtherVersion(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r, w := newRigWithFile(t, x)
	r.kill(syscall.SIGKILL)
	version := r.setVersion(1000)
	r.start()
	if reason := r.waitState(control.StateKept); !strings.Contains(reason, "1000") {
		t.Errorf("got reason %q, want the version", reason)
	}
	r.refused([]string{"umount", r.dir}, "cannot serve the mount", "umount -l")
	r.refused([]string{"umount", "--force", r.dir}, "cannot serve the mount", "umount -l")
	if !strings.Contains(r.daemon.Out.String(), "left alone") {
		t.Errorf("got log %s, want an error", r.daemon.Out.String())
	}
	r.leave(true)
	r.start()
	r.waitState(control.StateKept)
	r.kill(syscall.SIGTERM)
	if strings.Contains(r.daemon.Out.String(), "unmount") { // a mount that is left alone
		t.Errorf("got log %s, want no attempt to unmount", r.daemon.Out.String())
	}
	r.setVersion(version)
	r.start()
	r.waitState(control.StateMounted)
	w.do("ok", "check f 0 200000 1")
	w.do("ok", "close f")
	r.daemons = r.daemons[3:] // the second one and the third one have logged the error
	r.unmount()
	r.onServer("file", kit.RandomBytes(1, 200_000))
}

// setVersion changes the format version in the state of the mount, as a daemon of another version
// would have written it, and returns the old version.
func (r *rig) setVersion(version uint32) (old uint32) {
	r.t.Helper()
	const place = 8 // of the format version, see package slotfile
	store, err := fdstore.Holder(fdstore.Config{Socket: r.socket + ".fds", Command: []string{"false"}})
	kit.Must(r.t, err)
	defer store.Close()
	var b [4]byte
	changed := 0
	for _, e := range store.Kept() {
		if strings.HasSuffix(e.Name, "/state") {
			changed++
			_, err := e.File.ReadAt(b[:], place)
			kit.Must(r.t, err)
			old = binary.NativeEndian.Uint32(b[:])
			binary.NativeEndian.PutUint32(b[:], version)
			_, err = e.File.WriteAt(b[:], place)
			kit.Must(r.t, err)
		}
		e.File.Close()
	}
	if changed != 1 {
		r.t.Fatalf("got %d states of mounts, want 1", changed)
	}
	return old
}
