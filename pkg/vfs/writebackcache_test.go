package vfs

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
)

var writebackMount = mountConfig{opts: Options{Writeback: true}}

// TestWritebackGathersWrites checks that the kernel sends small writes in few requests, and that
// fsync(2) and close(2) return after the data is on the server.
func TestWritebackGathersWrites(t *testing.T) {
	eachServer(t, func(t *testing.T, e *export) {
		m := e.mount(t, writebackMount)
		f, err := os.Create(m.path("file"))
		must(t, err)
		defer f.Close()
		var want []byte
		for i := range 1000 {
			line := bytes.Repeat([]byte{byte(i)}, 100)
			_, err := f.Write(line)
			must(t, err)
			want = append(want, line...)
		}
		must(t, f.Sync())
		wantContent(t, filepath.Join(e.dir, "file"), want)
		if n := m.fs.Counters.Ops[kernel.OpWrite].Load(); n == 0 || n > 50 {
			t.Errorf("WRITE requests for 1000 writes: got %d, want 1 to 50", n)
		}
		_, err = f.WriteAt([]byte("end"), int64(len(want)))
		must(t, err)
		must(t, f.Close())
		wantContent(t, filepath.Join(e.dir, "file"), append(want, "end"...))
		st, err := os.Stat(m.path("file"))
		must(t, err)
		server, err := os.Stat(filepath.Join(e.dir, "file"))
		must(t, err)
		if !st.ModTime().Equal(server.ModTime()) {
			t.Errorf("mtime: got %v, want %v as on the server", st.ModTime(), server.ModTime())
		}
	})
}

// TestWritebackPartialPages changes parts of pages that are not cached, through files that are open
// for writing only, also with O_APPEND.
func TestWritebackPartialPages(t *testing.T) {
	e := startOwnExport(t)
	want := randomBytes(1, 20000)
	must(t, os.WriteFile(filepath.Join(e.dir, "file"), want, 0o666))
	must(t, os.Chmod(filepath.Join(e.dir, "file"), 0o666))
	m := e.mount(t, writebackMount)
	write := func(flags int, off int64, data string) {
		fd, err := unix.Open(m.path("file"), unix.O_WRONLY|unix.O_CLOEXEC|flags, 0)
		must(t, err)
		_, err = unix.Pwrite(fd, []byte(data), off)
		must(t, err)
		must(t, unix.Close(fd))
	}
	write(0, 5000, "in the middle")
	copy(want[5000:], "in the middle")
	wantContent(t, filepath.Join(e.dir, "file"), want)
	dropCaches(t, m.path("file"))
	write(unix.O_APPEND, 0, "at the end")
	want = append(want, "at the end"...)
	wantContent(t, filepath.Join(e.dir, "file"), want)
}

// TestWritebackWithoutReadPermission writes to a file that its writer may not read, and sets its
// size. The writer does not own the file.
func TestWritebackWithoutReadPermission(t *testing.T) {
	e := startOwnExport(t)
	want := randomBytes(1, 10000)
	path := filepath.Join(e.dir, "file")
	must(t, os.WriteFile(path, want, 0o600))
	must(t, os.Chmod(path, 0o602))
	m := e.mount(t, writebackMount)
	script := "printf changed | dd of=file bs=7 seek=5000 oflag=seek_bytes conv=notrunc,fsync && truncate -s 9000 file"
	if out, err := shellAs(1234, m.dir, script); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	copy(want[5000:], "changed")
	wantContent(t, path, want[:9000])
}

// TestWritebackClearsSetID checks that a write to a set-user-ID program clears the bit before the
// write returns.
func TestWritebackClearsSetID(t *testing.T) {
	e := startOwnExport(t)
	path := filepath.Join(e.dir, "program")
	must(t, os.WriteFile(path, []byte("old"), 0o777))
	must(t, os.Chmod(path, 0o777|os.ModeSetuid))
	// Mounts with ACLs have HANDLE_KILLPRIV_V2 anyway.
	m := e.mount(t, mountConfig{opts: Options{Writeback: true}, noACL: true})
	out, err := shellAs(1234, m.dir, "exec 3<>program && printf new >&3 && stat -c %a program")
	if err != nil || strings.TrimSpace(out) != "777" {
		t.Errorf("mode after a write: got %s, %v, want 777", out, err)
	}
}

// TestWritebackErrorReportedOnce checks that fsync(2) and close(2) report the error of a WRITE that
// the server refused, once for each open file.
func TestWritebackErrorReportedOnce(t *testing.T) {
	e := startOwnExport(t)
	m, s := e.mountScripted(t, writebackMount)
	var fds []int
	for range 2 {
		fd, err := unix.Open(m.path("file"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o644)
		must(t, err)
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	s.on(status(nfs.ErrNoSpc), nfs3.ProcWrite)
	for i := range int64(2) {
		_, err := unix.Pwrite(fds[0], []byte("lost"), i<<12)
		must(t, err)
		// The kernel sends the page in the background. The second one comes after the error.
		const wait = unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		must(t, unix.SyncFileRange(fds[0], i<<12, 1<<12, wait))
		m.fs.data.Flush(t.Context(), 0)
	}
	for i, fd := range fds {
		if err := unix.Fsync(fd); err != unix.ENOSPC {
			t.Errorf("fsync of file %d: got %v, want ENOSPC", i, err)
		}
	}
	s.on(nil, nfs3.ProcWrite)
	for i, fd := range fds {
		if err := unix.Fsync(fd); err != nil {
			t.Errorf("second fsync of file %d: got %v, want no error", i, err)
		}
	}
}

// TestWritebackUnlockWritesData checks that data that was written under a lock is on the server
// after the unlock.
func TestWritebackUnlockWritesData(t *testing.T) {
	e := startOwnExport(t)
	locks := nlm.New(nlm.Config{Host: "127.0.0.1", MountPort: e.tcpPort, MountPortFirst: true, Caller: "test"})
	t.Cleanup(locks.Close)
	m := e.mount(t, mountConfig{opts: Options{Writeback: true, Locks: locks}})
	fd, err := unix.Open(m.path("file"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o644)
	must(t, err)
	defer unix.Close(fd)
	_, err = unix.Pwrite(fd, []byte("before the lock "), 0)
	must(t, err)
	must(t, unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	wantContent(t, filepath.Join(e.dir, "file"), []byte("before the lock "))
	_, err = unix.Pwrite(fd, []byte("under the lock"), 16)
	must(t, err)
	must(t, unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}))
	wantContent(t, filepath.Join(e.dir, "file"), []byte("before the lock under the lock"))
}

// TestWritebackDrain checks that Drain writes the data in the kernel's pages.
func TestWritebackDrain(t *testing.T) {
	e := startOwnExport(t)
	m := e.mount(t, writebackMount)
	f, err := os.Create(m.path("file"))
	must(t, err)
	defer f.Close()
	_, err = f.WriteString("data")
	must(t, err)
	if !m.fs.Drain(t.Context(), time.Minute) {
		t.Error("drain: got incomplete")
	}
	wantContent(t, filepath.Join(e.dir, "file"), []byte("data"))
}

// TestWritebackRenameByOtherUser checks that the owner of an open file gets no error after another
// user has renamed and linked the file.
func TestWritebackRenameByOtherUser(t *testing.T) {
	eachServer(t, func(t *testing.T, e *export) {
		openExport(t, e)
		m := e.mount(t, writebackMount).severalUsers()
		for _, flags := range []int{unix.O_RDONLY, unix.O_RDWR} {
			putFile(t, filepath.Join(e.dir, "file"), "content", alice, 0o666)
			fd := -1
			must(t, alice.do(t, func() (err error) {
				fd, err = unix.Open(m.path("file"), flags|unix.O_CLOEXEC, 0)
				return err
			}))
			must(t, bob.do(t, func() error { return unix.Rename(m.path("file"), m.path("moved")) }))
			must(t, bob.do(t, func() error { return unix.Link(m.path("moved"), m.path("linked")) }))
			must(t, bob.do(t, func() error { return unix.Unlink(m.path("linked")) }))
			if flags == unix.O_RDWR {
				_, err := unix.Pwrite(fd, []byte("new"), 0)
				must(t, err)
			}
			want(t, "fsync", unix.Fsync(fd), nil)
			want(t, "close", unix.Close(fd), nil)
			must(t, os.Remove(m.path("moved")))
		}
	})
}

// TestWritebackSetsMtime sets times that a program chooses.
func TestWritebackSetsMtime(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	m := e.mount(t, writebackMount).severalUsers()
	putFile(t, filepath.Join(e.dir, "file"), "content", alice, 0o666)
	past := unix.Timespec{Sec: 1e9}
	ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, past}
	set := func() error { return unix.UtimesNanoAt(unix.AT_FDCWD, m.path("file"), ts, 0) }
	must(t, alice.do(t, set))
	st, err := os.Stat(filepath.Join(e.dir, "file"))
	must(t, err)
	if got := st.ModTime().Unix(); got != past.Sec {
		t.Errorf("mtime: got %d, want %d", got, past.Sec)
	}
	want(t, "utimensat by another user", bob.do(t, set), unix.EPERM)
}

// TestWritebackNeedsKernel checks that an old kernel gets no writeback, and that this one does.
func TestWritebackNeedsKernel(t *testing.T) {
	m := startOwnExport(t).mount(t, writebackMount)
	if !m.fs.Writeback() {
		t.Error("writeback of a mount: got false, want true")
	}
	old := &FS{opts: Options{Writeback: true}}
	if old.limitWriteback(make([]byte, 64)); old.Writeback() {
		t.Error("writeback with an old kernel: got true, want false")
	}
}
