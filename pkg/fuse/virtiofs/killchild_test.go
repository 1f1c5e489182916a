package virtiofs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/data"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// childEnv makes the test binary a process that serves a share. Descriptor 3 is a socket for
// reports. Descriptors 4 to 6 are the state of the file system, its data, and the State of an
// earlier process.
const childEnv = "NFSRDMAD_VIRTIOFS_TEST_CHILD"

// A childOrder is the value of childEnv.
type childOrder struct {
	Socket, RDMA string
	Root         []byte
	Resume       bool
	Step         string // at which the process kills itself; "" for none
	Kill         int    // number of this step
}

// A childReport is a message of the process.
type childReport struct {
	Err   string
	Ready bool // the share is served
}

// childBuffers is the number of buffers of the file system.
const childBuffers = 24

// runChild serves a share if childEnv is set.
func runChild() {
	text := os.Getenv(childEnv)
	if text == "" {
		return
	}
	selfcheck.Enable()
	var o childOrder
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		err = serveChild(&o)
	}
	if err != nil {
		report(&childReport{Err: err.Error()})
		unix.Exit(1)
	}
	select {}
}

func report(r *childReport, fds ...int) {
	b, _ := json.Marshal(r)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_ = unix.Sendmsg(3, b, rights, nil, 0)
}

// childState is the state of one share.
type childState struct {
	fs      *vfs.State
	buffers *membuf.Pool
	share   *State
}

func (c *childState) make() (err error) {
	if c.buffers, err = membuf.NewFilePool("data", vfs.MaxIOSize, childBuffers); err != nil {
		return err
	}
	if c.fs, err = vfs.NewState(nil, childBuffers, [16]byte{1}); err != nil {
		return err
	}
	c.share, err = NewState()
	return err
}

func (c *childState) send() error {
	state, err := c.fs.Descriptor()
	if err != nil {
		return err
	}
	share, err := c.share.Descriptor()
	if err != nil {
		return err
	}
	report(&childReport{}, int(state.Fd()), int(c.buffers.File().Fd()), int(share.Fd()))
	return nil
}

func (c *childState) open() (err error) {
	for {
		if c.fs, err = vfs.OpenState(os.NewFile(4, "state")); err == nil || !errors.Is(err, slotfile.ErrLocked) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err != nil {
		return err
	}
	if c.buffers, err = membuf.OpenFilePool(os.NewFile(5, "data"), vfs.MaxIOSize, c.fs.Buffers()); err != nil {
		return err
	}
	for {
		if c.share, err = OpenState(os.NewFile(6, "share")); err == nil || !errors.Is(err, slotfile.ErrLocked) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func serveChild(o *childOrder) error {
	for fd := 3; fd < 7; fd++ {
		unix.CloseOnExec(fd)
	}
	var left atomic.Int64
	left.Store(int64(o.Kill))
	atStep = func(what string) {
		if what == o.Step && left.Add(-1) == 0 {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	var c childState
	var err error
	if o.Resume {
		err = c.open()
	} else if err = c.make(); err == nil {
		err = c.send()
	}
	if err != nil {
		return err
	}
	addr, err := netip.ParseAddrPort(o.RDMA)
	if err != nil {
		return err
	}
	var reserved []uint32
	for _, id := range c.fs.ReservedCalls() {
		reserved = append(reserved, id.XID)
	}
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr, Reserved: reserved})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	if err := tr.Connect(ctx); err != nil {
		return err
	}
	root, err := nfs3.NewFH(o.Root)
	if err != nil {
		return err
	}
	opts := vfs.DefaultOptions()
	opts.Guest, opts.Buffers, opts.State, opts.Settled = true, c.buffers, c.fs, tr.ReleaseReserved
	opts.Lost = func(l data.Loss) { report(&childReport{Err: fmt.Sprintf("lost data: %+v", l)}) }
	opts.Failed = func(reason string, stack []byte) {
		report(&childReport{Err: fmt.Sprintf("failed: %s\n%s", reason, stack)})
	}
	fs, err := vfs.New(ctx, nfs3.NewServer(nfs3.NewClient(tr)), root, opts)
	if err != nil {
		return err
	}
	logger := hclog.New(&hclog.LoggerOptions{Output: os.Stderr, Level: hclog.Warn})
	_, err = Listen(Config{Socket: o.Socket, FS: &waitingFS{FS: fs}, Log: logger, State: c.share,
		Options: fs.GuestOptions(logger.StandardLogger(nil))})
	if err == nil {
		report(&childReport{Ready: true})
	}
	return err
}
