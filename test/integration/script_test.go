package integration

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/differential"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A script is file system calls of several users, one after the other, in a directory. A step is
//
//	USER CALL ARGUMENT...
//
// and steps are separated by ";". Paths are relative to the directory. {x255} in an argument stands
// for 255 times the letter x. The calls are the keys of calls below.

// users are the identities of a script. Users a and b share group 2000.
var users = map[string]struct {
	uid, gid int
	groups   []uint32
}{
	"r": {0, 0, nil},
	"a": {1001, 1001, []uint32{2000}},
	"b": {1002, 1002, []uint32{2000}},
	"c": {1003, 1003, nil},
}

// The main thread never runs a user's calls: a thread that changed its identity must end, and the
// main thread cannot.
func init() { runtime.LockOSThread() }

// A runner runs the steps of one script.
type runner struct {
	dir   string
	users map[string]chan func()
	files map[string]int          // open descriptors by their names in the script
	snaps map[string]unix.Statx_t // taken by the call "snap"
}

// runScript runs a script in dir and returns each step with its outcome, and after the steps the
// state of everything in dir.
func runScript(t *testing.T, dir, script string) []string {
	t.Helper()
	r := &runner{dir: dir, users: map[string]chan func(){}, files: map[string]int{}, snaps: map[string]unix.Statx_t{}}
	defer r.close()
	var outcome []string
	for step := range strings.SplitSeq(script, ";") {
		words := strings.Fields(step)
		if len(words) == 0 {
			continue
		}
		if len(words) < 2 || calls[words[1]].f == nil || len(words)-2 < calls[words[1]].args {
			t.Fatalf("script has an invalid step %q", step)
		}
		args := make([]string, 0, 8)
		for _, w := range words[2:] {
			args = append(args, expand(w))
		}
		text, err := r.as(t, words[0], func() (string, error) { return calls[words[1]].f(r, append(args, "")) })
		outcome = append(outcome, strings.Join(words, " ")+" => "+result(text, err))
	}
	state, err := r.as(t, "r", func() (string, error) { return r.tree() })
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(state) {
		outcome = append(outcome, "end: "+strings.TrimSuffix(line, "\n"))
	}
	return outcome
}

func result(text string, err error) string {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	case err != nil:
		return err.Error()
	case text == "":
		return "ok"
	}
	return text
}

var repeated = regexp.MustCompile(`\{(.)(\d+)\}`)

func expand(word string) string {
	return repeated.ReplaceAllStringFunc(word, func(s string) string {
		m := repeated.FindStringSubmatch(s)
		n, _ := strconv.Atoi(m[2])
		return strings.Repeat(m[1], n)
	})
}

// as runs f on the thread of a user.
func (r *runner) as(t *testing.T, user string, f func() (string, error)) (text string, err error) {
	t.Helper()
	u, ok := users[user]
	if !ok {
		t.Fatalf("script has an unknown user %q", user)
	}
	if r.users[user] == nil {
		work, started := make(chan func()), make(chan error)
		r.users[user] = work
		go func() {
			runtime.LockOSThread() // without unlock: the thread ends with the goroutine
			started <- becomeUser(u.uid, u.gid, u.groups)
			for f := range work {
				f()
			}
		}()
		if err := <-started; err != nil {
			t.Fatalf("become user %d: %v", u.uid, err)
		}
	}
	done := make(chan struct{})
	r.users[user] <- func() {
		defer close(done)
		text, err = f()
	}
	<-done
	return text, err
}

// becomeUser gives this thread an identity and an umask that other threads do not share.
func becomeUser(uid, gid int, groups []uint32) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	unix.Umask(0o022)
	var list unsafe.Pointer
	if len(groups) > 0 {
		list = unsafe.Pointer(&groups[0])
	}
	// The functions of package syscall would change every thread.
	for _, c := range [][4]uintptr{{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(list)},
		{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
		{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)}} {
		if _, _, errno := unix.RawSyscall(c[0], c[1], c[2], c[3]); errno != 0 {
			return errno
		}
	}
	return nil
}

func (r *runner) close() {
	for _, fd := range r.files {
		_ = unix.Close(fd)
	}
	for _, work := range r.users {
		close(work)
	}
}

// path makes an absolute path. "./" stays, because a trailing slash or dot has a meaning.
func (r *runner) path(p string) string {
	if strings.HasPrefix(p, "/") {
		return p
	}
	return r.dir + "/" + p
}

// tree describes every object below the directory.
func (r *runner) tree() (string, error) {
	var out strings.Builder
	err := filepath.WalkDir(r.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || path == r.dir {
			return err
		}
		var st unix.Statx_t
		if err := statx(path, unix.AT_SYMLINK_NOFOLLOW, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(r.dir, path)
		fmt.Fprintf(&out, "%s %s", shortName(name), describe(&st))
		switch {
		case d.Type().IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			out.WriteString(" " + digest(b))
		case d.Type() == os.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			out.WriteString(" -> " + shortName(target))
		}
		out.WriteByte('\n')
		return nil
	})
	return out.String(), err
}

func shortName(s string) string {
	if len(s) > 80 {
		return fmt.Sprintf("%.20s...(%d)", s, len(s))
	}
	return s
}

func statx(path string, flags int, st *unix.Statx_t) error {
	return unix.Statx(unix.AT_FDCWD, path, flags|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, st)
}

var typeNames = map[uint16]string{unix.S_IFREG: "reg", unix.S_IFDIR: "dir", unix.S_IFLNK: "lnk", unix.S_IFIFO: "fifo",
	unix.S_IFSOCK: "sock", unix.S_IFCHR: "chr", unix.S_IFBLK: "blk"}

// describe shows the fields that must be equal on a directory and on its mount. Not shown, because
// they may differ: device, inode and block numbers, the block size, the size of a directory, and
// times that the script did not set.
func describe(st *unix.Statx_t) string {
	typ := typeNames[st.Mode&unix.S_IFMT]
	s := fmt.Sprintf("%s %04o %d:%d nlink=%d", typ, st.Mode&0o7777, st.Uid, st.Gid, st.Nlink)
	switch typ {
	case "dir":
	case "chr", "blk":
		s += fmt.Sprintf(" rdev=%d,%d", st.Rdev_major, st.Rdev_minor)
	default:
		s += fmt.Sprintf(" size=%d", st.Size)
	}
	return s
}

func digest(b []byte) string {
	if len(b) <= 40 {
		return strconv.Quote(string(b))
	}
	return fmt.Sprintf("sha256:%.4x", sha256.Sum256(b))
}

// A call is one word of the language, with the least number of its arguments.
type call struct {
	args int
	f    func(r *runner, a []string) (string, error)
}

func number(s string) int {
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		panic(fmt.Sprintf("script: %q is not a number", s))
	}
	return int(n)
}

func mode(s string) uint32 {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil {
		panic(fmt.Sprintf("script: %q is not a mode", s))
	}
	return uint32(n)
}

func lookupWord(table map[string]int, list string) int {
	n := 0
	for word := range strings.SplitSeq(list, ",") {
		v, ok := table[word]
		if !ok {
			panic(fmt.Sprintf("script: unknown flag %q", word))
		}
		n |= v
	}
	return n
}

var openFlags = map[string]int{"r": unix.O_RDONLY, "w": unix.O_WRONLY, "rw": unix.O_RDWR, "creat": unix.O_CREAT,
	"excl": unix.O_EXCL, "trunc": unix.O_TRUNC, "append": unix.O_APPEND, "dir": unix.O_DIRECTORY,
	"nofollow": unix.O_NOFOLLOW, "direct": unix.O_DIRECT, "sync": unix.O_SYNC, "nonblock": unix.O_NONBLOCK}

var (
	nodeTypes = map[string]int{"fifo": unix.S_IFIFO, "sock": unix.S_IFSOCK, "chr": unix.S_IFCHR,
		"blk": unix.S_IFBLK, "reg": unix.S_IFREG}
	accessModes = map[string]int{"f": unix.F_OK, "r": unix.R_OK, "w": unix.W_OK, "x": unix.X_OK}
	renameFlags = map[string]int{"noreplace": unix.RENAME_NOREPLACE, "exchange": unix.RENAME_EXCHANGE}
	seekModes   = map[string]int{"set": unix.SEEK_SET, "end": unix.SEEK_END, "data": unix.SEEK_DATA,
		"hole": unix.SEEK_HOLE}
	allocModes = map[string]int{"alloc": 0, "keep": unix.FALLOC_FL_KEEP_SIZE, "punch": unix.FALLOC_FL_PUNCH_HOLE,
		"zero": unix.FALLOC_FL_ZERO_RANGE}
)

// noText makes a call of a function that returns an error only.
func noText(f func(r *runner, a []string) error) func(r *runner, a []string) (string, error) {
	return func(r *runner, a []string) (string, error) { return "", f(r, a) }
}

// calls are the words of the language, one per line.
var calls map[string]call

func init() {
	calls = map[string]call{
		"open":      {3, (*runner).open}, // NAME PATH FLAGS [MODE]
		"close":     {1, (*runner).closeFile},
		"read":      {3, (*runner).pread},  // NAME OFFSET COUNT
		"write":     {2, (*runner).write},  // NAME TEXT
		"pwrite":    {3, (*runner).pwrite}, // NAME OFFSET TEXT
		"put":       {2, (*runner).put},    // PATH TEXT [MODE]: open, write, close
		"cat":       {1, (*runner).cat},
		"stat":      {1, func(r *runner, a []string) (string, error) { return r.stat(a[0], 0) }},
		"lstat":     {1, func(r *runner, a []string) (string, error) { return r.stat(a[0], unix.AT_SYMLINK_NOFOLLOW) }},
		"fstat":     {1, (*runner).fstat},
		"mkdir":     {2, noText(func(r *runner, a []string) error { return unix.Mkdir(r.path(a[0]), mode(a[1])) })},
		"rmdir":     {1, noText(func(r *runner, a []string) error { return unix.Rmdir(r.path(a[0])) })},
		"unlink":    {1, noText(func(r *runner, a []string) error { return unix.Unlink(r.path(a[0])) })},
		"rename":    {2, noText(func(r *runner, a []string) error { return unix.Rename(r.path(a[0]), r.path(a[1])) })},
		"renameat2": {3, (*runner).renameat2}, // FROM TO FLAGS
		"link":      {2, noText(func(r *runner, a []string) error { return unix.Link(r.path(a[0]), r.path(a[1])) })},
		// TARGET PATH
		"symlink":  {2, noText(func(r *runner, a []string) error { return unix.Symlink(a[0], r.path(a[1])) })},
		"readlink": {1, (*runner).readlink},
		"mknod":    {3, (*runner).mknod}, // PATH TYPE MODE [MAJOR MINOR]
		"chmod":    {2, noText(func(r *runner, a []string) error { return unix.Chmod(r.path(a[0]), mode(a[1])) })},
		"fchmod":   {2, noText(func(r *runner, a []string) error { return unix.Fchmod(r.files[a[0]], mode(a[1])) })},
		"chown": {3, func(r *runner, a []string) (string, error) {
			return "", unix.Chown(r.path(a[0]), number(a[1]), number(a[2]))
		}},
		"lchown": {3, func(r *runner, a []string) (string, error) {
			return "", unix.Lchown(r.path(a[0]), number(a[1]), number(a[2]))
		}},
		"truncate": {2, func(r *runner, a []string) (string, error) {
			return "", unix.Truncate(r.path(a[0]), int64(number(a[1])))
		}},
		"ftruncate": {2, func(r *runner, a []string) (string, error) {
			return "", unix.Ftruncate(r.files[a[0]], int64(number(a[1])))
		}},
		// PATH ATIME MTIME
		"utimes":    {3, noText(func(r *runner, a []string) error { return r.utimes(a, 0) })},
		"lutimes":   {3, noText(func(r *runner, a []string) error { return r.utimes(a, unix.AT_SYMLINK_NOFOLLOW) })},
		"times":     {1, (*runner).times},
		"snap":      {1, (*runner).snap},
		"changed":   {1, (*runner).changed},
		"access":    {2, (*runner).access}, // PATH MODES
		"umask":     {1, noText(func(_ *runner, a []string) error { unix.Umask(int(mode(a[0]))); return nil })},
		"ls":        {1, (*runner).list},
		"statfs":    {1, (*runner).statfs},
		"fallocate": {4, (*runner).fallocate}, // NAME MODE OFFSET LENGTH
		"seek":      {3, (*runner).seek},      // NAME OFFSET WHENCE
		"fsync":     {1, noText(func(r *runner, a []string) error { return unix.Fsync(r.files[a[0]]) })},
		"fdatasync": {1, noText(func(r *runner, a []string) error { return unix.Fdatasync(r.files[a[0]]) })},
		"setxattr": {3, func(r *runner, a []string) (string, error) {
			return "", unix.Setxattr(r.path(a[0]), a[1], []byte(a[2]), 0)
		}},
	}
}

func (r *runner) open(a []string) (string, error) {
	m := uint32(0)
	if a[3] != "" {
		m = mode(a[3])
	}
	fd, err := unix.Open(r.path(a[1]), lookupWord(openFlags, a[2])|unix.O_CLOEXEC, m)
	if err == nil {
		if old, ok := r.files[a[0]]; ok {
			_ = unix.Close(old)
		}
		r.files[a[0]] = fd
	}
	return "", err
}

func (r *runner) closeFile(a []string) (string, error) {
	fd := r.files[a[0]]
	delete(r.files, a[0])
	err := unix.Close(fd)
	if len(r.files) == 0 {
		r.waitForRelease()
	}
	return "", err
}

// waitForRelease waits until the mount has removed the files that were removed while open. close(2)
// does not wait for that: the kernel sends FUSE_RELEASE later.
func (r *runner) waitForRelease() {
	for end := time.Now().Add(kit.Timeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if names, _ := filepath.Glob(filepath.Join(r.dir, ".nfs*")); len(names) == 0 {
			return
		}
	}
}

func (r *runner) pread(a []string) (string, error) {
	b := make([]byte, number(a[2]))
	n, err := unix.Pread(r.files[a[0]], b, int64(number(a[1])))
	return digest(b[:max(n, 0)]), err
}

func (r *runner) write(a []string) (string, error) {
	n, err := unix.Write(r.files[a[0]], []byte(a[1]))
	return strconv.Itoa(n), err
}

func (r *runner) pwrite(a []string) (string, error) {
	n, err := unix.Pwrite(r.files[a[0]], []byte(a[2]), int64(number(a[1])))
	return strconv.Itoa(n), err
}

func (r *runner) put(a []string) (string, error) {
	m := uint32(0o644)
	if a[2] != "" {
		m = mode(a[2])
	}
	fd, err := unix.Open(r.path(a[0]), unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, m)
	if err != nil {
		return "", err
	}
	_, err = unix.Write(fd, []byte(a[1]))
	return "", errors.Join(err, unix.Close(fd))
}

func (r *runner) cat(a []string) (string, error) {
	fd, err := unix.Open(r.path(a[0]), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var out bytes.Buffer
	b := make([]byte, 64<<10)
	for {
		n, err := unix.Read(fd, b)
		if n <= 0 || err != nil {
			return digest(out.Bytes()), err
		}
		out.Write(b[:n])
	}
}

func (r *runner) stat(path string, flags int) (string, error) {
	var st unix.Statx_t
	if err := statx(r.path(path), flags, &st); err != nil {
		return "", err
	}
	return describe(&st), nil
}

func (r *runner) fstat(a []string) (string, error) {
	var st unix.Statx_t
	err := unix.Statx(r.files[a[0]], "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
	if err != nil {
		return "", err
	}
	return describe(&st), nil
}

func (r *runner) renameat2(a []string) (string, error) {
	return "", unix.Renameat2(unix.AT_FDCWD, r.path(a[0]), unix.AT_FDCWD, r.path(a[1]),
		uint(lookupWord(renameFlags, a[2])))
}

func (r *runner) readlink(a []string) (string, error) {
	b := make([]byte, 5000)
	n, err := unix.Readlink(r.path(a[0]), b)
	return shortName(string(b[:max(n, 0)])), err
}

func (r *runner) mknod(a []string) (string, error) {
	dev := 0
	if len(a) > 5 {
		dev = int(unix.Mkdev(uint32(number(a[3])), uint32(number(a[4]))))
	}
	return "", unix.Mknod(r.path(a[0]), mode(a[2])|uint32(lookupWord(nodeTypes, a[1])), dev)
}

func (r *runner) utimes(a []string, flags int) error {
	var ts [2]unix.Timespec
	for i, word := range a[1:3] {
		switch word {
		case "now":
			ts[i].Nsec = unix.UTIME_NOW
		case "omit":
			ts[i].Nsec = unix.UTIME_OMIT
		default:
			sec, nsec, _ := strings.Cut(word, ".")
			ts[i].Sec = int64(number(sec))
			if nsec != "" {
				ts[i].Nsec = int64(number(strings.TrimLeft(nsec, "0") + ""))
			}
		}
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, r.path(a[0]), ts[:], flags)
}

// times shows the times of an object itself, not of a link's target.
func (r *runner) times(a []string) (string, error) {
	var st unix.Statx_t
	if err := statx(r.path(a[0]), unix.AT_SYMLINK_NOFOLLOW, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("atime=%d.%09d mtime=%d.%09d", st.Atime.Sec, st.Atime.Nsec, st.Mtime.Sec, st.Mtime.Nsec), nil
}

// snap remembers the times of an object for "changed", and waits for the next tick of the clock
// that file systems use.
func (r *runner) snap(a []string) (string, error) {
	var st unix.Statx_t
	err := statx(r.path(a[0]), unix.AT_SYMLINK_NOFOLLOW, &st)
	r.snaps[a[0]] = st
	differential.NextTick()
	return "", err
}

// changed says which times differ from those of the last "snap".
func (r *runner) changed(a []string) (string, error) {
	var st unix.Statx_t
	if err := statx(r.path(a[0]), unix.AT_SYMLINK_NOFOLLOW, &st); err != nil {
		return "", err
	}
	old := r.snaps[a[0]]
	what := "none"
	switch {
	case st.Mtime != old.Mtime && st.Ctime != old.Ctime:
		what = "mtime,ctime"
	case st.Mtime != old.Mtime:
		what = "mtime"
	case st.Ctime != old.Ctime:
		what = "ctime"
	}
	return what, nil
}

func (r *runner) access(a []string) (string, error) {
	return "", unix.Faccessat2(unix.AT_FDCWD, r.path(a[0]), uint32(lookupWord(accessModes, a[1])), unix.AT_EACCESS)
}

// list shows what getdents64 returns, sorted, with the types.
func (r *runner) list(a []string) (string, error) {
	fd, err := unix.Open(r.path(a[0]), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	entries, err := getdents(fd)
	if err != nil {
		return "", err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, fmt.Sprintf("%s/%d", shortName(e.name), e.typ))
	}
	slices.Sort(names)
	if len(names) > 30 {
		return fmt.Sprintf("%d names %s", len(names), digest([]byte(strings.Join(names, " ")))), nil
	}
	return strings.Join(names, " "), nil
}

// A dirent is one entry of getdents64(2).
type dirent struct {
	name string
	typ  byte
}

// getdents reads all entries from the current position of fd.
func getdents(fd int) ([]dirent, error) {
	const header = 19 // d_ino, d_off, d_reclen, d_type
	var list []dirent
	b := make([]byte, 64<<10)
	for {
		n, err := unix.Getdents(fd, b)
		if err != nil || n == 0 {
			return list, err
		}
		for at := 0; at < n; {
			e := b[at:n]
			size := int(binary.NativeEndian.Uint16(e[16:]))
			name, _, _ := bytes.Cut(e[header:size], []byte{0})
			list = append(list, dirent{name: string(name), typ: e[18]})
			at += size
		}
	}
}

// statfs shows the numbers that do not change while others use the disk.
func (r *runner) statfs(a []string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(r.path(a[0]), &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("bytes=%d files=%d namelen=%d", st.Blocks*uint64(st.Frsize), st.Files, st.Namelen), nil
}

func (r *runner) fallocate(a []string) (string, error) {
	m := lookupWord(allocModes, a[1])
	if m == unix.FALLOC_FL_PUNCH_HOLE {
		m |= unix.FALLOC_FL_KEEP_SIZE
	}
	return "", unix.Fallocate(r.files[a[0]], uint32(m), int64(number(a[2])), int64(number(a[3])))
}

func (r *runner) seek(a []string) (string, error) {
	n, err := unix.Seek(r.files[a[0]], int64(number(a[1])), lookupWord(seekModes, a[2]))
	return strconv.FormatInt(n, 10), err
}
