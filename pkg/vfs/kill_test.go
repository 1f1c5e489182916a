package vfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const killBufferSize, killBuffers = 8 << 10, 8

// errKilled is the result of the calls of a killed process.
var errKilled = errors.New("the process is killed")

// A killMode says how a process is killed, and what the server keeps.
type killMode struct {
	name  string
	kills int  // number of processes that are killed in a row, each at the same event
	cache bool // the server has a duplicate request cache
}

// A keptMount is an FS with a State. The test makes its requests. A kill at an event copies the files
// of the State and of the buffers, and ends all calls of the FS: the server and the copies have what
// they have when a process is killed there. The next FS uses the copies.
type keptMount struct {
	t      *testing.T
	e      *export
	conn   transport
	mode   killMode
	event  int               // at which a process is killed, counted from 1
	cached map[uint32][]byte // duplicate request cache: replies by XID

	fs      *FS
	state   *State
	pool    *membuf.Pool
	unique  uint64
	replied bool // the kernel has the reply to the last request

	mu     sync.Mutex
	xid    uint32
	armed  bool
	count  int // events of this process
	kills  int
	killed bool // this process
	last   string
	copies [2]*os.File // of State and buffers

	onKill func()                     // called before the next process starts, if not nil
	refuse func(*sunrpc.Message) bool // the server refuses these calls with NFS3ERR_ACCES, if not nil
}

// newKeptMount starts the first process.
func newKeptMount(t *testing.T, e *export, conn transport, mode killMode, event int) *keptMount {
	t.Helper()
	x := &keptMount{t: t, e: e, conn: conn, mode: mode, event: event, cached: make(map[uint32][]byte)}
	recordChanged = func() { x.alive("change of a record") }
	pool, err := membuf.NewFilePool("test", killBufferSize, killBuffers)
	must(t, err)
	state, err := NewState([]byte("test"), killBuffers, [16]byte{1})
	must(t, err)
	must(t, x.start(state, pool))
	return x
}

func (x *keptMount) start(state *State, pool *membuf.Pool) (err error) {
	opts := DefaultOptions()
	opts.State, opts.Buffers, opts.DirtyExpire = state, pool, 0
	x.state, x.pool = state, pool
	x.fs, err = New(x.t.Context(), nfs3.NewServer(nfs3.NewClient(x)), x.e.root, opts)
	return err
}

// alive counts an event. It returns false if the process has been killed.
func (x *keptMount) alive(event string) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.killed || !x.armed || x.kills == x.mode.kills {
		return !x.killed
	}
	if x.count++; x.count < x.event {
		return true
	}
	x.killed, x.last = true, event
	x.kills++
	state, err := x.state.Descriptor()
	must(x.t, err)
	defer state.Close()
	x.copies = [2]*os.File{copyMemory(x.t, state), copyMemory(x.t, x.pool.File())}
	return false
}

func (x *keptMount) isKilled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.killed
}

// copyMemory copies a shared memory file. No goroutine may change the file meanwhile.
func copyMemory(t *testing.T, f *os.File) *os.File {
	t.Helper()
	st, err := f.Stat()
	must(t, err)
	data := dataOf(t, f)
	for again := dataOf(t, f); ; again = dataOf(t, f) {
		if bytes.Equal(data, again) {
			break
		}
		data = again
	}
	fd, err := membuf.CreateFile("copy", st.Size(), membuf.Sealed)
	must(t, err)
	at := int64(0)
	for len(data) > 0 {
		n := 0
		at, n = nextData(t, f, at)
		n = min(n, len(data))
		_, err := unix.Pwrite(fd, data[:n], at)
		must(t, err)
		data, at = data[n:], at+int64(n)
	}
	return os.NewFile(uintptr(fd), "copy")
}

// nextData returns the place and size of the next part of a file that has memory.
func nextData(t *testing.T, f *os.File, from int64) (at int64, n int) {
	t.Helper()
	at, err := unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
	if err == unix.ENXIO {
		return from, 0
	}
	must(t, err)
	end, err := unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
	must(t, err)
	return at, int(end - at)
}

func dataOf(t *testing.T, f *os.File) (data []byte) {
	t.Helper()
	for at, n := nextData(t, f, 0); n > 0; at, n = nextData(t, f, at+int64(n)) {
		b := make([]byte, n)
		_, err := unix.Pread(int(f.Fd()), b, at)
		must(t, err)
		data = append(data, b...)
	}
	return data
}

// Call counts an event before and after a call to the server.
func (x *keptMount) Call(ctx context.Context, m *sunrpc.Message) error {
	if !x.alive(fmt.Sprint("before ", nfs3.Proc(m.Proc))) {
		return errKilled
	}
	id, repeated := sunrpc.KeptCall(ctx, m)
	x.mu.Lock()
	if !repeated {
		x.xid++
		id = sunrpc.CallID{Conn: 1, XID: x.xid}
	}
	reply := x.cached[id.XID]
	x.mu.Unlock()
	sunrpc.KeepCall(ctx, m, id)
	if !x.alive("KeepCall") {
		return errKilled
	}
	if x.refuse != nil && x.refuse(m) {
		must(x.t, status(nfs.ErrAcces)(ctx, m, nil))
	} else if repeated && reply != nil && x.mode.cache {
		m.Result = append(m.Result[:0], reply...)
	} else if err := x.conn.Call(struct{ context.Context }{ctx}, m); err != nil { // not a CallKeeper
		return err
	}
	x.mu.Lock()
	if m.Once {
		x.cached[id.XID] = bytes.Clone(m.Result)
	}
	x.mu.Unlock()
	if !x.alive(fmt.Sprint("after ", nfs3.Proc(m.Proc))) {
		return errKilled
	}
	return nil
}

// restart ends the killed process and starts the next one, to which the kernel sends the pending
// requests again.
func (x *keptMount) restart(pending ...uint64) {
	x.t.Helper()
	for x.isKilled() {
		x.end()
		if x.onKill != nil {
			x.onKill()
		}
		x.mu.Lock()
		x.killed, x.count = false, 0
		x.mu.Unlock()
		state, err := OpenState(x.copies[0])
		must(x.t, err)
		pool, err := membuf.OpenFilePool(x.copies[1], killBufferSize, killBuffers)
		must(x.t, err)
		must(x.t, errors.Join(x.copies[0].Close(), x.copies[1].Close()))
		if err := x.start(state, pool); err != nil {
			if !errors.Is(err, errKilled) {
				x.t.Fatalf("continue after a kill at %q: %v", x.last, err)
			}
			continue
		}
		for i, users := range []*fair.Limit{state.files.users, state.dirs.users, state.hidden.users} {
			if n := []int{state.files.Len(), state.dirs.Len(), state.hidden.Len()}[i]; users.Used() != n {
				x.t.Errorf("table %d: got %d records of users, want %d", i, users.Used(), n)
			}
		}
		x.fs.Resume(pending)
	}
}

// end ends the process.
func (x *keptMount) end() {
	if x.fs != nil {
		if x.isKilled() {
			x.fs.Abort()
		}
		x.fs.Close(context.Background())
	}
	must(x.t, x.state.Close())
	x.pool.Close()
}

// A killedFS is the FS of a process that can be killed around the reply to a request.
type killedFS struct {
	*FS
	x *keptMount
}

func (fs killedFS) Replied(r *kernel.Request) {
	x := fs.x
	if x.replied = x.alive("before the reply"); x.replied && x.alive("after the reply") {
		fs.FS.Replied(r)
	}
}

// do makes a request, as the kernel does: the next process gets a request that has no reply.
func do[I, O any](x *keptMount, op kernel.Op, node uint64, in I, payload string, out *O) error {
	x.t.Helper()
	x.unique += 2
	m := message(op, in, payload)
	h := (*fuse.InHeader)(unsafe.Pointer(&m.In[0]))
	h.NodeId, h.Unique = node, x.unique
	for {
		status := callMessage(killedFS{x.fs, x}, m, out)
		if x.replied {
			x.restart()
			if status == fuse.OK {
				return nil
			}
			return unix.Errno(status)
		}
		x.restart(x.unique)
		m.Resent = true
	}
}

// A killRun is one run of an operation, in a new directory.
type killRun struct {
	*keptMount
	dir   uint64
	local string // the directory on the server
	fh    uint64 // of the open file
	node  uint64 // of the open file, or of the last name
	flags uint32
}

func (r *killRun) lookup(name string) error {
	var out fuse.EntryOut
	err := do(r.keptMount, kernel.OpLookup, r.dir, fuse.InHeader{}, name+"\x00", &out)
	r.node = out.NodeId
	return err
}

func (r *killRun) open(name string, flags uint32) error {
	if err := r.lookup(name); err != nil {
		return err
	}
	var out fuse.OpenOut
	err := do(r.keptMount, kernel.OpOpen, r.node, fuse.OpenIn{Flags: flags}, "", &out)
	r.fh, r.flags = out.Fh, flags
	return err
}

func (r *killRun) create(name string, flags, mode uint32) error {
	var out fuse.CreateOut
	err := do(r.keptMount, kernel.OpCreate, r.dir, fuse.CreateIn{Flags: flags, Mode: mode}, name+"\x00", &out)
	r.node, r.fh, r.flags = out.NodeId, out.Fh, flags
	return err
}

func (r *killRun) write(off uint64, data string) error {
	in := fuse.WriteIn{Fh: r.fh, Offset: off, Size: uint32(len(data)), Flags: r.flags}
	var out fuse.WriteOut
	err := do(r.keptMount, kernel.OpWrite, r.node, in, data, &out)
	if err == nil && out.Size != in.Size {
		r.t.Errorf("write: got %d bytes, want %d", out.Size, in.Size)
	}
	return err
}

func (r *killRun) fsync() error {
	return do(r.keptMount, kernel.OpFsync, r.node, fuse.FsyncIn{Fh: r.fh}, "", none)
}

// close makes the requests of close(2).
func (r *killRun) close() error {
	fh := r.fh
	if fh == 0 {
		return nil
	}
	r.fh = 0
	return errors.Join(do(r.keptMount, kernel.OpFlush, r.node, fuse.FlushIn{Fh: fh}, "", none),
		do(r.keptMount, kernel.OpRelease, r.node, fuse.ReleaseIn{Fh: fh}, "", none))
}

func (r *killRun) rename(from, to string) error {
	return do(r.keptMount, kernel.OpRename2, r.dir, fuse.RenameIn{Newdir: r.dir}, from+"\x00"+to+"\x00", none)
}

func (r *killRun) unlink(name string) error {
	return do(r.keptMount, kernel.OpUnlink, r.dir, fuse.InHeader{}, name+"\x00", none)
}

func (r *killRun) setAttr(in fuse.SetAttrIn) error {
	return do(r.keptMount, kernel.OpSetAttr, r.node, in, "", none)
}

// put makes a file on the server.
func (r *killRun) put(name, content string) {
	must(r.t, os.WriteFile(filepath.Join(r.local, name), []byte(content), 0o644))
}

// content returns the names in the directory on the server, with what they stand for.
func (r *killRun) content() map[string]string {
	entries, err := os.ReadDir(r.local)
	must(r.t, err)
	all := make(map[string]string)
	for _, e := range entries {
		path := filepath.Join(r.local, e.Name())
		switch e.Type() {
		case 0:
			b, err := os.ReadFile(path)
			must(r.t, err)
			all[e.Name()] = string(b)
		case os.ModeSymlink:
			all[e.Name()], err = os.Readlink(path)
			must(r.t, err)
		default:
			all[e.Name()] = e.Type().String()
		}
	}
	return all
}
