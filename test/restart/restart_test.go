package restart

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// restartsEnv is the number of planned restarts, and of kills, of a soak run. `make soak` sets 20.
const restartsEnv = "NFSRDMAD_RESTARTS"

// An amount is how much a run does.
type amount struct {
	kills, leaves int           // ends of the daemon by SIGKILL, and planned restarts
	pause         time.Duration // longest time between two of them
	files         int           // of the tree that is copied
	syncs         int           // rounds of write, kill and fsync
	soak          bool          // run fio too
}

// amountOf returns what a routine run does, or a soak run.
func amountOf() (amount, error) {
	s := os.Getenv(restartsEnv)
	if s == "" {
		return amount{kills: 6, leaves: 4, pause: 900 * time.Millisecond, files: 60, syncs: 20}, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		return amount{}, fmt.Errorf("%s=%s: want a number above 0", restartsEnv, s)
	}
	return amount{kills: n, leaves: n, pause: 6 * time.Second, files: 500 * n, syncs: 50 * n, soak: true}, nil
}

func mustAmount(t *testing.T) amount {
	t.Helper()
	a, err := amountOf()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestRestartsWithEmbeddedServer(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	x.options = append(x.options, "nconnect=2")
	testRestarts(t, x, mustAmount(t))
}

// TestRestartsWithURing makes planned restarts only: calls that begin while a killed daemon dies
// can fail, see front.Resume.
func TestRestartsWithURing(t *testing.T) {
	kit.NeedsURing(t)
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	x.options = append(x.options, "front=uring")
	a := mustAmount(t)
	a.kills, a.leaves = 0, a.kills+a.leaves
	testRestarts(t, x, a)
}

// TestKillWithURing kills the daemon while no program calls it.
func TestKillWithURing(t *testing.T) {
	kit.NeedsURing(t)
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r := newRig(t, x, "front=uring")
	if st := r.status(); st.Front != "uring" || st.FrontReason != "" {
		t.Fatalf("status: got front %q (%s), want uring", st.Front, st.FrontReason)
	}
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, lockedFile))
	w.do("ok", "flock f ex")
	name := filepath.Join(r.dir, "written")
	for i := range 5 {
		data := strings.Repeat(strconv.Itoa(i), 100_000)
		if err := os.WriteFile(name, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
		r.kill(syscall.SIGKILL)
		r.start()
		r.waitState(control.StateMounted)
		if got, err := os.ReadFile(name); err != nil || string(got) != data {
			t.Fatalf("read after the kill: got %d bytes, %v, want %d", len(got), err, len(data))
		}
		if st := r.status(); st.Front != "uring" || st.Locks.Lost != 0 {
			t.Fatalf("status: got front %q and %d lost locks, want uring and 0", st.Front, st.Locks.Lost)
		}
	}
	w.do("ok", "flock f un")
	w.kill()
	r.unmount()
}

func TestRestartsWithGanesha(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	testRestarts(t, ganeshaExport(t), mustAmount(t))
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
	files, mapped, copier, probe := startWorker(t, r.dir), startWorker(t, r.dir), startWorker(t, r.dir),
		startWorker(t, other)
	files.do("ok", "open range %s", filepath.Join(r.dir, lockedRange))
	files.do("ok", "open file %s", filepath.Join(r.dir, lockedFile))
	files.do("ok", "set range w 0 %d", lockedBytes)
	files.do("ok", "flock file ex")
	files.do("ok", "load %d %s tree append exclusive mkdir rename unlinked list sync attributes direct flock ofd", seed,
		x.dir)
	mapped.do("ok", "load %d %s mmap probe", seed, x.dir)
	copier.do("ok", "load %d %s copy", seed, x.dir)
	probe.do("ok", "load %d %s probe", seed, x.dir)
	endFio := func() {}
	if a.soak {
		dir := filepath.Join(r.dir, "fio")
		if err := os.Mkdir(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		f := startFio(t, dir, seed)
		endFio = func() {
			f.end(t)
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	}

	restart(t, r, seed, a)
	time.Sleep(500 * time.Millisecond)

	endFio()
	workers := []*worker{files, mapped, copier, probe}
	sums := endLoads(t, workers)
	checkLockEnds(t, r, files, probe, other)
	for _, w := range workers {
		w.kill()
	}
	checkSums(t, x.dir, sums, listed)
	r.unmount()
}

// restart ends the daemon and starts the next one, at random moments and many times.
func restart(t *testing.T, r *rig, seed uint64, a amount) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 0))
	kills, leaves := a.kills, a.leaves
	for kills+leaves > 0 {
		time.Sleep(time.Duration(rng.Int64N(int64(a.pause))))
		begin := time.Now()
		how := "killed"
		if n := rng.IntN(kills + leaves); n < kills {
			kills--
			r.kill(syscall.SIGKILL)
		} else {
			leaves--
			how = "left"
			r.leave()
		}
		t.Logf("daemon %d %s, ended in %v", len(r.daemons), how, time.Since(begin).Round(time.Millisecond))
		time.Sleep(time.Duration(rng.Int64N(int64(100 * time.Millisecond))))
		r.start()
	}
	r.waitState(control.StateMounted)
}

// endLoads ends the loads of the workers. It returns the checksums of the files that remain.
func endLoads(t *testing.T, workers []*worker) map[string]string {
	t.Helper()
	for _, w := range workers {
		w.send("end")
	}
	sums := make(map[string]string)
	for _, w := range workers {
		wait := 2 * limit
		if os.Getenv(restartsEnv) != "" {
			wait = 20 * limit // a virtual machine creates some 20 files a second
		}
		text := w.resultWithin(wait)
		var result loadResult
		if err := json.Unmarshal([]byte(text), &result); err != nil {
			t.Fatalf("worker: %s", text)
		}
		t.Logf("rounds %v, longest %v", result.Rounds, result.Longest)
		maps.Copy(sums, result.Sums)
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
	if st := r.status(); st.Locks.Lost != 0 || st.Locks.Held != 0 {
		t.Errorf("got %d lost and %d held locks, want none", st.Locks.Lost, st.Locks.Held)
	}
}

// checkSums compares the files on the server with their checksums. There must be at least some
// number of files.
func checkSums(t *testing.T, dir string, left map[string]string, least int) {
	t.Helper()
	if len(left) < least {
		t.Errorf("workers have %d files, want at least %d", len(left), least)
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

// TestSyncAfterKillWithGanesha is TestSyncAfterKill with another server.
func TestSyncAfterKillWithGanesha(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	testSyncAfterKill(t, ganeshaExport(t), mustAmount(t).syncs)
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
	t.Logf("%d rounds", rounds)
	w.do("ok", "close f")
	r.unmount()
}

// TestListing kills the daemon while programs list a large directory: each name must come once. The
// cookies stay valid, so the daemon must not search its position again.
func TestListing(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	const names = 3000
	for i := range names {
		name := fmt.Sprintf("a-name-that-is-longer-%d", i)
		if err := os.WriteFile(filepath.Join(x.dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := newRig(t, x)
	w := startWorker(t, r.dir)
	for i := range 4 { // at the start, and at later places
		w.do("ok", "list %d %s %d", i, r.dir, 1+700*i)
	}
	r.kill(syscall.SIGKILL)
	r.start()
	for i := range 4 {
		w.do(fmt.Sprintf("%d names, 0 of them twice", names), "listed %d", i)
	}
	if n := r.waitScrape()["readdir_restarts_total"]; n != 0 {
		t.Errorf("the daemon searched its position in a directory %v times, want 0", n)
	}
	r.unmount()
}

// TestCrash ends the daemon as a crash of the program does.
func TestCrash(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r := newRig(t, x, "dirty_expire=0")
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	for i, sig := range []syscall.Signal{syscall.SIGABRT, syscall.SIGQUIT, syscall.SIGSEGV} {
		w.do("ok", "write f %d 100000 %d", i*100_000, i)
		r.kill(sig)
		if code := r.daemon.Cmd.ProcessState.ExitCode(); code == 0 {
			t.Errorf("exit code 0 after %v", sig)
		}
		r.start()
		r.waitState(control.StateMounted)
		for k := range i + 1 {
			w.do("ok", "check f %d 100000 %d", k*100_000, k)
		}
		w.do("ok", "sync f")
	}
	w.do("ok", "close f")
	r.unmount()
	r.onServer("file", slices.Concat(kit.RandomBytes(0, 100_000), kit.RandomBytes(1, 100_000),
		kit.RandomBytes(2, 100_000)))
}

// TestServerDown starts the next daemon while the server does not run.
func TestServerDown(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	t.Run("continue", func(t *testing.T) {
		x, s := embedded(t)
		r := newRig(t, x, "dirty_expire=0")
		w := startWorker(t, r.dir)
		w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
		w.do("ok", "write f 0 200000 1")
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
		r := newRig(t, x, "dirty_expire=0")
		w := startWorker(t, r.dir)
		w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
		w.do("ok", "write f 0 200000 1")
		r.kill(syscall.SIGKILL)
		s.Restart(t, syscall.SIGKILL, func() {
			r.start()
			r.waitReason()
			w.send("sync f")
			begin := time.Now()
			r.cli("umount", "--force", r.dir)
			if got := w.result(); got == "ok" {
				t.Error("fsync succeeded after the data was lost")
			}
			t.Logf("forced unmount took %v", time.Since(begin).Round(time.Millisecond))
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
	eventually(r.t, "reason of the mount", func() error {
		if reason = r.waitState(control.StateRestoring); strings.HasPrefix(reason, "the daemon connects") {
			return fmt.Errorf("got reason %q", reason)
		}
		return nil
	})
	return reason
}

// TestUnmountedMeanwhile detaches the mount while no daemon runs. The next daemon writes the data
// of the open file. The mount ends when the file is closed.
func TestUnmountedMeanwhile(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r := newRig(t, x, "dirty_expire=0")
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	w.do("ok", "write f 0 200000 1")
	r.kill(syscall.SIGKILL)
	if err := unix.Unmount(r.dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	r.start()
	r.ready()
	eventually(t, "data on the server", func() error {
		return compare(filepath.Join(x.dir, "file"), kit.RandomBytes(1, 200_000))
	})
	w.do("ok", "write f 200000 1000 2")
	w.do("ok", "check f 0 200000 1")
	w.do("ok", "close f")
	r.mountEnds()
	r.end(0)
	r.checkLogs()
	r.onServer("file", append(kit.RandomBytes(1, 200_000), kit.RandomBytes(2, 1000)...))
}

// TestUnmountedMeanwhileAndClosed detaches a mount, and kills the program that uses it, while no
// daemon runs.
func TestUnmountedMeanwhileAndClosed(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r := newRig(t, x, "dirty_expire=0")
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	w.do("ok", "write f 0 200000 1")
	r.kill(syscall.SIGKILL)
	if err := unix.Unmount(r.dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	_ = w.cmd.Process.Kill() // the exit of the process waits for the daemon
	r.start()
	r.ready()
	r.mountEnds()
	r.end(0)
	r.checkLogs()
	r.onServer("file", kit.RandomBytes(1, 200_000))
}

// TestOtherVersion starts a daemon that finds a mount with a state of another version. The daemon
// must leave the mount alone. The test changes the version in the state, and changes it back, while
// no daemon runs.
func TestOtherVersion(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	x, _ := embedded(t)
	r := newRig(t, x, "dirty_expire=0")
	w := startWorker(t, r.dir)
	w.do("ok", "open f %s", filepath.Join(r.dir, "file"))
	w.do("ok", "write f 0 200000 1")
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
	r.leave()
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
	if err != nil {
		r.t.Fatal(err)
	}
	defer store.Close()
	var b [4]byte
	changed := 0
	for _, e := range store.Kept() {
		if strings.HasSuffix(e.Name, "/state") {
			changed++
			if _, err := e.File.ReadAt(b[:], place); err != nil {
				r.t.Fatal(err)
			}
			old = binary.NativeEndian.Uint32(b[:])
			binary.NativeEndian.PutUint32(b[:], version)
			if _, err := e.File.WriteAt(b[:], place); err != nil {
				r.t.Fatal(err)
			}
		}
		e.File.Close()
	}
	if changed != 1 {
		r.t.Fatalf("got %d states of mounts, want 1", changed)
	}
	return old
}
