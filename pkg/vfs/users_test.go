package vfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/name"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A user is a local user of a mount.
type user struct {
	uid, gid uint32
	groups   []uint32
}

var (
	alice = user{uid: 4001, gid: 4001}
	bob   = user{uid: 4002, gid: 4002}
)

// do runs f on a thread with the identity of u. The thread ends afterwards.
func (u user) do(t *testing.T, f func() error) error {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread keeps the identity
		result <- u.run(f)
	}()
	return <-result
}

func (u user) run(f func() error) error {
	groups := append([]uint32{u.gid}, u.groups...)
	if _, _, err := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])),
		0); err != 0 {
		return err
	}
	// The syscall package would change all threads.
	if _, _, err := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(u.gid), uintptr(u.gid), uintptr(u.gid)); err != 0 {
		return err
	}
	if _, _, err := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(u.uid), uintptr(u.uid), uintptr(u.uid)); err != 0 {
		return err
	}
	return f()
}

// exec runs a program as u. The program of setpriv changes the identity, not Go's fork (see run).
func (u user) exec(t *testing.T, path string) error {
	t.Helper()
	id := strconv.Itoa(int(u.uid))
	out, err := exec.Command("setpriv", "--reuid", id, "--regid", id, "--clear-groups", path).CombinedOutput()
	switch {
	case err == nil:
		return nil
	case strings.Contains(string(out), "Permission denied"):
		return syscall.EACCES
	}
	return fmt.Errorf("%w: %s", err, out)
}

// open opens a file as u and closes it.
func (u user) open(t *testing.T, path string, flags int, mode uint32) error {
	t.Helper()
	return u.do(t, func() error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, mode)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
}

// putFile makes a file of a user on the server.
func putFile(t *testing.T, path, content string, owner user, mode uint32) {
	t.Helper()
	kit.NeedsRoot(t)
	must(t, os.WriteFile(path, []byte(content), 0o600))
	must(t, os.Chown(path, int(owner.uid), int(owner.gid)))
	must(t, unix.Chmod(path, mode))
}

func putDir(t *testing.T, path string, owner user, mode uint32) {
	t.Helper()
	kit.NeedsRoot(t)
	must(t, os.Mkdir(path, 0o700))
	must(t, os.Chown(path, int(owner.uid), int(owner.gid)))
	must(t, unix.Chmod(path, mode))
}

// setACL sets the access control list of a file on the server: the rights of owner, group, mask and
// others, and those of one user. On a mount with ACLs the kernel checks the list first, so tests of
// this package's checks mount with noACL.
func setACL(t *testing.T, path string, owner, group, mask, other uint16, named user, rights uint16) {
	t.Helper()
	list := nfsacl.ACL{
		{Tag: nfsacl.TagUserObj, Perm: owner, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagUser, Perm: rights, ID: named.uid},
		{Tag: nfsacl.TagGroupObj, Perm: group, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagMask, Perm: mask, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagOther, Perm: other, ID: nfsacl.UndefinedID},
	}
	if err := unix.Setxattr(path, "system.posix_acl_access", list.AppendXattr(nil), 0); err != nil {
		t.Fatalf("set ACL of %s: %v; use a file system with ACLs", path, err)
	}
}

func want(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// openExport makes the export accessible to all users.
func openExport(t *testing.T, e *export) {
	t.Helper()
	must(t, unix.Chmod(e.dir, 0o777))
}

// TestCreateOfExistingNameChecksPermission opens a name with O_CREAT that another client creates
// between the kernel's LOOKUP and the CREATE. The open has the checks and the page cache of an
// ordinary open.
func TestCreateOfExistingNameChecksPermission(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	m, s := e.mountScripted(t, mountConfig{})
	m.severalUsers()
	for _, c := range []struct {
		name  string
		mode  uint32
		flags int
		want  error
	}{
		{"read, no rights", 0o600, unix.O_RDONLY, unix.EACCES},
		{"write, no rights", 0o600, unix.O_WRONLY, unix.EACCES},
		{"truncate, no rights", 0o600, unix.O_WRONLY | unix.O_TRUNC, unix.EACCES},
		{"read and write, may read", 0o644, unix.O_RDWR, unix.EACCES},
		{"append, may read", 0o644, unix.O_WRONLY | unix.O_APPEND, unix.EACCES},
		{"truncate while reading, may read", 0o644, unix.O_RDONLY | unix.O_TRUNC, unix.EACCES},
		{"read, may write", 0o622, unix.O_RDONLY, unix.EACCES},
		{"exclusive, all rights", 0o666, unix.O_RDWR | unix.O_EXCL, unix.EEXIST},
		{"read, may read", 0o644, unix.O_RDONLY, nil},
		{"append, may write", 0o622, unix.O_WRONLY | unix.O_APPEND, nil},
		{"truncate, may write", 0o622, unix.O_WRONLY | unix.O_TRUNC, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			known := filepath.Join(e.dir, c.name)
			putFile(t, known, "secret", alice, c.mode)
			must(t, os.Link(known, known+" new"))
			want(t, "read by the owner", alice.do(t, func() error {
				_, err := os.ReadFile(m.path(c.name)) // fills the page cache
				return err
			}), nil)
			creates := s.count(nfs3.ProcCreate)
			s.on(times(1, status(nfs.ErrNoEnt)), nfs3.ProcLookup)
			want(t, "open", bob.open(t, m.path(c.name+" new"), c.flags|unix.O_CREAT, 0o644), c.want)
			if s.count(nfs3.ProcCreate) == creates {
				t.Error("CREATE calls: got 0, want at least 1")
			}
			content, err := os.ReadFile(known)
			must(t, err)
			truncated := c.want == nil && c.flags&unix.O_TRUNC != 0
			if (len(content) == 0) != truncated {
				t.Errorf("content on the server: got %q, want truncated %v", content, truncated)
			}
		})
	}
}

// TestCreateOfExistingNameDropsPages reads a name with O_CREAT that another client created and
// whose file changed since this client cached its pages.
func TestCreateOfExistingNameDropsPages(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	putFile(t, filepath.Join(e.dir, "known"), "old", alice, 0o644)
	must(t, os.Link(filepath.Join(e.dir, "known"), filepath.Join(e.dir, "new")))
	m, s := e.mountScripted(t, mountConfig{})
	wantContent(t, m.path("known"), []byte("old"))
	must(t, os.WriteFile(filepath.Join(e.dir, "known"), []byte("new"), 0o600))
	s.on(times(1, status(nfs.ErrNoEnt)), nfs3.ProcLookup)
	f, err := os.OpenFile(m.path("new"), os.O_RDONLY|os.O_CREATE, 0o644)
	must(t, err)
	defer f.Close()
	b := make([]byte, 3)
	if _, err := f.Read(b); err != nil || string(b) != "new" {
		t.Errorf("read: got %q, %v, want %q", b, err, "new")
	}
}

// TestNewFileMayDenyItsCreator creates files whose mode does not allow the open that creates them.
func TestNewFileMayDenyItsCreator(t *testing.T) {
	eachServer(t, func(t *testing.T, e *export) {
		openExport(t, e)
		m := e.mount(t, mountConfig{})
		for name, flags := range map[string]int{"plain": 0, "exclusive": unix.O_EXCL} {
			want(t, name, bob.open(t, m.path(name), flags|unix.O_RDWR|unix.O_CREAT, 0o400), nil)
		}
	})
}

// TestOpenChecksRightsOfEachUser opens a file whose pages are cached. Its mode lets everybody read
// it, but the server refuses one user.
func TestOpenChecksRightsOfEachUser(t *testing.T) {
	const content = "#!/bin/true\n"
	for name, cfg := range map[string]mountConfig{
		"default": {}, "noacl": {noACL: true}, "nocto": {opts: Options{NoCTO: true}, noACL: true},
	} {
		t.Run(name, func(t *testing.T) {
			e := startOwnExport(t)
			openExport(t, e)
			m := e.mount(t, cfg).severalUsers()
			for _, c := range []struct {
				name   string
				rights uint16
				flags  int
				want   error
			}{
				{"read without rights", 0, unix.O_RDONLY, unix.EACCES},
				{"read with the right to execute", 1, unix.O_RDONLY, unix.EACCES},
				{"read with the right to write", 2, unix.O_RDONLY, unix.EACCES},
				{"read and write with the right to read", 4, unix.O_RDWR, unix.EACCES},
				{"append with the right to read", 4, unix.O_WRONLY | unix.O_APPEND, unix.EACCES},
				{"truncate with the right to read", 4, unix.O_WRONLY | unix.O_TRUNC, unix.EACCES},
				{"read with the right to read", 4, unix.O_RDONLY, nil},
				{"write with the right to write", 2, unix.O_WRONLY, nil},
				{"append with the right to write", 2, unix.O_WRONLY | unix.O_APPEND, nil},
			} {
				putFile(t, filepath.Join(e.dir, c.name), content, alice, 0o777)
				setACL(t, filepath.Join(e.dir, c.name), 7, 7, 7, 7, bob, c.rights)
				wantContent(t, m.path(c.name), []byte(content))
				want(t, c.name, bob.open(t, m.path(c.name), c.flags, 0), c.want)
				wantContent(t, m.path(c.name), []byte(content))
			}
		})
	}
}

// TestExecNeedsOnlyExecuteRight executes a program that the server lets the user execute and not
// read, and the reverse.
func TestExecNeedsOnlyExecuteRight(t *testing.T) {
	program, err := os.ReadFile("/bin/true")
	must(t, err)
	e := startOwnExport(t)
	openExport(t, e)
	allowParents(t, e.dir)
	for name, rights := range map[string]uint16{"execute": 1, "read": 4} {
		putFile(t, filepath.Join(e.dir, name), string(program), alice, 0o755)
		setACL(t, filepath.Join(e.dir, name), 7, 5, 5, 5, bob, rights)
	}
	m := e.mount(t, mountConfig{noACL: true}).severalUsers()
	allowParents(t, m.dir)
	want(t, "execute with the right to execute", bob.exec(t, m.path("execute")), nil)
	want(t, "read with the right to execute", bob.open(t, m.path("execute"), unix.O_RDONLY, 0), unix.EACCES)
	want(t, "execute with the right to read", bob.exec(t, m.path("read")), unix.EACCES)
	want(t, "read with the right to read", bob.open(t, m.path("read"), unix.O_RDONLY, 0), nil)
}

// stat looks a path up as u.
func (u user) stat(t *testing.T, path string) error {
	t.Helper()
	return u.do(t, func() error { var st unix.Stat_t; return unix.Lstat(path, &st) })
}

// TestCachedNamesCheckRightsOfEachUser looks names up that another user has cached, in directories
// that mode bits let everybody search. An access control list on the server denies one user.
func TestCachedNamesCheckRightsOfEachUser(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	openExport(t, e)
	m := e.mount(t, mountConfig{noACL: true})
	dirs := []struct {
		name                      string
		mode                      uint32
		group, mask, other, named uint16
	}{
		{"denied", 0o755, 5, 5, 5, 0},
		{"may only list", 0o755, 5, 5, 5, 4},
		{"may only change", 0o777, 7, 7, 7, 6},
	}
	names := []string{"file", "sub", "sub/file", "missing"}
	for _, c := range dirs {
		dir := filepath.Join(e.dir, c.name)
		putDir(t, dir, alice, c.mode)
		putDir(t, filepath.Join(dir, "sub"), alice, 0o777)
		putFile(t, filepath.Join(dir, "file"), "secret", alice, 0o666)
		putFile(t, filepath.Join(dir, "sub", "file"), "secret", alice, 0o666)
		setACL(t, dir, 7, c.group, c.mask, c.other, bob, c.named)
		for _, name := range names { // fill the caches
			if err := alice.stat(t, m.path(c.name+"/"+name)); err != nil && name != "missing" {
				t.Fatalf("stat %s as alice: %v", m.path(c.name+"/"+name), err)
			}
		}
		must(t, alice.do(t, func() error { _, err := os.ReadDir(m.path(c.name)); return err }))
	}
	for _, c := range dirs {
		for _, name := range names {
			want(t, "stat "+m.path(c.name+"/"+name), bob.stat(t, m.path(c.name+"/"+name)), unix.EACCES)
		}
		want(t, "open", bob.open(t, m.path(c.name+"/sub/file"), unix.O_RDONLY, 0), unix.EACCES)
		want(t, "stat of the directory", bob.stat(t, m.path(c.name)), nil)
		// bob's attempts do not disturb alice
		want(t, "stat as alice", alice.stat(t, m.path(c.name+"/sub/file")), nil)
	}
}

// TestRootSquashHoldsForCachedNames uses names as root that another user has cached, in directories
// that the server does not let the client's root search.
func TestRootSquashHoldsForCachedNames(t *testing.T) {
	t.Parallel()
	e := startExportOf(t, nfsserve.Config{})
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "home"), alice, 0o700)
	putFile(t, filepath.Join(e.dir, "home", "file"), "secret", alice, 0o600)
	putFile(t, filepath.Join(e.dir, "private"), "secret", alice, 0o600)
	m := e.mount(t, mountConfig{})
	for _, p := range []string{"home/file", "private"} {
		must(t, alice.do(t, func() error { _, err := os.ReadFile(m.path(p)); return err }))
	}
	want(t, "stat", unix.Stat(m.path("home/file"), new(unix.Stat_t)), unix.EACCES)
	_, err := os.ReadDir(m.path("home"))
	want(t, "readdir", err, unix.EACCES)
	_, err = os.ReadFile(m.path("private"))
	want(t, "read", err, unix.EACCES)
	want(t, "truncate", os.Truncate(m.path("private"), 0), unix.EACCES)
}

// TestCachedNamesAvoidLookups checks that names which the server has answered for a user cost no
// further call for this user, and that another user's first use asks the server.
func TestCachedNamesAvoidLookups(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "dir"), alice, 0o755)
	putFile(t, filepath.Join(e.dir, "dir", "file"), "x", alice, 0o644)
	m, s := e.mountScripted(t, mountConfig{})
	m.severalUsers()
	calls := func(do func()) (n int) {
		for _, p := range []nfs3.Proc{nfs3.ProcLookup, nfs3.ProcGetAttr, nfs3.ProcAccess} {
			n -= s.count(p)
		}
		do()
		for _, p := range []nfs3.Proc{nfs3.ProcLookup, nfs3.ProcGetAttr, nfs3.ProcAccess} {
			n += s.count(p)
		}
		return n
	}
	for _, u := range []user{alice, bob} {
		if n := calls(func() { must(t, u.stat(t, m.path("dir/file"))) }); n == 0 {
			t.Errorf("first stat of uid %d: got no call, want the server asked", u.uid)
		}
		want(t, "stat of a missing name", u.stat(t, m.path("dir/missing")), unix.ENOENT)
		if n := calls(func() {
			for range 20 {
				must(t, u.stat(t, m.path("dir/file")))
				want(t, "stat of a missing name", u.stat(t, m.path("dir/missing")), unix.ENOENT)
			}
		}); n != 0 {
			t.Errorf("20 more stats of uid %d: got %d calls, want 0", u.uid, n)
		}
	}
}

// TestWrittenProgramLosesSetUserID overwrites a set-user-ID program of another user and executes it
// at once, on a mount that allows set-user-ID programs. The kernel must not use its cached mode.
func TestWrittenProgramLosesSetUserID(t *testing.T) {
	program, err := os.ReadFile("/usr/bin/id")
	must(t, err)
	e := startOwnExport(t)
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "dir"), bob, 0o755)
	putFile(t, filepath.Join(e.dir, "dir", "program"), "", alice, 0o4777)
	m := e.mount(t, mountConfig{mount: MountOptions{Options: mountpoint.Options{Suid: true}}}).severalUsers()
	allowParents(t, m.dir)
	path := m.path("dir/program")
	must(t, bob.open(t, path, unix.O_WRONLY, 0)) // the first open drops the kernel's attributes
	must(t, bob.do(t, func() error {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil { // the kernel caches the mode
			return err
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		if _, err := f.Write(program); err != nil {
			return err
		}
		return f.Close()
	}))
	id := strconv.Itoa(int(bob.uid))
	out, err := exec.Command("setpriv", "--reuid", id, "--regid", id, "--clear-groups", path, "-u").CombinedOutput()
	if got := strings.TrimSpace(string(out)); err != nil || got != id {
		t.Errorf("effective uid of the program: got %s, %v, want %s", got, err, id)
	}
}

// TestStrangerIsRefused tries what a user must not do to files of another user who has just used
// them on the same mount.
func TestStrangerIsRefused(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "home"), alice, 0o700)
	putDir(t, filepath.Join(e.dir, "home", "sub"), alice, 0o755)
	putFile(t, filepath.Join(e.dir, "home", "file"), "secret", alice, 0o644)
	must(t, os.Symlink("secret", filepath.Join(e.dir, "home", "link")))
	putDir(t, filepath.Join(e.dir, "open"), alice, 0o755)
	putFile(t, filepath.Join(e.dir, "open", "private"), "secret", alice, 0o600)
	putFile(t, filepath.Join(e.dir, "open", "program"), "#!/bin/true\n", alice, 0o700)
	putDir(t, filepath.Join(e.dir, "sticky"), alice, 0o1777)
	putFile(t, filepath.Join(e.dir, "sticky", "file"), "secret", alice, 0o644)
	putDir(t, filepath.Join(e.dir, "sticky", "dir"), alice, 0o755)
	m := e.mount(t, mountConfig{}).severalUsers()
	p := m.path
	must(t, unix.Mkfifo(p("open/fifo"), 0o600))
	must(t, os.Chown(p("open/fifo"), int(alice.uid), int(alice.gid)))
	must(t, alice.do(t, func() error {
		for _, name := range []string{"home/file", "open/private", "open/program", "sticky/file"} {
			if _, err := os.ReadFile(p(name)); err != nil {
				return err
			}
		}
		_, err := os.ReadDir(p("home"))
		return err
	}))
	must(t, bob.open(t, p("sticky/mine"), unix.O_CREAT|unix.O_WRONLY, 0o644))
	before := tree(t, e.dir)
	past := time.Unix(1, 0)
	var st unix.Stat_t
	open := func(name string, flags int) func() error {
		return func() error {
			fd, err := unix.Open(p(name), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}
	}
	for name, try := range map[string]func() error{
		"read":                       open("open/private", unix.O_RDONLY),
		"read through another path":  open("home/../open/private", unix.O_RDONLY),
		"write":                      open("open/private", unix.O_WRONLY),
		"write a readable file":      open("sticky/file", unix.O_WRONLY),
		"truncate on open":           open("sticky/file", unix.O_RDONLY|unix.O_TRUNC),
		"open a FIFO":                open("open/fifo", unix.O_RDWR),
		"create":                     open("open/new", unix.O_WRONLY|unix.O_CREAT),
		"create without a name":      open("open", unix.O_WRONLY|unix.O_TMPFILE),
		"open a directory":           open("home", unix.O_RDONLY|unix.O_DIRECTORY),
		"read below a directory":     open("home/file", unix.O_RDONLY),
		"stat below a directory":     func() error { return unix.Stat(p("home/file"), &st) },
		"stat a missing name":        func() error { return unix.Stat(p("home/missing"), &st) },
		"readlink below a directory": func() error { _, err := os.Readlink(p("home/link")); return err },
		"truncate":                   func() error { return unix.Truncate(p("sticky/file"), 0) },
		"change the mode":            func() error { return unix.Chmod(p("sticky/file"), 0o666) },
		"change the owner":           func() error { return os.Chown(p("sticky/file"), 4002, -1) },
		"give away":                  func() error { return os.Chown(p("sticky/mine"), 4001, -1) },
		"change times":               func() error { return os.Chtimes(p("sticky/file"), past, past) },
		"remove":                     func() error { return unix.Unlink(p("open/private")) },
		"remove from sticky":         func() error { return unix.Unlink(p("sticky/file")) },
		"rmdir in sticky":            func() error { return unix.Rmdir(p("sticky/dir")) },
		"rename in sticky":           func() error { return unix.Rename(p("sticky/file"), p("sticky/x")) },
		"rename over in sticky":      func() error { return unix.Rename(p("sticky/mine"), p("sticky/file")) },
		"rename into a directory":    func() error { return unix.Rename(p("sticky/mine"), p("open/x")) },
		"mkdir":                      func() error { return unix.Mkdir(p("open/x"), 0o777) },
		"symlink":                    func() error { return unix.Symlink("x", p("open/x")) },
		"mknod":                      func() error { return unix.Mkfifo(p("open/x"), 0o600) },
		"link into a directory":      func() error { return unix.Link(p("sticky/mine"), p("open/x")) },
		"link from a directory":      func() error { return unix.Link(p("home/file"), p("sticky/x")) },
	} {
		if err := bob.do(t, try); !errors.Is(err, os.ErrPermission) {
			t.Errorf("%s: got %v, want EACCES or EPERM", name, err)
		}
	}
	want(t, "execute", bob.exec(t, p("open/program")), unix.EACCES)
	wantTree(t, tree(t, e.dir), before)
	for name, try := range map[string]func() error{
		"read": func() error { _, err := os.ReadFile(p("home/file")); return err },
		"list": func() error { _, err := os.ReadDir(p("home")); return err },
	} {
		want(t, name+" by the owner", alice.do(t, try), nil)
	}
}

// TestRefusedLookupKeepsMounts looks a name up on which another file system is mounted, in a
// directory that the server does not let the user search. The kernel would detach that file system.
func TestRefusedLookupKeepsMounts(t *testing.T) {
	e := startOwnExport(t)
	openExport(t, e)
	putDir(t, filepath.Join(e.dir, "dir"), alice, 0o755)
	putDir(t, filepath.Join(e.dir, "dir", "sub"), alice, 0o755)
	setACL(t, filepath.Join(e.dir, "dir"), 7, 5, 5, 5, bob, 0)
	m := e.mount(t, mountConfig{noACL: true}).severalUsers()
	want(t, "lookup without another mount", bob.stat(t, m.path("dir/sub")), unix.EACCES)
	sub := m.path("dir/sub")
	must(t, unix.Mount("tmpfs", sub, "tmpfs", 0, ""))
	defer unix.Unmount(sub, unix.MNT_DETACH)
	for _, path := range []string{sub, filepath.Join(sub, "file")} {
		if err := bob.stat(t, path); err == nil {
			t.Errorf("stat %s: got success, want an error", path)
		}
	}
	if lines := mountsBelow(t, sub); len(lines) != 1 {
		t.Errorf("mount table: got %s, want the mount on %s", lines, sub)
	}
}

// TestOwnRemovalDoesNotHideACLChange changes the access control list of a directory on the server.
// The ctime of the directory is the only attribute that changes. A removal of another name by this
// mount does not explain the new ctime.
func TestOwnRemovalDoesNotHideACLChange(t *testing.T) {
	t.Parallel()
	e := startOwnExport(t)
	openExport(t, e)
	dir := filepath.Join(e.dir, "dir")
	putDir(t, dir, alice, 0o755)
	setACL(t, dir, 7, 5, 5, 5, bob, 5)
	putFile(t, filepath.Join(dir, "file"), "x", alice, 0o644)
	putFile(t, filepath.Join(e.dir, "other"), "x", alice, 0o644)
	m := e.mount(t, mountConfig{noACL: true}).severalUsers() // only the server checks the list
	must(t, alice.stat(t, m.path("dir/file")))
	must(t, bob.stat(t, m.path("dir/file")))
	must(t, os.Remove(m.path("other")))
	e.awaitTick(t)
	setACL(t, dir, 7, 5, 5, 5, bob, 0)
	var st unix.Statx_t
	must(t, unix.Statx(unix.AT_FDCWD, m.path("dir"), unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st))
	want(t, "stat after the change", bob.stat(t, m.path("dir/file")), unix.EACCES)
}

// TestRightsOfOpenBelongToTheirReply handles the reply to an ACCESS after attributes that the
// server sent later, and that show a change of the file's rights.
func TestRightsOfOpenBelongToTheirReply(t *testing.T) {
	fs := &FS{opts: Options{NoCTO: true, AcRegMin: time.Minute, AcRegMax: time.Minute}}
	fs.setCaches()
	ino := &inode{id: 2}
	cred := []byte{1}
	old := nfs.Attr{Type: nfs.Regular, Ctime: nfs.Time{Sec: 1}}
	changed := nfs.Attr{Type: nfs.Regular, Ctime: nfs.Time{Sec: 2}}
	for _, c := range []struct {
		name string
		a    *nfs.Attr
		want bool
	}{{"older reply", &old, false}, {"current reply", &changed, true}} {
		fs.updateAttr(ino, &changed, fs.attrs.Now())
		fs.keepOpener(ino, cred, openRights, c.a, fs.attrs.Now())
		if _, ok := fs.openCached(ino, cred, nfs.AccessRead); ok != c.want {
			t.Errorf("open with the rights of the %s: got %v, want %v", c.name, ok, c.want)
		}
	}
}

// severalUsers makes m a mount that several users have used: no lookup of a second user waits.
func (m *testMount) severalUsers() *testMount {
	m.fs.users.Restore(name.ManyUsers, time.Time{})
	return m
}
