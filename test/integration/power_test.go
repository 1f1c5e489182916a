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
	kit.Must(t, os.WriteFile(image, nil, 0o600))
	kit.Must(t, os.Truncate(image, 64<<20))
	run(t, "", "mkfs.ext4", "-q", image)
	d := &powerDisk{dir: mounts.OpenTempDir(t)}
	d.device = strings.TrimSpace(run(t, "", "losetup", "--find", "--show", image))
	t.Cleanup(func() { run(t, "", "losetup", "--detach", d.device) })
	d.mount(t)
	t.Cleanup(func() { d.unmount(t) })
	kit.Must(t, os.Chmod(d.dir, 0o777))
	return d
}

// mount mounts the file system. It writes its journal only when somebody waits for it, so that a
// power failure loses everything else.
func (d *powerDisk) mount(t *testing.T) {
	t.Helper()
	kit.Must(t, unix.Mount(d.device, d.dir, "ext4", 0, "commit=600"))
}

// unmount waits until every mount of the file system has ended, also in other namespaces.
func (d *powerDisk) unmount(t *testing.T) {
	t.Helper()
	active := filepath.Join("/sys/fs/ext4", filepath.Base(d.device))
	kit.Eventually(t, "end of all mounts of "+d.dir, func() bool {
		_ = unix.Unmount(d.dir, 0)
		_, err := os.Stat(active)
		return errors.Is(err, os.ErrNotExist)
	})
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

// A powerServer is a mount of a server that can be restarted.
type powerServer struct {
	mnt     string
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
		return powerServer{mounts.MountServed(t, s), s.Restart}
	}},
	{"ganesha", 1, true, func(t *testing.T, dir string) powerServer {
		g := ganesha.Start(t, dir)
		return powerServer{mounts.MountGanesha(t, g),
			func(t *testing.T, _ syscall.Signal, down func()) { g.Restart(t, down) }}
	}},
}

// TestPowerFailure kills servers while a program writes, and lets their disk lose everything that
// is not stable. What fsync or close has confirmed must be on the disk, and at the end everything.
// The program must see no error.
func TestPowerFailure(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	for _, s := range powerServers {
		t.Run(s.name, func(t *testing.T) {
			disk := newPowerDisk(t)
			srv := s.start(t, disk.dir)
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 0))
			p := power.Start(t, power.Config{Dir: srv.mnt, Seed: seed, LosesNames: s.losesNames})
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

// TestLostDataIsWrittenAgain lets a server lose data that the client has sent and not committed. A
// program reads what it has written, whether the kernel still caches it or not, and appends to it.
// After fsync(2) everything is on the disk, also after another power failure.
func TestLostDataIsWrittenAgain(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	disk := newPowerDisk(t)
	s := mounts.ServeDir(t, disk.dir, "--no-root-squash")
	fail := func() { s.Restart(t, syscall.SIGKILL, func() { disk.fail(t) }) }
	mnt, want := mounts.MountServed(t, s), bytes.Repeat([]byte("data"), 1<<18)
	behind := filepath.Join(disk.dir, "f")
	var f *os.File
	for try := 0; ; try++ {
		var err error
		f, err = os.OpenFile(filepath.Join(mnt, "f"), os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_APPEND, 0o644)
		kit.Must(t, err)
		t.Cleanup(func() { f.Close() })
		_, err = f.Write(want)
		kit.Must(t, err)
		kit.Eventually(t, "half of the data on the server before fsync", func() bool {
			st, err := os.Stat(behind)
			return err == nil && st.Size() >= int64(len(want)/2)
		})
		var kept []byte
		s.Restart(t, syscall.SIGKILL, func() {
			disk.fail(t)
			kept, _ = os.ReadFile(behind) // the file may be lost, too
		})
		if !bytes.Equal(kept, want) {
			break
		}
		if try == powerTries {
			t.Fatalf("the disk lost no data in %d power failures", powerTries)
		}
		f.Close()
	}
	kit.Must(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	got := make([]byte, len(want))
	if n, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read after the server lost data: got %d bytes, %v, first %q, want %q", n, err, got[:16], want[:16])
	}
	if st, err := f.Stat(); err != nil || st.Size() != int64(len(want)) {
		t.Errorf("stat after the server lost data: got size %d, %v, want %d", st.Size(), err, len(want))
	}
	_, err := f.WriteString("appended")
	kit.Must(t, err)
	kit.Must(t, f.Sync())
	want = append(want, "appended"...)
	for _, when := range []string{"fsync", "fsync and a power failure"} {
		if got, err := os.ReadFile(behind); err != nil || !bytes.Equal(got, want) {
			t.Errorf("file on the server after %s: got %d bytes, %v, last %q, want %d bytes", when, len(got), err,
				got[max(0, len(got)-8):], len(want))
		}
		fail()
	}
}

// TestPowerDaemon terminates or kills the client while a program writes. What fsync or close has
// confirmed must be on the server, and the program must see errors.
func TestPowerDaemon(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	s := mounts.ServeDir(t, served, "--no-root-squash")
	for round := range powerRounds(t, 2) {
		t.Run(strconv.Itoa(round), func(t *testing.T) {
			dir := strconv.Itoa(round)
			makeOpenDir(t, filepath.Join(served, dir))
			mnt, daemon := mounts.StartServedMount(t, s)
			seed := rand.Uint64()
			p := power.Start(t, power.Config{Dir: filepath.Join(mnt, dir), Seed: seed})
			p.Progress(t, 50+uint32(seed%300))
			sig := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[round%2]
			daemon.End(t, sig)
			if sig == syscall.SIGKILL {
				defer func() { kit.Must(t, unix.Unmount(mnt, unix.MNT_DETACH)) }()
			}
			if err := p.Finish(t); err == nil {
				t.Error("the process that writes got no error although its mount ended")
			} else if strings.Contains(err.Error(), power.WrongData) {
				t.Error(err)
			}
			p.Check(t, power.Dir(filepath.Join(served, dir)))
		})
	}
}

// TestNamesAfterPowerFailure cuts the power after the replies to changes of names, which must be
// stable by then (RFC 1813 §1.7). A server that loses names loses some of these changes.
func TestNamesAfterPowerFailure(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	for _, s := range powerServers {
		t.Run(s.name, func(t *testing.T) {
			disk := newPowerDisk(t)
			srv := s.start(t, disk.dir)
			for try := range powerTries {
				dir := strconv.Itoa(try)
				want := power.ChangeNames(t, filepath.Join(srv.mnt, dir))
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
