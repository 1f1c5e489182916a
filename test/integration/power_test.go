package integration

import (
	"bytes"
	"errors"
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

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/kit/power"
)

// powerEnv sets the number of rounds of the tests below. `make soak` sets it.
const powerEnv = "NFSRDMAD_POWER"

func powerRounds(t *testing.T, short int) int {
	t.Helper()
	text := os.Getenv(powerEnv)
	if text == "" {
		return short
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", powerEnv, err)
	}
	return n
}

// A powerDisk is an ext4 file system that can lose its power.
type powerDisk struct{ device, dir string }

// newPowerDisk makes a file system and mounts it until the test ends.
func newPowerDisk(t *testing.T) *powerDisk {
	t.Helper()
	kit.NeedsPrograms(t, "mkfs.ext4", "losetup")
	image := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	run(t, "", "mkfs.ext4", "-q", image)
	d := &powerDisk{dir: mounts.OpenTempDir(t)}
	d.device = strings.TrimSpace(run(t, "", "losetup", "--find", "--show", image))
	t.Cleanup(func() { run(t, "", "losetup", "--detach", d.device) })
	d.mount(t)
	t.Cleanup(func() { d.unmount(t) })
	if err := os.Chmod(d.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return d
}

// mount mounts the file system. It writes its journal only when somebody waits for it, so that a
// power failure loses everything else.
func (d *powerDisk) mount(t *testing.T) {
	t.Helper()
	if err := unix.Mount(d.device, d.dir, "ext4", 0, "commit=600"); err != nil {
		t.Fatal(err)
	}
}

// unmount waits until every mount of the file system has ended, also in other namespaces.
func (d *powerDisk) unmount(t *testing.T) {
	t.Helper()
	active := filepath.Join("/sys/fs/ext4", filepath.Base(d.device))
	for deadline := time.Now().Add(mounts.ProcessTimeout); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Unmount(d.dir, 0)
		if _, statErr := os.Stat(active); errors.Is(statErr, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("unmount %s: still in use: %v", d.dir, err)
		}
	}
}

// fail loses everything that is not stable, as a power failure does. No process may use the disk.
func (d *powerDisk) fail(t *testing.T) {
	t.Helper()
	const shutdown, noLogFlush = 0x8004587d, 2 // EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
	f, err := os.Open(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), shutdown, noLogFlush); err != nil {
		t.Fatalf("shut %s down: %v", d.dir, err)
	}
	f.Close()
	d.unmount(t)
	d.mount(t)
}

// A powerServer is a server that can be restarted.
type powerServer struct {
	mount   func(t *testing.T) (string, *mounts.Process)
	restart func(t *testing.T, sig syscall.Signal, down func())
}

var powerServers = []struct {
	name       string
	short      int  // rounds
	losesNames bool // docs/interop.md
	start      func(t *testing.T, dir string) powerServer
}{
	{"embedded", 2, false, func(t *testing.T, dir string) powerServer {
		s := mounts.ServeDir(t, dir, "--no-root-squash")
		mount := func(t *testing.T) (string, *mounts.Process) {
			return mounts.StartServedMount(t, s)
		}
		return powerServer{mount, s.Restart}
	}},
	{"ganesha", 1, true, func(t *testing.T, dir string) powerServer {
		g := ganesha.Start(t, dir)
		mount := func(t *testing.T) (string, *mounts.Process) { return mounts.StartGaneshaMount(t, g) }
		return powerServer{mount, func(t *testing.T, _ syscall.Signal, down func()) { g.Restart(t, down) }}
	}},
}

// TestPowerFailure kills servers while a program writes, and lets their disk lose everything that
// is not stable. What fsync or close has confirmed must be on the disk, and at the end everything.
// The program must see no error.
func TestPowerFailure(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for _, s := range powerServers {
		t.Run(s.name, func(t *testing.T) {
			disk := newPowerDisk(t)
			srv := s.start(t, disk.dir)
			mnt, _ := srv.mount(t)
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 0))
			p := power.Start(t, power.Config{Dir: mnt, Seed: seed, LosesNames: s.losesNames})
			for round := range powerRounds(t, s.short) {
				p.Progress(t, 50+rng.Uint32N(300))
				sig := syscall.SIGKILL
				if rng.IntN(4) == 0 {
					sig = syscall.SIGTERM
				}
				srv.restart(t, sig, func() {
					disk.fail(t)
					p.Check(t, power.Dir(disk.dir))
				})
				if t.Failed() {
					t.Fatalf("round %d, %v, seed %d", round, sig, seed)
				}
			}
			p.Progress(t, 100)
			if err := p.Finish(t); err != nil {
				t.Errorf("the process that writes: %v", err)
			}
			p.CheckAll(t, power.Dir(disk.dir))
		})
	}
}

// powerTries bounds the power failures of a test that needs one with a loss. A failure loses
// nothing if another process of the host has just called sync(2).
const powerTries = 5

// A lostFile is an open file on a mount. The server has lost data that the client has sent and not
// committed.
type lostFile struct {
	*os.File
	want   []byte // written data
	behind string // path on the server
	fail   func() // restarts the server after another power failure
}

func newLostFile(t *testing.T, flags int) *lostFile {
	t.Helper()
	disk := newPowerDisk(t)
	s := mounts.ServeDir(t, disk.dir, "--no-root-squash")
	mnt, want := mounts.MountServed(t, s), bytes.Repeat([]byte("data"), 1<<18)
	behind := filepath.Join(disk.dir, "f")
	for range powerTries {
		f, err := os.OpenFile(filepath.Join(mnt, "f"), os.O_CREATE|os.O_TRUNC|os.O_RDWR|flags, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if _, err := f.Write(want); err != nil {
			t.Fatal(err)
		}
		awaitSize(t, behind, len(want)/2)
		var kept []byte
		s.Restart(t, syscall.SIGKILL, func() {
			disk.fail(t)
			kept, _ = os.ReadFile(behind) // the file may be lost, too
		})
		if !bytes.Equal(kept, want) {
			return &lostFile{f, want, behind, func() { s.Restart(t, syscall.SIGKILL, func() { disk.fail(t) }) }}
		}
		f.Close()
	}
	t.Fatalf("the disk lost no data in %d power failures", powerTries)
	return nil
}

// awaitSize waits until a file of the server has a size.
func awaitSize(t *testing.T, path string, size int) {
	t.Helper()
	for deadline := time.Now().Add(mounts.ProcessTimeout); ; time.Sleep(5 * time.Millisecond) {
		st, err := os.Stat(path)
		if err == nil && st.Size() >= int64(size) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not have %d bytes before fsync: %+v, %v", path, size, st, err)
		}
	}
}

// TestReadAfterPowerFailure reads a file after its server has lost data that the client has sent
// and not committed. A program must read what it has written, whether the kernel still caches it or
// not.
func TestReadAfterPowerFailure(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	f := newLostFile(t, 0)
	want := f.want
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if n, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read after the server lost data: got %d bytes, %v, first %q, want %q", n, err, got[:16], want[:16])
	}
	if st, err := f.Stat(); err != nil || st.Size() != int64(len(want)) {
		t.Errorf("stat after the server lost data: got size %d, %v, want %d", st.Size(), err, len(want))
	}
}

// TestAppendAfterPowerFailure appends to a file after its server has lost data that the client has
// sent and not committed. The new data must follow the old data.
func TestAppendAfterPowerFailure(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	f := newLostFile(t, os.O_APPEND)
	if _, err := f.Stat(); err != nil { // asks the server for the attributes
		t.Fatal(err)
	}
	more := []byte("appended")
	if _, err := f.Write(more); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	want := append(f.want, more...)
	got, err := os.ReadFile(f.behind)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("file on the server: got %d bytes, %v, first %q, last %q, want %d bytes, first %q, last %q", len(got),
			err, got[:min(8, len(got))], got[max(0, len(got)-8):], len(want), want[:8], more)
	}
}

// TestPowerDaemon terminates or kills the client while a program writes. What fsync or close has
// confirmed must be on the server, and the program must see errors.
func TestPowerDaemon(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for _, s := range powerServers {
		t.Run(s.name, func(t *testing.T) {
			served := mounts.OpenTempDir(t)
			srv := s.start(t, served)
			for round := range powerRounds(t, s.short) {
				t.Run(strconv.Itoa(round), func(t *testing.T) {
					makeOpenDir(t, filepath.Join(served, strconv.Itoa(round)))
					sig := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM}[round%3]
					testPowerDaemon(t, srv, sig, served, strconv.Itoa(round))
				})
			}
		})
	}
}

// testPowerDaemon sends a signal to a client while a program writes files below a directory of the
// server.
func testPowerDaemon(t *testing.T, srv powerServer, sig syscall.Signal, served, dir string) {
	t.Helper()
	mnt, daemon := srv.mount(t)
	seed := rand.Uint64()
	p := power.Start(t, power.Config{Dir: filepath.Join(mnt, dir), Seed: seed})
	p.Progress(t, 50+uint32(seed%300))
	daemon.End(t, sig)
	if sig == syscall.SIGKILL {
		defer func() {
			if err := unix.Unmount(mnt, unix.MNT_DETACH); err != nil {
				t.Errorf("unmount after the client was killed: %v", err)
			}
		}()
	}
	if err := p.Finish(t); err == nil {
		t.Error("the process that writes got no error although its mount ended")
	} else if strings.Contains(err.Error(), power.WrongData) {
		t.Error(err)
	}
	p.Check(t, power.Dir(filepath.Join(served, dir)))
}

// TestNamesAfterPowerFailure cuts the power after the replies to changes of names, which must be
// stable by then (RFC 1813 §1.7). A server that loses names loses some of these changes.
func TestNamesAfterPowerFailure(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	for _, s := range powerServers {
		t.Run(s.name, func(t *testing.T) {
			disk := newPowerDisk(t)
			srv := s.start(t, disk.dir)
			mnt, _ := srv.mount(t)
			for try := range powerTries {
				dir := strconv.Itoa(try)
				want := power.ChangeNames(t, filepath.Join(mnt, dir))
				srv.restart(t, syscall.SIGKILL, func() { disk.fail(t) })
				got := namesBelow(t, filepath.Join(disk.dir, dir))
				t.Logf("names on the disk: %q", got)
				switch lost := !slices.Equal(got, want); {
				case lost == s.losesNames:
					return
				case lost:
					t.Fatalf("names after the power failure: got %q, want %q", got, want)
				}
			}
			t.Errorf("server kept all names in %d power failures; correct docs/interop.md", powerTries)
		})
	}
}

// namesBelow returns the names in a directory in order. The directory may be missing.
func namesBelow(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
