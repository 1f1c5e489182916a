package differential

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
)

// The matrix tries every operation as every user in every kind of directory. A cell is one attempt,
// in a directory that no other cell uses.

// IDs of the matrix.
const (
	bobID      = 1010 // owns most objects
	aliceID    = 1000
	malloryID  = 1001
	teamID     = 2000 // group of most objects; alice is a member
	strangerID = 4000 // group without members
)

// A matrixUser tries the operations.
type matrixUser struct {
	name string
	*identity
}

// newMatrixUsers returns users with threads that no other run uses. Bob does not try operations.
func newMatrixUsers() (bob *identity, users []matrixUser) {
	return &identity{id: bobID, groups: []uint32{bobID, teamID}}, []matrixUser{
		{"root", root},
		{"alice", &identity{id: aliceID, groups: []uint32{aliceID, teamID}}},
		{"mallory", &identity{id: malloryID, groups: []uint32{malloryID}}},
	}
}

// An owner is the uid or the gid of an object. actor stands for that of the user who tries.
const actor = -1

// matrixDirs are the kinds of directories.
var matrixDirs = []struct {
	name     string
	mode     uint32
	uid, gid int
	acl      nfsacl.ACL
}{
	{"group", 0o770, bobID, teamID, nil},
	{"setgid", 0o2775, bobID, teamID, nil},
	{"sticky", 0o1777, 0, 0, nil},
	{"private", 0o700, bobID, bobID, nil},
	{"own", 0o755, actor, actor, nil},
	{"acl-denies-alice", 0o777, bobID, bobID, withRights(0o777, 0)},
	{"acl-permits-alice", 0o700, bobID, bobID, withRights(0o700, 7)},
}

// withRights returns the ACL of a mode, with other rights for alice.
func withRights(mode uint32, rights uint16) nfsacl.ACL {
	a := nfsacl.FromMode(mode)
	return nfsacl.ACL{a[0], {Tag: nfsacl.TagUser, Perm: rights, ID: aliceID}, a[1],
		{Tag: nfsacl.TagMask, Perm: nfsacl.PermMask, ID: nfsacl.UndefinedID}, a[2]}
}

// matrixObjects are the objects that the operations use.
var matrixObjects = map[string]struct {
	mode     uint32
	uid, gid int
}{
	"f": {unix.S_IFREG | 0o640, bobID, teamID}, "w": {unix.S_IFREG | 0o666, bobID, bobID},
	"m": {unix.S_IFREG | 0o644, actor, actor}, "s": {unix.S_IFREG | 0o6755, actor, actor},
	"x": {unix.S_IFREG | 0o750, bobID, teamID},
	"d": {unix.S_IFDIR | 0o770, bobID, teamID}, "e": {unix.S_IFDIR | 0o755, actor, actor},
}

// A matrixOp is one operation. Its function gets the path of an object in the cell's directory.
type matrixOp struct {
	name string // "VERB OBJECT..."
	run  func(p []string) error
}

func opened(flags int, mode uint32, use func(fd int) error) func(p []string) error {
	return func(p []string) error {
		fd, err := unix.Open(p[0], flags|unix.O_CLOEXEC, mode)
		if err != nil {
			return err
		}
		if use != nil {
			err = use(fd)
		}
		return errors.Join(err, unix.Close(fd))
	}
}

func writeSome(fd int) error {
	_, err := unix.Write(fd, []byte("more"))
	return err
}

func readSome(fd int) error {
	_, err := unix.Read(fd, make([]byte, 10))
	return err
}

func touch(times ...unix.Timespec) func(p []string) error {
	return func(p []string) error { return unix.UtimesNanoAt(unix.AT_FDCWD, p[0], times, 0) }
}

var (
	timeNow      = unix.Timespec{Nsec: unix.UTIME_NOW}
	timeOmit     = unix.Timespec{Nsec: unix.UTIME_OMIT}
	timeExplicit = unix.Timespec{Sec: 1_000_000}
)

func chmodTo(mode uint32) func(p []string) error {
	return func(p []string) error { return unix.Chmod(p[0], mode) }
}

func chownTo(uid, gid int) func(p []string) error {
	return func(p []string) error { return unix.Chown(p[0], uid, gid) }
}

func accessible(mode uint32) func(p []string) error {
	return func(p []string) error { return unix.Faccessat(unix.AT_FDCWD, p[0], mode, unix.AT_EACCESS) }
}

func listNames(p []string) error {
	l, err := list(p[0], 1<<15)
	if err != nil {
		return err
	}
	defer l.close()
	_, err = l.rest()
	return err
}

// expand returns one operation for each object.
func expand(verb, objects string, run func(p []string) error) (out []matrixOp) {
	for _, o := range strings.Fields(objects) {
		out = append(out, matrixOp{verb + " " + strings.ReplaceAll(o, ",", " "), run})
	}
	return out
}

// matrixOps are the operations. "." is the cell's directory, and n does not exist.
var matrixOps = slices.Concat(
	expand("lookup", "f n", func(p []string) error {
		var st unix.Stat_t
		return unix.Lstat(p[0], &st)
	}),
	expand("open-read", "f m", opened(unix.O_RDONLY, 0, readSome)),
	expand("open-write", "f w", opened(unix.O_WRONLY, 0, writeSome)),
	expand("append", "f w m s", opened(unix.O_WRONLY|unix.O_APPEND, 0, writeSome)),
	expand("open-truncate", "f w", opened(unix.O_WRONLY|unix.O_TRUNC, 0, nil)),
	expand("create", "n f w m", opened(unix.O_WRONLY|unix.O_CREAT, 0o664, writeSome)),
	expand("create-read", "n f", opened(unix.O_RDONLY|unix.O_CREAT, 0o400, readSome)),
	expand("create-truncate", "n f w", opened(unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC, 0o600, nil)),
	expand("create-exclusive", "n f", opened(unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o640, writeSome)),
	expand("create-setid", "n", opened(unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o6755, nil)),
	expand("truncate", "f w m s", func(p []string) error { return unix.Truncate(p[0], 2) }),
	expand("chmod", "f m e .", chmodTo(0o700)),
	expand("chmod-setgid", "m e", chmodTo(0o2755)),
	expand("chown", "f m", chownTo(aliceID, -1)),
	expand("chgrp-team", "f m s", chownTo(-1, teamID)),
	expand("chgrp-stranger", "m", chownTo(-1, strangerID)),
	expand("touch-now", "f w m", touch(timeNow, timeNow)),
	expand("touch-mtime-now", "w m", touch(timeOmit, timeNow)),
	expand("touch-explicit", "f w m", touch(timeExplicit, timeExplicit)),
	expand("link", "f,n m,n m,w", func(p []string) error { return unix.Link(p[0], p[1]) }),
	expand("rename", "f,n m,n m,w m,d e,n e,d f,f", func(p []string) error { return unix.Rename(p[0], p[1]) }),
	expand("unlink", "f m n d", func(p []string) error { return unix.Unlink(p[0]) }),
	expand("mkdir", "n f d", func(p []string) error { return unix.Mkdir(p[0], 0o755) }),
	expand("rmdir", "d e f", func(p []string) error { return unix.Rmdir(p[0]) }),
	expand("readdir", ". d", listNames),
	expand("symlink", "n f", func(p []string) error { return unix.Symlink("target", p[0]) }),
	expand("mkfifo", "n f", func(p []string) error { return unix.Mkfifo(p[0], 0o644) }),
	expand("mknod-device", "n", func(p []string) error { return unix.Mknod(p[0], unix.S_IFCHR|0o600, 0x103) }),
	expand("access-r", "f w . d", accessible(unix.R_OK)),
	expand("access-w", "f w . d", accessible(unix.W_OK)),
	expand("access-x", "f x . d", accessible(unix.X_OK)),
	expand("exec", "f x", nil),
)

// A matrixCell is one attempt.
type matrixCell struct {
	name   string // path of its directory
	user   *identity
	warm   bool // bob has used the objects through the client
	op     matrixOp
	before map[string]string
}

// Matrix makes the directories of all cells in a directory of the server, tries the operations in
// the same directory of a mount, and returns one line for each cell: the result, and the objects
// that were added, changed or removed. A cell has a second line, with "warm", if the result is
// another one after bob has used the objects. Several matrices may run at the same time.
func Matrix(server, mount string) ([]string, error) {
	unix.Umask(0o022)
	bob, users := newMatrixUsers()
	defer bob.end()
	for _, u := range users {
		defer u.end()
	}
	var cells []*matrixCell
	for _, d := range matrixDirs {
		for _, o := range matrixOps {
			for _, u := range users {
				for _, warm := range []bool{false, true} {
					c := &matrixCell{name: fmt.Sprintf("%s %s %s %v", d.name, o.name, u.name, warm), user: u.identity,
						warm: warm, op: o}
					if err := c.make(server, d.mode, d.uid, d.gid, d.acl); err != nil {
						return nil, fmt.Errorf("make cell %s: %w", c.name, err)
					}
					cells = append(cells, c)
				}
			}
		}
	}
	var lines []string
	var cold string
	for _, c := range cells {
		result := c.try(mount, bob)
		after, err := closedSnapshot(filepath.Join(server, c.name))
		if err != nil {
			return nil, err
		}
		text := result + changes(c.before, after)
		name := strings.TrimSuffix(strings.TrimSuffix(c.name, " false"), " true")
		switch {
		case !c.warm:
			cold = text
			lines = append(lines, name+" => "+text)
		case text != cold:
			lines = append(lines, name+warmSuffix+" => "+text)
		}
	}
	return lines, nil
}

// owner returns an ID of an object.
func (c *matrixCell) owner(id int) int {
	if id == actor {
		return c.user.id
	}
	return id
}

// make makes the directory and the objects that the operation uses.
func (c *matrixCell) make(server string, mode uint32, uid, gid int, acl nfsacl.ACL) error {
	dir := filepath.Join(server, c.name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, name := range strings.Fields(c.op.name)[1:] {
		o, ok := matrixObjects[name]
		if !ok {
			continue
		}
		p := filepath.Join(dir, name)
		var err error
		if o.mode&unix.S_IFMT == unix.S_IFDIR {
			err = os.Mkdir(p, 0o700)
		} else {
			err = os.WriteFile(p, []byte("#!/bin/sh\nexit 0\n"), 0o600)
		}
		if err = errors.Join(err, unix.Chown(p, c.owner(o.uid), c.owner(o.gid)),
			unix.Chmod(p, o.mode&0o7777)); err != nil {
			return err
		}
	}
	err := errors.Join(unix.Chown(dir, c.owner(uid), c.owner(gid)), unix.Chmod(dir, mode))
	if acl != nil && err == nil {
		err = unix.Setxattr(dir, "system.posix_acl_access", acl.AppendXattr(nil), 0)
	}
	if err != nil {
		return err
	}
	c.before, err = snapshot(dir)
	return err
}

// try executes the operation through a mount and returns the errno. If the cell is warm, bob uses
// the objects before.
func (c *matrixCell) try(mount string, bob *identity) string {
	dir := filepath.Join(mount, c.name)
	var paths []string
	for _, name := range strings.Fields(c.op.name)[1:] {
		paths = append(paths, filepath.Join(dir, name))
	}
	if c.warm {
		bob.run(func() {
			for _, p := range paths {
				_ = opened(unix.O_RDONLY|unix.O_NONBLOCK, 0, readSome)([]string{p})
			}
			_ = listNames([]string{dir})
		})
	}
	if strings.HasPrefix(c.op.name, "exec ") {
		return errnoName(c.exec(paths[0]))
	}
	// A process that another goroutine starts meanwhile would close a copy of an open file, and get
	// the error of a write.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	var err error
	c.user.run(func() { err = c.op.run(paths) })
	return errnoName(err)
}

// exec executes a program as the user.
func (c *matrixCell) exec(path string) error {
	p, err := os.StartProcess(path, []string{path}, &os.ProcAttr{Dir: "/", Sys: &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(c.user.id), Gid: uint32(c.user.id), Groups: c.user.groups}}})
	if err != nil {
		return err
	}
	state, err := p.Wait()
	if err == nil && !state.Success() {
		err = errors.New(state.String())
	}
	return err
}

// releaseTimeout ends the wait for the removal of a hidden name after the last close(2) of its
// file.
const releaseTimeout = 2 * time.Minute

// closedSnapshot is the snapshot of a directory on the server whose files no process has open. FUSE
// reports the end of an open file after close(2) has returned. A mount therefore may hide a file
// that was closed just before it was removed. closedSnapshot waits until the hidden name is gone.
func closedSnapshot(dir string) (map[string]string, error) {
	for deadline := time.Now().Add(releaseTimeout); ; time.Sleep(time.Millisecond) {
		s, err := snapshot(dir)
		// The hidden name may go between the listing and the stat of the name.
		waits := err == nil && hasHidden(s) || errors.Is(err, unix.ENOENT)
		if !waits || time.Now().After(deadline) {
			return s, err
		}
	}
}

func hasHidden(snapshot map[string]string) bool {
	for name := range snapshot {
		if strings.HasPrefix(name, hidden) {
			return true
		}
	}
	return false
}

// snapshot describes a directory and its entries.
func snapshot(dir string) (map[string]string, error) {
	out := make(map[string]string)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := []string{"."}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			return nil, err
		}
		text := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			text += fmt.Sprintf(" size=%d nlink=%d", st.Size, st.Nlink)
		}
		if st.Mtim.Sec == timeExplicit.Sec {
			text += " mtime=explicit"
		}
		out[name] = text
	}
	return out, nil
}

// changes describes the differences of two snapshots.
func changes(before, after map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if before[name] == "" {
			fmt.Fprintf(&b, "; new %s %s", name, after[name])
		} else if before[name] != after[name] {
			fmt.Fprintf(&b, "; %s %s", name, after[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if after[name] == "" {
			fmt.Fprintf(&b, "; no %s", name)
		}
	}
	return b.String()
}
