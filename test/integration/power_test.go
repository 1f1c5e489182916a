package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
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
	testutil.NeedsPrograms(t, "mkfs.ext4", "losetup")
	image := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	run(t, "", "mkfs.ext4", "-q", image)
	d := &powerDisk{dir: openTempDir(t)}
	d.device = strings.TrimSpace(run(t, "", "losetup", "--find", "--show", image))
	t.Cleanup(func() { run(t, "", "losetup", "--detach", d.device) })
	if err := unix.Mount(d.device, d.dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.unmount(t) })
	if err := os.Chmod(d.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return d
}

// unmount waits until every mount of the file system has ended, also in other namespaces.
func (d *powerDisk) unmount(t *testing.T) {
	t.Helper()
	active := filepath.Join("/sys/fs/ext4", filepath.Base(d.device))
	for deadline := time.Now().Add(processTimeout); ; time.Sleep(5 * time.Millisecond) {
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
	if err := unix.Mount(d.device, d.dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
}

// A powerProgram is the process that writes.
type powerProgram struct {
	state *powerState
	cmd   *exec.Cmd
	stdin io.Closer
	out   bytes.Buffer
	ended chan error
}

// startPowerProgram starts a process that writes files below dir.
func startPowerProgram(t *testing.T, dir string, seed uint64) *powerProgram {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.Create(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if err := memory.Truncate(int64(unsafe.Sizeof(powerState{}))); err != nil {
		t.Fatal(err)
	}
	p := &powerProgram{cmd: exec.Command(self), ended: make(chan error, 1)}
	if p.state, err = mapPowerState(memory); err != nil {
		t.Fatal(err)
	}
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", powerChildEnv, seed, dir))
	p.cmd.ExtraFiles = []*os.File{memory}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	return p
}

// progress waits until the process has made n more calls.
func (p *powerProgram) progress(t *testing.T, n uint32) {
	t.Helper()
	deadline := time.Now().Add(2 * processTimeout)
	for want := p.state.steps.Load() + n; p.state.steps.Load() < want; time.Sleep(time.Millisecond) {
		select {
		case err := <-p.ended:
			p.ended <- err
			t.Fatalf("the process that writes ended: %v\n%s", err, p.out.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("no progress for %v", 2*processTimeout)
		}
	}
}

// finish lets the process make everything stable, and returns its error.
func (p *powerProgram) finish(t *testing.T) error {
	t.Helper()
	p.stdin.Close()
	select {
	case err := <-p.ended:
		p.ended <- err
		if err != nil {
			return fmt.Errorf("%w\n%s", err, p.out.String())
		}
		return nil
	case <-time.After(2 * processTimeout):
		t.Fatalf("the process that writes did not end within %v", 2*processTimeout)
		return nil
	}
}

// check checks that a directory of the server has all confirmed data, and no data that was never
// written. With all, it must have the newest data.
func (p *powerProgram) check(t *testing.T, dir string, all bool) {
	t.Helper()
	for file := range powerFiles {
		name := fmt.Sprintf("f%d", file)
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if len(b)%powerBlock != 0 {
			t.Errorf("%s has %d bytes, which is no multiple of %d", name, len(b), powerBlock)
		}
		b = append(b, make([]byte, powerBlocks*powerBlock-len(b))...)
		s := &p.state.files[file]
		for i := range powerBlocks {
			low, high := s.confirmed[i].Load(), s.latest[i].Load()
			if all {
				low = high
			}
			got, err := powerVersion(b[i*powerBlock:][:powerBlock], uint32(file), uint32(i))
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if got < low || got > high {
				t.Errorf("%s, block %d: got version %d, want %d to %d", name, i, got, low, high)
			}
		}
	}
	p.checkReplaced(t, dir)
}

// checkReplaced checks that the file that renames replace is complete.
func (p *powerProgram) checkReplaced(t *testing.T, dir string) {
	t.Helper()
	low := p.state.replacedConfirmed.Load()
	b, err := os.ReadFile(filepath.Join(dir, "r"))
	if err != nil && (low > 0 || !errors.Is(err, os.ErrNotExist)) {
		t.Errorf("file that a rename replaced %d times: %v", low, err)
		return
	}
	high := p.state.replacedLatest.Load()
	for i := range len(b) / powerBlock {
		got, err := powerVersion(b[i*powerBlock:][:powerBlock], powerReplaced, uint32(i))
		if err != nil || got < low || got > high {
			t.Errorf("replaced file, block %d: got version %d, %v, want %d to %d", i, got, err, low, high)
		}
	}
	if low > 0 && len(b) != 20*powerBlock {
		t.Errorf("replaced file has %d bytes, want %d", len(b), 20*powerBlock)
	}
}

// A powerServer is a server that TestPowerFailure restarts.
type powerServer struct {
	mnt     string
	restart func(sig syscall.Signal, down func())
}

var powerServers = []struct {
	name  string
	short int // rounds
	start func(t *testing.T, dir string) powerServer
}{
	{"embedded", 2, func(t *testing.T, dir string) powerServer {
		s := serveDir(t, dir, "--no-root-squash")
		return powerServer{mountServed(t, s), func(sig syscall.Signal, down func()) { s.restart(t, sig, down) }}
	}},
	{"ganesha", 1, func(t *testing.T, dir string) powerServer {
		g := ganeshatest.Start(t, dir)
		return powerServer{mountGanesha(t, g), func(_ syscall.Signal, down func()) { g.Restart(t, down) }}
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
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 0))
			p := startPowerProgram(t, srv.mnt, seed)
			for round := range powerRounds(t, s.short) {
				p.progress(t, 50+rng.Uint32N(300))
				sig := syscall.SIGKILL
				if rng.IntN(4) == 0 {
					sig = syscall.SIGTERM
				}
				srv.restart(sig, func() {
					disk.fail(t)
					p.check(t, disk.dir, false)
				})
				if t.Failed() {
					t.Fatalf("round %d, %v, seed %d", round, sig, seed)
				}
			}
			p.progress(t, 100)
			if err := p.finish(t); err != nil {
				t.Errorf("the process that writes: %v", err)
			}
			p.check(t, disk.dir, true)
		})
	}
}

// unstableFile writes a file on a mount and waits until the server has the data, which the client
// has not committed. Then the server loses the data, and starts again.
func unstableFile(t *testing.T, flags int) (f *os.File, want []byte, disk *powerDisk) {
	t.Helper()
	const size = 1 << 20
	disk = newPowerDisk(t)
	s := serveDir(t, disk.dir, "--no-root-squash")
	f, err := os.OpenFile(filepath.Join(mountServed(t, s), "f"), os.O_CREATE|os.O_RDWR|flags, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	want = bytes.Repeat([]byte("data"), size/4)
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	arrived := int64(0)
	for deadline := time.Now().Add(processTimeout); arrived < size/2; time.Sleep(5 * time.Millisecond) {
		if st, err := os.Stat(filepath.Join(disk.dir, "f")); err == nil {
			arrived = st.Size()
		}
		if time.Now().After(deadline) {
			t.Fatalf("client sent %d of %d bytes before fsync", arrived, size)
		}
	}
	s.restart(t, syscall.SIGKILL, func() { disk.fail(t) })
	return f, want, disk
}

// TestReadAfterPowerFailure reads a file after its server has lost data that the client has sent
// and not committed. A program must read what it has written, whether the kernel still caches it or
// not.
func TestReadAfterPowerFailure(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	f, want, _ := unstableFile(t, 0)
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
	f, want, disk := unstableFile(t, os.O_APPEND)
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
	want = append(want, more...)
	got, err := os.ReadFile(filepath.Join(disk.dir, "f"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("file on the server: got %d bytes, %v, first %q, last %q, want %d bytes, first %q, last %q", len(got),
			err, got[:min(8, len(got))], got[max(0, len(got)-8):], len(want), want[:8], more)
	}
}

// TestPowerDaemon terminates the client while a program writes. What fsync or close has confirmed
// must be on the server, and the program must see errors.
func TestPowerDaemon(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := openTempDir(t)
	s := serveDir(t, served, "--no-root-squash")
	for round := range powerRounds(t, 3) {
		t.Run(strconv.Itoa(round), func(t *testing.T) {
			sub := filepath.Join(served, strconv.Itoa(round))
			makeOpenDir(t, sub)
			mnt, daemon := startMount(t, "/", "port="+portOf(t, s.rdma), "mountport="+portOf(t, s.tcp))
			seed := rand.Uint64()
			p := startPowerProgram(t, filepath.Join(mnt, strconv.Itoa(round)), seed)
			p.progress(t, 50+uint32(seed%300))
			daemon.end(t, syscall.SIGTERM)
			if err := p.finish(t); err == nil {
				t.Error("the process that writes got no error although its mount ended")
			} else if strings.Contains(err.Error(), "WRONG DATA") {
				t.Error(err)
			}
			p.check(t, sub, false)
		})
	}
}
