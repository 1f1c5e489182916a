package fusefs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/front"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// takeoverEnv makes the test binary run as another process of a takeover test: "server" or
	// "programs". Its control socket is descriptor 3.
	takeoverEnv = "NFSRDMAD_FUSEFS_TEST_PROCESS"
	// takeoverHelper makes the test binary run as the helper for notifications.
	takeoverHelper = "takeover-helper"
	// takeoverBuffer and takeoverBuffers are the size in bytes and the number of buffers.
	takeoverBuffer, takeoverBuffers = 64 << 10, 64
)

// takeoverProcess runs another process of a takeover test, if this is one.
func takeoverProcess() (is bool) {
	if len(os.Args) > 1 && os.Args[1] == takeoverHelper {
		exitTakeover(front.RunHelper())
	}
	mode := os.Getenv(takeoverEnv)
	if mode == "" {
		return false
	}
	unix.CloseOnExec(3)
	c, err := newControl(os.NewFile(3, "control"))
	if err == nil && mode == "server" {
		err = serveTakeover(c)
	} else if err == nil {
		err = runPrograms(c)
	}
	exitTakeover(err)
	return true
}

func exitTakeover(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		unix.Exit(1)
	}
	unix.Exit(0) // os.Exit waits for 1 s with the race detector
}

// A control is the socket between the test and one of its processes. Each message is JSON.
type control struct{ conn *net.UnixConn }

// newControl takes over f.
func newControl(f *os.File) (*control, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return &control{c.(*net.UnixConn)}, nil
}

func (c *control) send(v any, files ...*os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_, _, err = c.conn.WriteMsgUnix(b, rights, nil)
	return err
}

func (c *control) receive(v any) (files []*os.File, err error) {
	b, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := c.conn.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, net.ErrClosed
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "kept"))
		}
	}
	return files, errors.Join(err, json.Unmarshal(b[:n], v))
}

// A serveOrder is a message to a server process.
type serveOrder struct {
	Do string // "new", "resume", "arm", "disarm", "report" or "unmount"
	// for new and resume
	Dir       string
	Root      []byte
	RDMA, TCP string // address of the server: one of them
	LockPort  int    // TCP port of MOUNT, if the server keeps the locks
	// Kill is the number of the event at which the process kills itself; 0 for none. Records counts
	// changes of records as events.
	Kill    int
	Records bool
}

// A serveReport is a message of a server process.
type serveReport struct {
	Err    string
	Killed string // event at which the process kills itself now

	Tables  map[string]int
	Out     int // buffers in use
	Files   int // open files and directories
	Inodes  int // without the root
	Settled bool
}

// A killer ends the process at an event.
type killer struct {
	control *control
	state   *State
	left    atomic.Int64 // events before the end; 0 or less if none
	records atomic.Bool
	ending  atomic.Bool // the process ends soon
}

func (k *killer) arm(o *serveOrder) {
	k.records.Store(o.Records)
	k.left.Store(int64(o.Kill))
}

// at counts an event.
func (k *killer) at(format string, args ...any) {
	if k.count() {
		k.kill(fmt.Sprintf(format, args...))
	}
}

// count reports whether the process has to end now.
func (k *killer) count() bool { return k.left.Load() > 0 && k.left.Add(-1) == 0 }

func (k *killer) kill(event string) {
	_ = k.control.send(&serveReport{Killed: event})
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}

// replyTime is longer than the kernel takes to get a reply.
const replyTime = 20 * time.Millisecond

// observe is Options.Observe. It counts two events: before the reply to the kernel, and between the
// reply and FS.Replied.
func (k *killer) observe(s Sample) {
	k.at("before the reply to %v", s.Op)
	if k.count() {
		k.ending.Store(true)
		k.state.mu.Lock() // Replied waits
		time.AfterFunc(replyTime, func() { k.kill(fmt.Sprintf("after the reply to %v", s.Op)) })
	}
}

func (k *killer) record() {
	if k.records.Load() {
		k.at("after the change of a record")
	}
}

// A killCaller counts two events for each call.
type killCaller struct {
	transport
	killer *killer
	// keeps is true for a transport that does not keep XIDs. The server then executes repeated
	// calls twice, as one that has lost its duplicate request cache.
	keeps bool
}

func (c *killCaller) Call(ctx context.Context, m *sunrpc.Message) error {
	c.killer.at("before call %d", m.Proc)
	if c.keeps {
		sunrpc.KeepCall(ctx, m, sunrpc.CallID{Conn: 1})
	}
	err := c.transport.Call(ctx, m)
	if err != nil {
		fmt.Fprintf(os.Stderr, "call %d of a server process: %v\n", m.Proc, err)
	}
	c.killer.at("after call %d", m.Proc)
	return err
}

// A takeoverServer is what a server process has.
type takeoverServer struct {
	control *control
	killer  *killer
	state   *State
	pool    *membuf.Pool
	conn    transport
	locks   *nlm.Client // nil if the kernel keeps the locks
	fs      *FS
	srv     *Server
	settled atomic.Bool
}

// serveTakeover serves a mount, as the daemon does.
func serveTakeover(c *control) error {
	s := &takeoverServer{control: c, killer: &killer{control: c}}
	recordChanged = s.killer.record
	var o serveOrder
	files, err := c.receive(&o)
	if err != nil {
		return err
	}
	if err := s.begin(&o, files); err != nil {
		return c.send(&serveReport{Err: err.Error()})
	}
	if err := c.send(&serveReport{}); err != nil {
		return err
	}
	for {
		var o serveOrder
		if _, err := c.receive(&o); err != nil {
			return err
		}
		switch o.Do {
		case "arm":
			s.killer.arm(&o)
		case "disarm":
			if s.killer.left.Store(0); s.killer.ending.Load() {
				select {}
			}
		case "unmount":
			if err := s.unmount(); err != nil {
				return c.send(&serveReport{Err: err.Error()})
			}
		}
		if err := c.send(s.report()); err != nil || o.Do == "unmount" {
			return err
		}
	}
}

func (s *takeoverServer) report() *serveReport {
	r := &serveReport{Out: s.pool.Out(), Inodes: s.fs.Inodes() - 1, Settled: s.settled.Load()}
	s.fs.handles.Lock()
	r.Files = len(s.fs.handles.files) + len(s.fs.handles.dirs) + s.fs.inodes.openFiles()
	s.fs.handles.Unlock()
	st := s.state
	r.Tables = map[string]int{"mount": st.mount.Len(), "nodes": st.nodes.Len(), "files": st.files.Len(),
		"dirs": st.dirs.Len(), "hidden": st.hidden.Len(), "extents": st.extents.Len(), "requests": st.requests.Len(),
		"owners": st.owners.Len()}
	for _, name := range []string{"lockowners", "lockranges"} {
		r.Tables[name] = st.file.Table(name).Len()
	}
	return r
}

func (s *takeoverServer) begin(o *serveOrder, files []*os.File) error {
	err := s.openState(files)
	if err != nil {
		return err
	}
	s.killer.state = s.state
	s.killer.arm(o)
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	if err := s.dial(ctx, o); err != nil {
		return err
	}
	root, err := nfs3.NewFH(o.Root)
	if err != nil {
		return err
	}
	caller := &killCaller{transport: s.conn, killer: s.killer, keeps: o.TCP != ""}
	opts := DefaultOptions()
	opts.Writeback = os.Getenv(takeoverWritebackEnv) != ""
	opts.State, opts.Buffers, opts.Observe, opts.ACL = s.state, s.pool, s.killer.observe, nfsacl.NewClient(caller, nil)
	opts.Lost = func(l Loss) { fmt.Fprintf(os.Stderr, "a server process lost data: %+v\n", l) }
	opts.Failed = func(reason string, stack []byte) {
		fmt.Fprintf(os.Stderr, "a server process failed: %s\n%s\n", reason, stack)
	}
	opts.Invalid = func(reason string) { fmt.Fprintf(os.Stderr, "a server process got an invalid reply: %s\n", reason) }
	if o.LockPort != 0 {
		s.locks = nlm.New(nlm.Config{Host: "127.0.0.1", MountPort: o.LockPort, MountPortFirst: true, Caller: "test",
			State: s.state.NewLocks()})
		opts.Locks = s.locks
	}
	opts.Settled = func() {
		if s.locks != nil {
			s.locks.ReleaseStale(s.fs.HasLockOwner)
		}
		if t, ok := s.conn.(*xprt.Transport); ok {
			t.ReleaseReserved()
		}
		s.settled.Store(true)
	}
	if s.fs, err = New(ctx, nfs3.NewClient(caller, nfs3.Options{}), root, opts); err != nil {
		return err
	}
	return s.mount(o, files)
}

func (s *takeoverServer) openState(files []*os.File) (err error) {
	if len(files) > 0 {
		if s.state, err = OpenState(files[0]); err == nil {
			s.pool, err = membuf.OpenFilePool(files[1], takeoverBuffer, s.state.Buffers())
		}
		return err
	}
	if s.pool, err = membuf.NewFilePool("test-data", takeoverBuffer, takeoverBuffers); err == nil {
		s.state, err = NewState([]byte("test"), takeoverBuffers, [16]byte{1, 2, 3})
	}
	return err
}

func (s *takeoverServer) dial(ctx context.Context, o *serveOrder) (err error) {
	if o.TCP != "" {
		s.conn, err = rpctcp.Dial(ctx, o.TCP, rpctcp.Options{})
		return err
	}
	addr, err := netip.ParseAddrPort(o.RDMA)
	if err != nil {
		return err
	}
	var xids []uint32
	for _, id := range s.state.ReservedCalls() {
		xids = append(xids, id.XID)
	}
	t, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr, Reserved: xids})
	if err == nil {
		s.conn, err = t, t.Connect(ctx)
	}
	return err
}

func (s *takeoverServer) mount(o *serveOrder, files []*os.File) (err error) {
	mo := MountOptions{FsName: "test:/", SkipDisablePoll: true, Mounted: s.mounted,
		KeepRequests: os.Getenv(keepRequestsEnv) != ""}
	if o.Do == "resume" {
		dev, err := front.DeviceOf(files[2])
		var mem *os.File
		if len(files) > 3 {
			mem = files[3]
		}
		if err == nil {
			err = dev.UseHelper(helperCommand())
		}
		if err == nil {
			s.srv, err = Resume(o.Dir, dev, mem, s.fs, mo)
		}
		for _, f := range files {
			_ = f.Close()
		}
		return err
	}
	p, err := OpenMountPoint(o.Dir)
	if err != nil {
		return err
	}
	defer p.Close()
	s.srv, err = MountAt(p, s.fs, mo)
	return err
}

func helperCommand() []string { return []string{"/proc/self/exe", takeoverHelper} }

// mounted is MountOptions.Mounted.
func (s *takeoverServer) mounted(dev *front.Device, mem *os.File) error {
	if err := dev.UseHelper(helperCommand()); err != nil {
		return err
	}
	state, err := s.state.Descriptor()
	if err != nil {
		return err
	}
	defer state.Close()
	fuse, err := dev.File()
	if err != nil {
		return err
	}
	defer fuse.Close()
	files := []*os.File{state, s.pool.File(), fuse}
	if mem != nil {
		files = append(files, mem)
	}
	return s.control.send(&serveReport{}, files...)
}

func (s *takeoverServer) unmount() error {
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = s.srv.Unmount(); err == nil || !strings.Contains(err.Error(), "busy") {
			break
		}
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	s.fs.Close(ctx)
	if s.locks != nil {
		s.locks.Close()
	}
	return nil
}
