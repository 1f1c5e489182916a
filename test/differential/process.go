package differential

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Process executes operations. Each process has its own open files, mappings and locks.
type Process interface {
	// Begin closes the files of the last run and prepares the next.
	Begin(r *Run) error
	// Do executes an operation on a side and returns the observed values. The first value is the
	// errno.
	Do(side int, o *Op) ([]Field, error)
}

// A Run is what processes must know about a run. Pair describes the fields.
type Run struct {
	Roots     [2]string // directories of both sides
	CloseWait time.Duration
	LikeNFS   bool
	// Show shows the differences that LikeNFS would avoid by skipping operations and by clearing
	// the set-id bits of mapped files.
	Show bool
	// ToEnd sets the offset of a file to its end after each write with O_APPEND. The kernel
	// computes the offset from the size that it knows, and another client may have changed it.
	ToEnd bool
}

// local executes operations in this process.
type local struct {
	sides [2]*side
	run   Run
	as    int  // user of the current operation
	skip  bool // both sides skip the current operation
}

func (l *local) Begin(r *Run) error {
	unix.Umask(0o022)
	for i, root := range r.Roots {
		if l.sides[i] != nil {
			l.sides[i].close()
		}
		l.sides[i] = newSide(root)
		l.sides[i].closeWait = r.CloseWait
		l.sides[i].toEnd = r.ToEnd
		l.sides[i].likeNFS = r.LikeNFS && i == 0
		l.sides[i].show = r.Show
	}
	l.run = *r
	return nil
}

func (l *local) Do(side int, o *Op) ([]Field, error) {
	if side == 0 {
		l.as, l.skip = l.user(o)
	}
	if l.skip {
		return []Field{{"errno", "skipped"}}, nil
	}
	as := *o
	as.as = l.as
	return l.sides[side].do(&as), nil
}

// user returns the user who executes an operation, and whether both sides skip the operation. The
// reference decides for both sides.
func (l *local) user(o *Op) (as int, skip bool) {
	if !l.run.LikeNFS || verbs[o.do].uses != usesFD || o.do == "close" {
		return o.as, false
	}
	w := l.sides[0]
	as = o.as
	type opened struct{ fd, opener int }
	files := []opened{{w.fds[o.fd], w.openers[o.fd]}}
	switch slot := o.off % slots; {
	case (o.do == "copyrange" || o.do == "sendfile") && slot >= 0:
		files = append(files, opened{w.fds[slot], w.openers[slot]})
	case (o.do == "mwrite" || o.do == "mread") && w.maps[o.fd].data != nil: // the slot may have another file
		files = append(files, opened{w.maps[o.fd].file, w.maps[o.fd].opener})
	}
	for _, f := range files {
		var st unix.Stat_t
		if unix.Fstat(f.fd, &st) != nil {
			skip = skip || o.do == "mwrite" || o.do == "mread"
			continue
		}
		if st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
			as = f.opener
		}
		skip = skip || o.do == "lseek" && o.flags == unix.SEEK_END && st.Mode&unix.S_IFMT == unix.S_IFDIR
		switch access := accessTo(users[f.opener], &st); {
		case locking[o.do]:
			skip = skip || access == 0
		case !unaffected[o.do]:
			skip = skip || access != readAndWrite
		}
	}
	if o.do == "sendfile" && len(files) > 1 {
		skip = skip || overlap(files[0].fd, files[1].fd, o.n)
	}
	return as, skip && !l.run.Show
}

// overlap reports whether a copy of n bytes from one descriptor to another overwrites the bytes
// that it reads.
func overlap(from, to, n int) bool {
	var a, b unix.Stat_t
	if unix.Fstat(from, &a) != nil || unix.Fstat(to, &b) != nil || a.Dev != b.Dev || a.Ino != b.Ino {
		return false
	}
	i, errFrom := unix.Seek(from, 0, unix.SEEK_CUR)
	j, errTo := unix.Seek(to, 0, unix.SEEK_CUR)
	return errFrom == nil && errTo == nil && i-j < int64(n) && j-i < int64(n)
}

// unaffected are the verbs for which a server checks no access to the data of the open file.
var unaffected = map[string]bool{"lseek": true, "fchmod": true, "fchown": true, "futimens": true, "dup": true,
	"fadvise": true, "mmap": true, "munmap": true}

// locking are the verbs for which a server checks that the user may read or write the file.
var locking = map[string]bool{"flock": true, "lock": true, "plock": true, "getlk": true}

const readAndWrite = unix.S_IROTH | unix.S_IWOTH

// accessTo returns the access that the mode of a file gives a user to its data. Every server lets
// the owner use an open file.
func accessTo(u *identity, st *unix.Stat_t) uint32 {
	switch {
	case u == root || int(st.Uid) == u.id:
		return readAndWrite
	case int(st.Gid) == u.id || slices.Contains(u.groups, st.Gid):
		return st.Mode >> 3 & readAndWrite
	}
	return st.Mode & readAndWrite
}

// A request asks a child process for one call of Process.
type request struct {
	Begin *Run // nil: Do
	Side  int
	Op    string
}

// A Child is a process that Serve runs in.
type Child struct {
	cmd   *exec.Cmd
	input io.WriteCloser
	enc   *gob.Encoder
	dec   *gob.Decoder
}

// StartChild starts a command that calls Serve with its standard input and output.
func StartChild(cmd *exec.Cmd) (*Child, error) {
	input, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &Child{cmd: cmd, input: input, enc: gob.NewEncoder(input), dec: gob.NewDecoder(output)}, nil
}

// Close ends the process.
func (c *Child) Close() error { return errors.Join(c.input.Close(), c.cmd.Wait()) }

func (c *Child) call(r *request) (fields []Field, err error) {
	if err := c.enc.Encode(r); err != nil {
		return nil, fmt.Errorf("child process: %w", err)
	}
	if err := c.dec.Decode(&fields); err != nil {
		return nil, fmt.Errorf("child process: %w", err)
	}
	return fields, nil
}

// Begin implements Process.
func (c *Child) Begin(r *Run) error {
	_, err := c.call(&request{Begin: r})
	return err
}

// Do implements Process.
func (c *Child) Do(side int, o *Op) ([]Field, error) {
	return c.call(&request{Side: side, Op: o.String()})
}

// Serve executes the operations that a Child requests, until its input ends.
func Serve(in io.Reader, out io.Writer) error {
	runtime.LockOSThread() // as a C program: our client treats the thread of a failed open differently
	defer runtime.UnlockOSThread()
	var l local
	enc, dec := gob.NewEncoder(out), gob.NewDecoder(in)
	for {
		var r request
		if err := dec.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		var fields []Field
		if r.Begin != nil {
			if err := l.Begin(r.Begin); err != nil {
				return err
			}
		} else {
			o, err := parseOp(r.Op)
			if err != nil {
				return err
			}
			if fields, err = l.Do(r.Side, &o); err != nil {
				return err
			}
		}
		if err := enc.Encode(fields); err != nil {
			return err
		}
	}
}

// An identity is a user with groups.
type identity struct {
	id     int // uid and gid
	groups []uint32
	work   chan func() // of the user's thread; nil before its first use
}

var root = &identity{}

// users execute the operations of a stream. The first one, root, also checks their results.
var users = []*identity{root, {id: 1000, groups: []uint32{1000}}, {id: 1001, groups: []uint32{1000, 1001}},
	{id: 1002, groups: manyGroups}}

// manyGroups are more groups than an RPC can carry (RFC 5531 appendix A): the RPC omits lastGroup.
var manyGroups = func() (groups []uint32) {
	for g := uint32(2001); len(groups) < 19; g++ {
		groups = append(groups, g)
	}
	return append(groups, lastGroup)
}()

const lastGroup = 3000

// run calls f on a thread with the identity. Linux keeps identities per thread. The thread exists
// until end is called. Root's calls run on the calling thread.
func (u *identity) run(f func()) {
	if u == root {
		f()
		return
	}
	if u.work == nil {
		work := make(chan func())
		u.work = work
		go func() {
			runtime.LockOSThread() // without unlock: the thread ends with the goroutine
			if err := becomeUser(u.id, u.groups); err != nil {
				fmt.Fprintf(os.Stderr, "become user %d: %v\n", u.id, err)
				os.Exit(1)
			}
			for f := range work {
				f()
			}
		}()
	}
	done := make(chan struct{})
	u.work <- func() {
		defer close(done)
		f()
	}
	<-done
}

// end ends the thread of the identity.
func (u *identity) end() {
	if u.work != nil {
		close(u.work)
		u.work = nil
	}
}

// becomeUser gives the calling thread an identity. Raw system calls do not change other threads.
func becomeUser(id int, groups []uint32) error {
	for _, c := range [][4]uintptr{
		{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(unsafe.SliceData(groups)))},
		{unix.SYS_SETRESGID, uintptr(id), uintptr(id), uintptr(id)},
		{unix.SYS_SETRESUID, uintptr(id), uintptr(id), uintptr(id)},
	} {
		if _, _, errno := unix.RawSyscall(c[0], c[1], c[2], c[3]); errno != 0 {
			return errno
		}
	}
	return nil
}
