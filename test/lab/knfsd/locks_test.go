package knfsd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

var _ = register("locks", "fcntl and flock locks of two mounts and of the kernel's client: conflicts, waits, "+
	"release at the end of a process, reclaim after a power failure", testLocks)

// A lockMount is a mount with its own lock client and an open file.
type lockMount struct {
	*mount
	locks *nlm.Client
	f     *os.File
}

// lockMount mounts /export until the test ends, and opens its file "locked".
func (b bench) lockMount(t *testing.T, caller string) *lockMount {
	t.Helper()
	m := &lockMount{locks: nlm.New(nlm.Config{Host: b.NLM.Addr().String(), Port: int(b.NLM.Port()), Caller: caller})}
	t.Cleanup(m.locks.Close)
	m.mount = b.mountWith(t, shortWaits, func(o *vfs.Options) { o.Locks = m.locks })
	var err error
	if m.f, err = os.OpenFile(m.file(), os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.f.Close() })
	return m
}

func (m *lockMount) file() string { return filepath.Join(m.dir, "locked") }

// fcntl sets a lock and checks the result.
func (m *lockMount) fcntl(t *testing.T, kind int16, start, length int64, want error) {
	t.Helper()
	l := unix.Flock_t{Type: kind, Start: start, Len: length}
	if err := unix.FcntlFlock(m.f.Fd(), unix.F_SETLK, &l); !errors.Is(err, want) {
		t.Errorf("lock of type %d from %d, length %d: got error %v, want %v", kind, start, length, err, want)
	}
}

// flock changes the lock of the whole file and checks the result.
func (m *lockMount) flock(t *testing.T, how int, want error) {
	t.Helper()
	if err := unix.Flock(int(m.f.Fd()), how|unix.LOCK_NB); !errors.Is(err, want) {
		t.Errorf("flock operation %d: got error %v, want %v", how, err, want)
	}
}

// hold starts a process that waits for a lock of the file and keeps it until it is killed.
func (m *lockMount) hold(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("flock", "--no-fork", m.file(), "sleep", "1000000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(cmd) })
	return cmd
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// holds waits until the mount has n locks.
func (m *lockMount) holds(t *testing.T, n int64) {
	t.Helper()
	kit.Eventually(t, fmt.Sprintf("%d locks", n), func() bool { return m.locks.Counters.Held.Load() == n })
}

// waits waits until a request of the mount waits for a lock of another client.
func (m *lockMount) waits(t *testing.T) {
	t.Helper()
	kit.Eventually(t, "a waiting request", func() bool { return m.locks.Counters.Pending.Load() == 1 })
}

func testLocks(t *testing.T, b bench) {
	kit.NeedsPrograms(t, "flock")
	m, other := b.lockMount(t, "one"), b.lockMount(t, "two")
	testLockConflicts(t, m, other)
	testLockWaits(t, m, other)
	testKernelLocks(t, b, m)
	testLockReclaim(t, b, m, other)
	for _, x := range []*lockMount{m, other} {
		if n := x.locks.Counters.Lost.Load(); n != 0 {
			t.Errorf("lost locks: got %d, want none", n)
		}
		x.f.Close()
		x.holds(t, 0)
	}
}

func testLockConflicts(t *testing.T, m, other *lockMount) {
	m.fcntl(t, unix.F_WRLCK, 0, 10, nil)
	other.fcntl(t, unix.F_RDLCK, 5, 1, unix.EAGAIN)
	other.fcntl(t, unix.F_WRLCK, 10, 10, nil)
	m.fcntl(t, unix.F_RDLCK, 0, 10, nil)
	other.fcntl(t, unix.F_RDLCK, 0, 10, nil)
	m.fcntl(t, unix.F_WRLCK, 0, 10, unix.EAGAIN)
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: 10}
	if err := unix.FcntlFlock(m.f.Fd(), unix.F_GETLK, &l); err != nil || l.Type != unix.F_WRLCK || l.Start != 10 ||
		l.Len != 10 {
		t.Errorf("holder: got %+v, error %v; want an exclusive lock from 10, length 10", l, err)
	}
	m.fcntl(t, unix.F_UNLCK, 0, 0, nil)
	other.fcntl(t, unix.F_UNLCK, 0, 0, nil)
	m.flock(t, unix.LOCK_EX, nil)
	other.flock(t, unix.LOCK_SH, unix.EAGAIN)
	m.flock(t, unix.LOCK_UN, nil)
	other.flock(t, unix.LOCK_SH, nil)
	m.flock(t, unix.LOCK_SH, nil)
	m.flock(t, unix.LOCK_UN, nil)
	other.flock(t, unix.LOCK_UN, nil)
}

// testLockWaits lets a process wait until the process with the lock is killed.
func testLockWaits(t *testing.T, m, other *lockMount) {
	holder := m.hold(t)
	m.holds(t, 1)
	waiter := other.hold(t)
	other.waits(t)
	kill(holder)
	other.holds(t, 1)
	m.holds(t, 0)
	kill(waiter)
	other.holds(t, 0)
}

// testKernelLocks locks the file on a mount that the kernel's client has in the server's guest.
func testKernelLocks(t *testing.T, b bench, m *lockMount) {
	const dir = "/run/locks"
	b.MustRun("mkdir -p " + dir + " && mount -t nfs -o vers=3,proto=tcp,mountproto=tcp 10.0.2.15:/export " + dir)
	defer b.MustRun("umount " + dir)
	const open = "exec 9<>" + dir + "/locked; "
	m.flock(t, unix.LOCK_EX, nil)
	var failed *lab.CommandError
	if out, err := b.Run(open + "flock -n 9"); !errors.As(err, &failed) {
		t.Errorf("lock of the kernel's client: got %q, error %v, want a failure", out, err)
	}
	m.flock(t, unix.LOCK_UN, nil)
	pid := strings.TrimSpace(b.MustRun(open + "flock 9 && { sleep 1000000 >/dev/null 2>&1 & echo $!; }"))
	m.flock(t, unix.LOCK_SH, unix.EAGAIN)
	waiter := m.hold(t)
	m.waits(t)
	b.MustRun("kill " + pid)
	m.holds(t, 1)
	kill(waiter)
	m.holds(t, 0)
}

// testLockReclaim ends the power of the server while a process has a lock and data that is not on
// the server's disk.
func testLockReclaim(t *testing.T, b bench, m, other *lockMount) {
	m.fcntl(t, unix.F_WRLCK, 0, 10, nil)
	data := randomBytes(1 << 20)
	sent := m.fs.Counters.SentBytes.Load()
	if _, err := m.f.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	kit.Eventually(t, "sent data", func() bool { return m.fs.Counters.SentBytes.Load()-sent >= uint64(len(data)) })
	// The test process must not start another QEMU: the new process would close its copy of m.f,
	// and closing needs the server.
	b.cutPower(t, func() {})
	if err := m.f.Sync(); err != nil {
		t.Errorf("fsync with a lock: %v", err)
	}
	kit.Eventually(t, "a reclaimed lock", func() bool { return m.locks.Counters.Reclaimed.Load() > 0 })
	other.fcntl(t, unix.F_RDLCK, 5, 1, unix.EAGAIN) // waits until the grace period ends
	other.fcntl(t, unix.F_RDLCK, 10, 1, nil)
	m.fcntl(t, unix.F_UNLCK, 0, 0, nil)
	other.fcntl(t, unix.F_WRLCK, 0, 0, nil)
	other.fcntl(t, unix.F_UNLCK, 0, 0, nil)
}
