package vfs

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// mountWithLocks mounts an export of this project's server with locks at the server.
func (e *export) mountWithLocks(t *testing.T) (*testMount, *scripted) {
	t.Helper()
	locks := nlm.New(nlm.Config{Host: "127.0.0.1", MountPort: e.tcpPort, MountPortFirst: true, Caller: "test"})
	t.Cleanup(locks.Close)
	return e.mountScripted(t, mountConfig{opts: Options{Locks: locks}})
}

// setLock sets or removes an fcntl(2) lock on a whole file.
func setLock(t *testing.T, f *os.File, typ int16) {
	t.Helper()
	must(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: typ}))
}

// TestLockSeesChangeWithinOneTick sets a lock after another client has changed the file within one
// tick of the server's clock. The attributes do not show the change.
func TestLockSeesChangeWithinOneTick(t *testing.T) {
	e := startOwnExport(t)
	there := filepath.Join(e.dir, "f")
	must(t, os.WriteFile(there, []byte("old"), 0o644))
	m, s := e.mountWithLocks(t)
	s.on(rememberReplies(), nfs3.ProcGetAttr)
	f, buf := openAndRead(t, m.path("f"), 3)
	setLock(t, f, unix.F_RDLCK)
	_, err := f.ReadAt(buf, 0)
	must(t, err)
	setLock(t, f, unix.F_UNLCK)
	must(t, os.WriteFile(there, []byte("new"), 0o644))
	setLock(t, f, unix.F_RDLCK)
	if _, err := f.ReadAt(buf, 0); err != nil || string(buf) != "new" {
		t.Errorf("read under a lock: got %q, %v, want %q", buf, err, "new")
	}
}

// TestLockSeesNewNames looks up a name that does not exist. Another client makes the name. After
// the next lock the name must exist, as the journal of a database whose writer was killed.
func TestLockSeesNewNames(t *testing.T) {
	e := startOwnExport(t)
	must(t, os.Mkdir(filepath.Join(e.dir, "sub"), 0o755))
	m, _ := e.mountWithLocks(t)
	for _, dir := range []string{"", "sub"} {
		t.Run("in /"+dir, func(t *testing.T) {
			db, err := os.Create(m.path(filepath.Join(dir, "db")))
			must(t, err)
			defer db.Close()
			journal, there := m.path(filepath.Join(dir, "journal")), filepath.Join(e.dir, dir, "journal")
			isMissing := func() bool {
				_, err := os.Lstat(journal)
				return errors.Is(err, unix.ENOENT)
			}
			for range 3 {
				setLock(t, db, unix.F_RDLCK)
				if !eventually(isMissing) || !isMissing() { // the second one may use the cache
					t.Fatal("the name exists already")
				}
				must(t, os.WriteFile(there, nil, 0o644))
				setLock(t, db, unix.F_WRLCK)
				if _, err := os.Lstat(journal); err != nil {
					t.Errorf("name that another client made before the lock: %v", err)
				}
				must(t, os.Remove(there))
				setLock(t, db, unix.F_UNLCK)
			}
		})
	}
}

// TestLockWritesDataFirst requests and releases a lock of a file with data that the server does not
// have. Each must send the data first: another client sees it.
func TestLockWritesDataFirst(t *testing.T) {
	e := startOwnExport(t)
	m, _ := e.mountWithLocks(t)
	f, err := os.Create(m.path("f"))
	must(t, err)
	defer f.Close()
	want := ""
	for _, typ := range []int16{unix.F_RDLCK, unix.F_UNLCK} {
		_, err = f.WriteString("data")
		must(t, err)
		want += "data"
		setLock(t, f, typ)
		wantContent(t, filepath.Join(e.dir, "f"), []byte(want))
	}
}

// TestCloseOfOtherDescriptorWritesBeforeUnlock closes a descriptor that is open for reading. The
// kernel then releases the locks that the process set by another descriptor. The data that was
// written under the lock must be on the server before.
func TestCloseOfOtherDescriptorWritesBeforeUnlock(t *testing.T) {
	e := startOwnExport(t)
	m, _ := e.mountWithLocks(t)
	f, err := os.Create(m.path("f"))
	must(t, err)
	defer f.Close()
	setLock(t, f, unix.F_WRLCK)
	other, err := os.Open(m.path("f"))
	must(t, err)
	_, err = f.WriteString("data")
	must(t, err)
	must(t, other.Close())
	if n := m.fs.opts.Locks.Counters.Held.Load(); n != 0 {
		t.Fatalf("locks after the close: got %d, want 0", n)
	}
	wantContent(t, filepath.Join(e.dir, "f"), []byte("data"))
}

// TestLockSeesGrowthBesideOtherLocks reads the end of a file that another client extends, under
// locks. Meanwhile other owners of the mount lock the file too.
func TestLockSeesGrowthBesideOtherLocks(t *testing.T) {
	const rounds, block = 50, 4096
	e := startOwnExport(t)
	there, err := os.Create(filepath.Join(e.dir, "f"))
	must(t, err)
	defer there.Close()
	m, _ := e.mountWithLocks(t)
	openFD := func() int {
		fd, err := unix.Open(m.path("f"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		must(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	lock := func(fd int, typ int16, start int64) error {
		return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: typ, Start: start, Len: 1})
	}
	stop := make(chan struct{})
	var others sync.WaitGroup
	for i := range 3 {
		fd := openFD()
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := errors.Join(lock(fd, unix.F_RDLCK, int64(i)), lock(fd, unix.F_UNLCK, int64(i))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	fd := openFD()
	buf := make([]byte, block)
	short, old := 0, 0
	for i := range rounds {
		want := bytes.Repeat([]byte{byte(i + 1)}, block)
		_, err := there.WriteAt(want, int64(i)*block)
		must(t, err)
		must(t, lock(fd, unix.F_RDLCK, 100))
		n, err := unix.Pread(fd, buf, int64(i)*block)
		must(t, err)
		if n != block {
			short++
		} else if !bytes.Equal(buf, want) {
			old++
		}
		must(t, lock(fd, unix.F_UNLCK, 100))
	}
	close(stop)
	others.Wait()
	if short+old != 0 {
		t.Errorf("reads under a lock: %d of %d did not see the end of the file, %d had old data", short, rounds, old)
	}
}

// A lockCalls makes the requests that the kernel makes for the file "f". The kernel sends RELEASE
// some time after close(2).
type lockCalls struct {
	t    *testing.T
	fs   *FS
	node uint64
}

func (e *export) lockCalls(t *testing.T) (*lockCalls, *scripted) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(e.dir, "f"), nil, 0o644))
	m, s := e.mountWithLocks(t)
	var entry fuse.EntryOut
	wantStatus(t, call(m.fs, kernel.OpLookup, fuse.InHeader{NodeId: fuse.FUSE_ROOT_ID}, "f\x00", &entry))
	t.Cleanup(func() { m.fs.Forget(entry.NodeId, 1) })
	return &lockCalls{t, m.fs, entry.NodeId}, s
}

func (c *lockCalls) header() fuse.InHeader { return fuse.InHeader{NodeId: c.node} }

func (c *lockCalls) open() (fh uint64) {
	c.t.Helper()
	var out fuse.OpenOut
	wantStatus(c.t, call(c.fs, kernel.OpOpen, fuse.OpenIn{InHeader: c.header(), Flags: unix.O_RDWR}, "", &out))
	return out.Fh
}

func (c *lockCalls) request(fh, owner uint64, typ, flags uint32) fuse.LkIn {
	return fuse.LkIn{InHeader: c.header(), Fh: fh, Owner: owner, LkFlags: flags,
		Lk: fuse.FileLock{End: rangelock.MaxOffset, Typ: typ}}
}

func (c *lockCalls) release(fh uint64) {
	call(c.fs, kernel.OpRelease, fuse.ReleaseIn{InHeader: c.header(), Fh: fh}, "", none)
}

// TestLateReleaseKeepsNewLock locks a file through one open file, and after close(2) through
// another one, with the same owner. The RELEASE of the first one comes last, and must not release
// the new lock. The owner is the same for a process, and by chance also for another open file
// description: the kernel makes the number from an address, which it uses again.
func TestLateReleaseKeepsNewLock(t *testing.T) {
	const owner, other = 1, 2
	for _, x := range []struct {
		name    string
		flags   uint32
		flusher uint64 // owner in FLUSH
		unlock  bool
	}{
		{"fcntl", 0, owner, false},
		{"fcntl with unlock", 0, owner, true},
		{"open file description", 0, other, false},
		{"open file description with unlock", 0, other, true},
		{"flock", fuse.FUSE_LK_FLOCK, other, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			c, _ := startOwnExport(t).lockCalls(t)
			first := c.open()
			wantStatus(t, call(c.fs, kernel.OpSetLk, c.request(first, owner, unix.F_WRLCK, x.flags), "", none))
			if x.unlock {
				wantStatus(t, call(c.fs, kernel.OpSetLk, c.request(first, owner, unix.F_UNLCK, x.flags), "", none))
			}
			wantStatus(t, call(c.fs, kernel.OpFlush,
				fuse.FlushIn{InHeader: c.header(), Fh: first, LockOwner: x.flusher}, "", none))
			second := c.open()
			wantStatus(t, call(c.fs, kernel.OpSetLk, c.request(second, owner, unix.F_WRLCK, x.flags), "", none))
			c.release(first)
			third := c.open()
			kit.Eventually(t, "release", func() bool {
				c.fs.handles.Lock()
				defer c.fs.handles.Unlock()
				return len(c.fs.handles.releasing) == 0
			})
			s := call(c.fs, kernel.OpSetLk, c.request(third, other, unix.F_RDLCK, x.flags), "", none)
			if s != fuse.Status(unix.EAGAIN) {
				t.Errorf("lock of another owner: got %v, want EAGAIN", s)
			}
			c.release(second)
			wantStatus(t, call(c.fs, kernel.OpSetLkw, c.request(third, other, unix.F_WRLCK, x.flags), "", none))
			c.release(third)
		})
	}
}

// TestGetLkWaitsForRelease asks for the lock of a closed file. The kernel has sent RELEASE, but the
// data that was written under the lock is not on the server yet.
func TestGetLkWaitsForRelease(t *testing.T) {
	c, s := startOwnExport(t).lockCalls(t)
	over := make(chan struct{})
	a, blocked := blockUntil(over)
	s.on(a, nfs3.ProcWrite)
	first, second := c.open(), c.open()
	wantStatus(t, call(c.fs, kernel.OpSetLk, c.request(first, 1, unix.F_WRLCK, 0), "", none))
	wantStatus(t, call(c.fs, kernel.OpWrite, fuse.WriteIn{InHeader: c.header(), Fh: first, Size: 4}, "data", none))
	closed := c.fs.file(first)
	c.release(first)
	<-blocked

	result := make(chan fuse.LkOut)
	go func() {
		var out fuse.LkOut
		if status := call(c.fs, kernel.OpGetLk, c.request(second, 2, unix.F_WRLCK, 0), "", &out); status != fuse.OK {
			t.Errorf("F_GETLK: %v", status)
		}
		result <- out
	}()
	kit.Eventually(t, "wait for the release", func() bool {
		closed.locks.mu.Lock()
		defer closed.locks.mu.Unlock()
		return closed.locks.released != nil
	})
	close(over)
	if out := <-result; out.Lk.Typ != unix.F_UNLCK {
		t.Errorf("F_GETLK after the release: got type %d, want %d", out.Lk.Typ, unix.F_UNLCK)
	}
	c.release(second)
}

func wantStatus(t *testing.T, status fuse.Status) {
	t.Helper()
	if status != fuse.OK {
		t.Fatal(status)
	}
}
