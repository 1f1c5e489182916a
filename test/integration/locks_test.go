package integration

import (
	"context"
	"net/netip"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// A lockMount is one mount with its own lock client, as on another host.
type lockMount struct {
	dir   string
	locks *nlm.Client
}

func (m *lockMount) file() string { return filepath.Join(m.dir, "file") }

// A lockExport is an export that lockMounts mount.
type lockExport struct {
	rdma    netip.AddrPort
	export  mountd.Args
	caller  string
	service *nlm.Service
}

func (e *lockExport) mount(t *testing.T, change func(*vfs.Options, *nlm.Config)) *lockMount {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	args := e.export
	args.Cred = &sunrpc.AuthSys{Machine: "test"}
	root, err := mountd.Mount(ctx, args)
	kit.Must(t, err)
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: e.rdma})
	kit.Must(t, err)
	t.Cleanup(func() { tr.Close() })
	kit.Must(t, tr.Connect(ctx))
	m := &lockMount{}
	opts := vfs.DefaultOptions()
	var fs *vfs.FS
	cfg := nlm.Config{Host: args.Host, MountPort: args.Port, MountPortFirst: true, Caller: e.caller,
		Service: e.service, Lost: func(fh nfs3.FH, _ nlm.Owner) { fs.LockLost(fh) }}
	if change != nil {
		change(&opts, &cfg)
	}
	m.locks = nlm.New(cfg)
	t.Cleanup(m.locks.Close)
	opts.Locks = m.locks
	if fs, err = vfs.New(ctx, nfs3.NewServer(nfs3.NewClient(tr)), root.FH, opts); err != nil {
		t.Fatal(err)
	}
	m.dir = mounts.Mount(t, fs, args.Host+":"+args.Export)
	return m
}

// serveLocks runs the embedded server.
func serveLocks(t *testing.T) *lockExport {
	t.Helper()
	return lockExportOf(t, serve(t, nfsserve.Config{Dir: t.TempDir()}))
}

func lockExportOf(t *testing.T, s *nfsserve.Server) *lockExport {
	t.Helper()
	return &lockExport{caller: "test", rdma: s.RDMAAddr, export: embedded(t, s)}
}

// TestLocksOfEmbeddedServer has no port mapper: requests that wait poll.
func TestLocksOfEmbeddedServer(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	testLocks(t, serveLocks(t))
}

// TestLocksOfGanesha runs the lock manager of NFS-Ganesha on a host of the server, with a port
// mapper and a status monitor there. The server grants blocked locks by callback.
func TestLocksOfGanesha(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	g := ganesha.Start(t, t.TempDir(), ganesha.OwnHost())
	front := serve(t, nfsserve.Config{Backend: g.Addr()})
	service := nlm.NewService(nlm.ServiceConfig{Listen: ganesha.ClientAddr + ":0"})
	t.Cleanup(service.Close)
	e := &lockExport{rdma: front.RDMAAddr, export: mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export},
		service: service, caller: ganesha.ClientAddr}
	a, b := testLocks(t, e)
	if a.locks.Counters.Callbacks.Load()+b.locks.Counters.Callbacks.Load() == 0 {
		t.Errorf("the server granted no lock by callback; %s", service.Status())
	}
}

// testLocks runs the cases that every server passes, with two processes on two mounts.
func testLocks(t *testing.T, e *lockExport) (a, b *lockMount) {
	a, b = e.mount(t, nil), e.mount(t, nil)
	for _, x := range []struct {
		name     string
		oneMount bool // both processes use the mount a
		run      func(t *testing.T, a, b *lockMount, p, q *lockProcess)
	}{
		{"ranges", false, lockScript(rangesScript)},
		{"same mount", true, lockScript(sameMountScript)},
		{"flock", false, lockScript(flockScript)},
		{"coherence", false, lockScript(coherenceScript)},
		{"wait", false, testLockWaits},
		{"signal", false, testSignalCancels},
		{"upgrade canceled", false, testCanceledUpgradeKeepsLock},
	} {
		t.Run(x.name, func(t *testing.T) {
			p, q := startLockProcess(t), startLockProcess(t)
			if x.oneMount {
				open2(a, a, p, q)
			} else {
				open2(a, b, p, q)
			}
			x.run(t, a, b, p, q)
			p.kill()
			q.kill()
			for _, m := range []*lockMount{a, b} {
				kit.Eventually(t, "release of all locks", func() bool { return m.locks.Counters.Held.Load() == 0 })
			}
		})
	}
	return a, b
}

func open2(a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "open 1 %s", a.file())
	q.do("ok", "open 1 %s", b.file())
}

// waits returns when a request of the mount waits for another client.
func (m *lockMount) waits(t *testing.T) {
	t.Helper()
	kit.Eventually(t, "a pending lock", func() bool { return m.locks.Counters.Pending.Load() == 1 })
}

func testLockWaits(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	q.send("wait 1 w 0 0")
	b.waits(t)
	p.do("ok", "set 1 u 0 0")
	q.ends("ok", "waiting lock")
	p.do("EAGAIN", "set 1 r 0 0")
	p.send("flock 1 waitex")
	a.waits(t)
	q.kill()
	p.ends("ok", "waiting flock")
}

// testSignalCancels kills a process that waits. Its request must not get the lock later.
func testSignalCancels(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 w 0 0")
	q.send("wait 1 w 0 0")
	b.waits(t)
	q.kill()
	kit.Eventually(t, "no pending lock", func() bool { return b.locks.Counters.Pending.Load() == 0 })
	p.do("ok", "set 1 u 0 0")
	r := startLockProcess(t)
	r.do("ok", "open 1 %s", a.file())
	r.eventually("ok", "set 1 w 0 0")
	r.do("ok", "set 1 u 0 0")
	r.kill()
}

// testCanceledUpgradeKeepsLock sends a harmless signal to a process that holds a shared lock and
// waits for an exclusive one.
func testCanceledUpgradeKeepsLock(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	p.do("ok", "set 1 r 0 100")
	q.do("ok", "set 1 r 0 100")
	q.send("wait 1 w 0 50")
	b.waits(t)
	canceled := b.locks.Counters.Canceled.Load()
	// Go's runtime handles the signal with SA_RESTART: the kernel sends the request again.
	kit.Must(t, q.cmd.Process.Signal(syscall.SIGURG))
	kit.Eventually(t, "a canceled request", func() bool { return b.locks.Counters.Canceled.Load() > canceled })
	b.waits(t)
	p.do("EAGAIN", "set 1 w 0 100") // q still has its shared lock
	p.do("ok", "set 1 u 0 100")
	q.ends("ok", "upgrade")
	p.do("EAGAIN", "set 1 r 0 50")
	p.do("ok", "set 1 r 50 50")
}
