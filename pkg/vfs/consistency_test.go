package vfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestAttributeAge checks how long attributes are cached, with the defaults of nfs(5).
func TestAttributeAge(t *testing.T) {
	t.Parallel()
	type step struct {
		after  time.Duration // since the last step
		change string        // "" for none
		want   time.Duration
	}
	for _, tt := range []struct {
		name  string
		typ   nfs.FileType
		steps []step
	}{
		{"file", nfs.Regular, []step{{0, "", 3 * time.Second}, {time.Second, "", 3 * time.Second},
			{2 * time.Second, "", 6 * time.Second}, {6 * time.Second, "", 12 * time.Second},
			{12 * time.Second, "", 24 * time.Second}, {time.Hour, "", 48 * time.Second},
			{time.Hour, "", 60 * time.Second}, {time.Hour, "", 60 * time.Second},
			{time.Second, "other", 3 * time.Second}, {3 * time.Second, "", 6 * time.Second}}},
		{"directory", nfs.Directory, []step{{0, "", 30 * time.Second}, {30 * time.Second, "", 60 * time.Second},
			{time.Second, "own", 60 * time.Second}, {time.Second, "other", 30 * time.Second}}},
		{"own changes of a file", nfs.Regular, []step{{0, "", 3 * time.Second}, {3 * time.Second, "", 6 * time.Second},
			{time.Second, "own", 6 * time.Second}, {time.Second, "other, then own", 3 * time.Second}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fs := &FS{opts: DefaultOptions()}
				fs.setCaches()
				ino := &inode{id: 2}
				a := nfs.Attr{Type: tt.typ, FileID: 1}
				for i, s := range tt.steps {
					time.Sleep(s.after)
					wcc := nfs.Change{HasBefore: true, Before: nfs.Stamp{Mtime: a.Mtime}, HasAfter: true}
					switch s.change {
					case "own":
						a.Mtime.Sec++
					case "other":
						a.Mtime.Sec++
					case "other, then own":
						wcc.Before.Mtime.Sec++
						a.Mtime.Sec += 2
					}
					wcc.After = a
					if s.change == "" || s.change == "other" {
						fs.updateAttr(ino, &a, fs.attrs.Now())
					} else {
						fs.updateChange(ino, &wcc, fs.attrs.Now(), true)
					}
					if got := fs.attrs.View(&ino.attr).TTL; got != s.want {
						t.Errorf("step %d: got %v, want %v", i, got, s.want)
					}
				}
			})
		})
	}
}

// twoMounts mounts an export twice. The first mount counts its calls.
func twoMounts(t *testing.T, e *export, opts Options) (a *testMount, calls *scripted, b *testMount) {
	t.Helper()
	a, calls = e.mountScripted(t, mountConfig{opts: opts})
	return a, calls, e.mount(t, mountConfig{opts: opts})
}

// keepsPages checks that the kernel keeps the pages of a file that no other client changed. try
// writes the file of number i, and returns how many READ calls the mount made for its cached pages.
// The kernel may reclaim single pages at any time, so only one try must be without READ calls. A
// mount that drops the pages fails each try.
func keepsPages(t *testing.T, try func(i int) (reads int)) {
	t.Helper()
	var reads [5]int
	for i := range reads {
		if reads[i] = try(i); reads[i] == 0 {
			return
		}
	}
	t.Errorf("READ calls for cached pages: got %d, want one try without calls", reads)
}

// TestOwnWritesStayCached checks that data that this mount wrote is read from the kernel's pages.
func TestOwnWritesStayCached(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, e *export) {
		m, calls := e.mountScripted(t, mountConfig{})
		keepsPages(t, func(i int) int {
			before := calls.count(nfs3.ProcRead)
			data := randomBytes(uint64(i), 9<<20) // several WRITEs in flight
			must(t, os.WriteFile(m.path("f"), data, 0o644))
			wantContent(t, m.path("f"), data)
			must(t, os.Rename(m.path("f"), m.path("g"))) // changes the ctime on most file systems
			wantContent(t, m.path("g"), data)
			f, err := os.OpenFile(m.path("g"), os.O_RDWR, 0)
			must(t, err)
			defer f.Close()
			copy(data[4096:], "new")
			_, err = f.WriteAt(data[4096:8192], 4096)
			must(t, err)
			must(t, f.Sync())
			stat(t, m.path("g"))
			wantContent(t, m.path("g"), data)
			return calls.count(nfs3.ProcRead) - before
		})
	})
}

// TestOpenSeesOtherClient checks close-to-open consistency between two mounts. The new data has the
// old size.
func TestOpenSeesOtherClient(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, e *export) {
		a, calls, b := twoMounts(t, e, Options{})
		keepsPages(t, func(try int) int {
			var data []byte
			for i := range 4 {
				e.awaitTick(t)
				data = randomBytes(uint64(4*try+i), 10000)
				must(t, os.WriteFile(b.path("f"), data, 0o644))
				wantContent(t, a.path("f"), data)
			}
			before := calls.count(nfs3.ProcRead)
			wantContent(t, a.path("f"), data)
			return calls.count(nfs3.ProcRead) - before
		})
	})
}

// TestOvertakenReplyIsNotCached delays a reply with a name. The reply to a later GETATTR shows that
// another client has changed the directory. The old name must not enter a cache.
func TestOvertakenReplyIsNotCached(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		proc nfs3.Proc
		use  func(dir int) error // of the name f
	}{
		{nfs3.ProcLookup, func(dir int) error { var st unix.Stat_t; return unix.Fstatat(dir, "f", &st, 0) }},
		{nfs3.ProcCreate, func(dir int) error { return unix.Mknodat(dir, "f", unix.S_IFREG|0o644, 0) }},
		{nfs3.ProcLink, func(dir int) error { return unix.Linkat(dir, "other", dir, "f", 0) }},
	} {
		t.Run(c.proc.String(), func(t *testing.T) {
			e := startOwnExport(t)
			m, calls := e.mountScripted(t, mountConfig{})
			there := filepath.Join(e.dir, "d")
			must(t, os.Mkdir(there, 0o755))
			must(t, os.WriteFile(filepath.Join(there, "other"), nil, 0o644))
			if c.proc == nfs3.ProcLookup {
				must(t, os.WriteFile(filepath.Join(there, "f"), nil, 0o644))
			}
			stat(t, m.path("d/other"))
			fd, err := unix.Open(m.path("d"), unix.O_PATH|unix.O_CLOEXEC, 0)
			must(t, err)
			defer unix.Close(fd)
			answered, changed := make(chan struct{}), make(chan struct{})
			calls.on(times(1, func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
				err := pass()
				close(answered)
				<-changed
				return err
			}), c.proc)
			result := make(chan error, 1)
			go func() { result <- c.use(fd) }()
			<-answered
			e.awaitTick(t)
			must(t, os.Rename(filepath.Join(there, "f"), filepath.Join(there, "g")))
			var st unix.Statx_t
			fetch := func() error {
				return unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
			}
			must(t, fetch())
			close(changed)
			must(t, <-result)
			must(t, fetch())                                // the attributes of the directory are valid again
			for _, name := range []string{"missing", "f"} { // the first one renews the right to search
				if err := unix.Fstatat(fd, name, new(unix.Stat_t), 0); err != unix.ENOENT {
					t.Errorf("stat of %s after the change: got %v, want ENOENT", name, err)
				}
			}
		})
	}
}

// shortAge is a time of cached attributes whose end tests await.
const shortAge = 50 * time.Millisecond

// openAndRead opens a file until the test ends and reads its first n bytes into a new buffer.
func openAndRead(t *testing.T, path string, n int) (f *os.File, buf []byte) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	buf = make([]byte, n)
	_, err = f.ReadAt(buf, 0)
	must(t, err)
	return f, buf
}

// TestStatDropsStalePages checks that read(2) of an open file returns another client's data after a
// stat that asked the server.
func TestStatDropsStalePages(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	a, _, b := twoMounts(t, e, Options{})
	must(t, os.WriteFile(b.path("f"), bytes.Repeat([]byte("1"), 100), 0o644))
	f, buf := openAndRead(t, a.path("f"), 10)
	for i := range 5 {
		want := bytes.Repeat([]byte{byte('2' + i)}, 100)
		e.awaitTick(t)
		must(t, os.WriteFile(b.path("f"), want, 0o644))
		var st unix.Statx_t
		must(t, unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st))
		if _, err := f.ReadAt(buf, 0); err != nil || !bytes.Equal(buf, want[:10]) {
			t.Errorf("read after stat: got %q, %v, want %q", buf, err, want[:10])
		}
	}
}

// TestOpenFileSeesOtherClient checks that read(2) of a file that stays open returns another
// client's data when the cached attributes have expired, without any other call.
func TestOpenFileSeesOtherClient(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		opts Options
	}{
		{"short acregmax", Options{AcRegMin: shortAge, AcRegMax: shortAge, AcDirMax: time.Second}},
		{"noac", Options{NoAC: true, AcDirMax: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := startOwnExport(t)
			a, _, b := twoMounts(t, e, tt.opts)
			must(t, os.WriteFile(b.path("f"), bytes.Repeat([]byte("1"), 100), 0o644))
			f, buf := openAndRead(t, a.path("f"), 10)
			e.awaitTick(t)
			must(t, os.WriteFile(b.path("f"), bytes.Repeat([]byte("2"), 100), 0o644))
			if !eventually(func() bool {
				_, err := f.ReadAt(buf, 0)
				return err == nil && string(buf) == "2222222222"
			}) {
				t.Errorf("read: got %q forever, want the new data", buf)
			}
		})
	}
}

// TestNamesAfterChanges checks that changes by this mount keep cached names, and that a change by
// another client makes the kernel look them up again.
func TestNamesAfterChanges(t *testing.T) {
	t.Parallel()
	eachServer(t, func(t *testing.T, e *export) {
		m, calls := e.mountScripted(t, mountConfig{})
		dir := subdir(t, m)
		on := func(name string) string { return filepath.Join(dir, name) }
		there := func(name string) string { return filepath.Join(e.dir, filepath.Base(dir), name) }
		must(t, os.WriteFile(on("f"), nil, 0o644))
		must(t, os.Mkdir(on("d"), 0o755))
		// uses returns the number of LOOKUPs of uses of a file, a directory and a missing name.
		uses := func() int {
			before := calls.count(nfs3.ProcLookup)
			stat(t, on("f"))
			stat(t, on("d"))
			if _, err := os.Stat(on("missing")); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("stat of a missing name: got %v", err)
			}
			return calls.count(nfs3.ProcLookup) - before
		}
		m.awaitExpiry(t) // NFS-Ganesha's reply to MKDIR has no attributes from before
		uses()
		for i := range 3 {
			must(t, os.WriteFile(on(fmt.Sprint("own", i)), nil, 0o644))
			must(t, os.Rename(on(fmt.Sprint("own", i)), on("own")))
		}
		must(t, os.Remove(on("own")))
		if n := uses(); n != 0 {
			t.Errorf("LOOKUPs after own changes: got %d, want 0", n)
		}

		e.awaitTick(t)
		// The change comes after the kernel's LOOKUP, so that only the reply to CREATE shows it.
		calls.on(times(1, func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
			if err := os.WriteFile(there("other"), nil, 0o644); err != nil {
				t.Error(err)
			}
			return pass()
		}), nfs3.ProcCreate)
		must(t, os.WriteFile(on("own"), nil, 0o644))
		m.awaitExpiry(t)
		if n := uses(); n != 3 {
			t.Errorf("LOOKUPs after another client's change: got %d, want 3", n)
		}
		if n := uses(); n != 0 {
			t.Errorf("LOOKUPs of the second use: got %d, want 0", n)
		}

		e.awaitTick(t)
		must(t, os.Rename(there("f"), there("missing")))
		var st unix.Statx_t
		must(t, unix.Statx(unix.AT_FDCWD, dir, unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st))
		m.awaitExpiry(t)
		stat(t, on("missing"))
		if _, err := os.Stat(on("f")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("stat of the renamed file: got %v, want not exist", err)
		}
	})
}

// TestOpenSeesOtherClientAmongOwnWrites lets another client change a file between a read and a
// write of this mount. The reply to the WRITE or to the COMMIT shows the other client's change.
func TestOpenSeesOtherClientAmongOwnWrites(t *testing.T) {
	t.Parallel()
	const size = 5 << 20
	for _, s := range servers {
		for name, between := range map[string]bool{"before the WRITE": false, "before the COMMIT": true} {
			if !between && s.name == "NFS-Ganesha" {
				continue // its replies to WRITE have no attributes from before
			}
			t.Run(s.name+" "+name, func(t *testing.T) {
				e := s.start(t)
				a, calls, b := twoMounts(t, e, Options{})
				want := randomBytes(1, size)
				must(t, os.WriteFile(a.path("f"), want, 0o644))
				wantContent(t, a.path("f"), want)
				change := func() {
					e.awaitTick(t)
					f, err := os.OpenFile(b.path("f"), os.O_WRONLY, 0)
					must(t, err)
					_, err = f.WriteAt([]byte("other"), size-5)
					must(t, err)
					must(t, f.Close())
				}
				copy(want[size-5:], "other")
				allowForks := preventForks()
				defer allowForks()
				f, err := os.OpenFile(a.path("f"), os.O_RDWR, 0)
				must(t, err)
				if between {
					calls.on(times(1, func(_ context.Context, _ *sunrpc.Message, pass func() error) error {
						change()
						return pass()
					}), nfs3.ProcCommit)
				} else {
					change()
				}
				n := 4096 // one WRITE
				if between {
					n = 3 << 20
				}
				// Any FLUSH of the file makes its data stable, so the COMMIT can come before this
				// close.
				before := calls.count(nfs3.ProcCommit)
				_, err = f.WriteAt(randomBytes(2, n), 0)
				must(t, err)
				copy(want, randomBytes(2, n))
				must(t, f.Close())
				allowForks()
				if sent := calls.count(nfs3.ProcCommit) > before; sent != between {
					t.Fatalf("COMMIT sent: got %v, want %v", sent, between)
				}
				wantContent(t, a.path("f"), want)
			})
		}
	}
}

// preventForks makes forks by other tests wait until allow is called. A forked child holds a copy
// of each open file until it executes its program. The kernel then closes the copy and sends FLUSH,
// and FLUSH makes the data of the file stable. The caller must not start a program before it calls
// allow. Further calls of allow have no effect.
func preventForks() (allow func()) {
	syscall.ForkLock.RLock()
	return sync.OnceFunc(syscall.ForkLock.RUnlock)
}

// awaitTick waits until the clock of the server's file system has advanced. Changes within one tick
// have one mtime, and no NFSv3 client can distinguish them.
func (e *export) awaitTick(t *testing.T) {
	t.Helper()
	probe := filepath.Join(t.TempDir(), "probe")
	must(t, os.WriteFile(probe, nil, 0o644))
	first := stat(t, probe)
	if !eventually(func() bool {
		must(t, os.WriteFile(probe, []byte("x"), 0o644))
		now := stat(t, probe)
		return now.Mtim.Nano() > first.Mtim.Nano()+int64(10*time.Millisecond)
	}) {
		t.Fatal("the clock of the file system does not advance")
	}
}

// awaitExpiry waits until the kernel has all notifications.
func (m *testMount) awaitExpiry(t *testing.T) {
	t.Helper()
	if !eventually(func() bool { return !m.fs.expiry.Running() }) {
		t.Fatal("notifications did not end")
	}
}

// TestExpiredDirectoryKeepsPath checks that a process in a directory whose name expires can still
// determine its path.
func TestExpiredDirectoryKeepsPath(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{})
	must(t, os.MkdirAll(m.path("d/e"), 0o755))
	fd, err := unix.Open(m.path("d/e"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	e.awaitTick(t)
	must(t, os.WriteFile(filepath.Join(e.dir, "d/other"), nil, 0o644))
	must(t, os.WriteFile(m.path("d/own"), nil, 0o644))
	m.awaitExpiry(t)
	if m.fs.Counters.NameDrops.Load() == 0 {
		t.Fatal("no name has expired")
	}
	got, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil || got != m.path("d/e") {
		t.Errorf("path of an open directory: got %q, %v, want %q", got, err, m.path("d/e"))
	}
}

// TestReplacedDirectoryIsFoundAgain replaces a directory while the kernel has its names. The
// handles are then stale. Each operation by path looks the path up again and succeeds.
func TestReplacedDirectoryIsFoundAgain(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	m := e.mount(t, mountConfig{})
	fill := func(dir string) {
		must(t, os.Mkdir(dir, 0o755))
		must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("data"), 0o644))
		must(t, os.Symlink("f", filepath.Join(dir, "link")))
		must(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	}
	for name, do := range map[string]func(dir string) error{
		"stat":     func(d string) error { return unix.Stat(d+"/new", new(unix.Stat_t)) },
		"open":     func(d string) error { _, err := os.ReadFile(d + "/f"); return err },
		"create":   func(d string) error { return os.WriteFile(d+"/g", nil, 0o644) },
		"chmod":    func(d string) error { return os.Chmod(d+"/f", 0o600) },
		"truncate": func(d string) error { return os.Truncate(d+"/f", 1) },
		"readlink": func(d string) error { _, err := os.Readlink(d + "/link"); return err },
		"follow":   func(d string) error { _, err := os.ReadFile(d + "/link"); return err },
		"readdir":  func(d string) error { _, err := os.ReadDir(d); return err },
		"mkdir":    func(d string) error { return os.Mkdir(d+"/d", 0o755) },
		"rmdir":    func(d string) error { return unix.Rmdir(d + "/sub") },
		"unlink":   func(d string) error { return unix.Unlink(d + "/f") },
		"rename":   func(d string) error { return os.Rename(d+"/f", d+"/sub/g") },
		"link":     func(d string) error { return os.Link(d+"/f", d+"/g") },
		"symlink":  func(d string) error { return os.Symlink("x", d+"/g") },
		"mkfifo":   func(d string) error { return unix.Mkfifo(d+"/p", 0o600) },
		"statfs":   func(d string) error { return unix.Statfs(d+"/f", new(unix.Statfs_t)) },
		"access":   func(d string) error { return unix.Access(d+"/f", unix.R_OK) },
		"utimes":   func(d string) error { return os.Chtimes(d+"/f", time.Unix(1, 0), time.Unix(1, 0)) },
		"delxattr": func(d string) error { return unix.Removexattr(d+"/f", nfsacl.XattrAccess) },
	} {
		t.Run(name, func(t *testing.T) {
			there, dir := filepath.Join(e.dir, name), m.path(name)
			fill(there)
			for _, path := range []string{"f", "link", "sub"} {
				must(t, unix.Lstat(filepath.Join(dir, path), new(unix.Stat_t)))
			}
			fill(there + ".new")
			must(t, os.WriteFile(there+".new/new", nil, 0o644))
			must(t, os.RemoveAll(there))
			must(t, os.Rename(there+".new", there))
			if err := do(dir); err != nil {
				t.Errorf("got %v, want success", err)
			}
		})
	}
}
