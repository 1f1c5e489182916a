package virtiofs

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// killsEnv is the number of kills of each test; the default is small.
const killsEnv = "NFSRDMAD_VIRTIOFS_KILLS"

func kills(t *testing.T, few int) int {
	n, err := strconv.Atoi(os.Getenv(killsEnv))
	if err != nil {
		return few
	}
	t.Logf("%d kills", n)
	return n
}

// A keptShare is a share that several processes serve, one after the other. The test keeps the
// descriptors, as a descriptor store does.
type keptShare struct {
	t     *testing.T
	dir   string // on the server
	order childOrder
	kept  []*os.File
	plan  func(kill int) killPlan
	kills atomic.Int64

	stopped chan struct{}
	ended   chan struct{}
}

// A killPlan says when a process is killed: at a step, when it comes the given number of times.
type killPlan struct {
	step  string
	count int
}

// newKeptShare serves a share by processes that are killed as planned, n times. The last one stays
// until the test ends.
func newKeptShare(t *testing.T, n int, plan func(kill int) killPlan) *keptShare {
	t.Helper()
	s := &keptShare{t: t, dir: t.TempDir(), plan: plan, stopped: make(chan struct{}),
		ended: make(chan struct{})}
	server, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: s.dir, RDMAListen: "127.0.0.1:0",
		TCPListen: "127.0.0.1:0", StateDir: t.TempDir(), NoRootSquash: true,
		Provider: softiwarp.New(softiwarp.Config{})})
	kit.Must(t, err)
	t.Cleanup(func() { _ = server.Close() })
	host, port, err := net.SplitHostPort(server.TCPAddr)
	kit.Must(t, err)
	number, err := strconv.Atoi(port)
	kit.Must(t, err)
	root, err := mountd.Mount(context.Background(), mountd.Args{Host: host, Port: number, Export: s.dir,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	kit.Must(t, err)
	s.order = childOrder{Socket: filepath.Join(t.TempDir(), "s"), RDMA: server.RDMAAddr.String(), Root: root.FH.Bytes()}
	ready := make(chan struct{})
	go s.run(n, ready)
	t.Cleanup(func() {
		close(s.stopped)
		<-s.ended
		for _, f := range s.kept {
			_ = f.Close()
		}
	})
	select {
	case <-ready:
	case <-time.After(kit.Timeout):
		t.Fatal("the first process does not serve the share")
	}
	return s
}

// run runs one process after the other. The first one lives until the VMM is connected.
func (s *keptShare) run(n int, ready chan struct{}) {
	defer close(s.ended)
	s.process(killPlan{}, func() {
		close(ready)
		select {
		case <-s.connected():
		case <-s.stopped:
		}
	})
	for kill := range n {
		if !s.process(s.plan(kill), nil) {
			return
		}
		s.kills.Add(1)
	}
	s.process(killPlan{}, func() { <-s.stopped })
}

// connected returns a channel that is closed when a file of the guest is on the server.
func (s *keptShare) connected() <-chan struct{} {
	c := make(chan struct{})
	go func() {
		defer close(c)
		for {
			if _, err := os.Lstat(filepath.Join(s.dir, "begin")); err == nil {
				return
			}
			select {
			case <-s.stopped:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	return c
}

// process runs one process as planned, or until the return of alive, which is called when the share
// is served. It reports false at the end of the test.
func (s *keptShare) process(plan killPlan, alive func()) bool {
	o := s.order
	o.Step, o.Kill, o.Resume = plan.step, plan.count, s.kept != nil
	text, err := json.Marshal(&o)
	kit.Must(s.t, err)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	kit.Must(s.t, err)
	defer unix.Close(fds[0])
	other := os.NewFile(uintptr(fds[1]), "reports")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = append([]*os.File{other}, s.kept...)
	kit.Must(s.t, cmd.Start())
	_ = other.Close()
	var reports sync.WaitGroup
	reports.Go(func() { s.receive(fds[0], alive, cmd) })
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()
	stopped := false
	select {
	case <-exited:
	case <-s.stopped:
		stopped = true
	}
	_ = cmd.Process.Kill()
	<-exited
	reports.Wait()
	return !stopped
}

// receive receives the reports of a process.
func (s *keptShare) receive(fd int, alive func(), cmd *exec.Cmd) {
	b, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4*3))
	for {
		n, oobn, _, _, err := unix.Recvmsg(fd, b, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if n == 0 || err != nil {
			return
		}
		var r childReport
		kit.Must(s.t, json.Unmarshal(b[:n], &r))
		kept, err := parseRights(oob[:oobn])
		kit.Must(s.t, err)
		for _, fd := range kept {
			s.kept = append(s.kept, os.NewFile(uintptr(fd), "kept"))
		}
		switch {
		case r.Err != "":
			s.t.Errorf("process: %s", r.Err)
		case r.Ready && alive != nil:
			alive()
			_ = cmd.Process.Kill()
		}
	}
}
