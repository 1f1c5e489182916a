package integration

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// A restartable is an embedded server that can be stopped and started with its ports and state.
type restartable struct {
	t   *testing.T
	cfg nfsserve.Config
	s   *nfsserve.Server
}

func startRestartable(t *testing.T) *restartable {
	t.Helper()
	r := &restartable{t: t, cfg: nfsserve.Config{Dir: t.TempDir(), RDMAListen: "127.0.0.1:0", NoRootSquash: true,
		StateDir: t.TempDir(), Provider: softiwarp.New(softiwarp.Config{})}}
	r.start()
	r.cfg.RDMAListen, r.cfg.TCPListen = r.s.RDMAAddr.String(), r.s.TCPAddr
	t.Cleanup(r.stop)
	return r
}

func (r *restartable) start() {
	r.t.Helper()
	// The old connections may still hold the port.
	kit.Eventually(r.t, "server at the old address", func() (ok bool) {
		var err error
		r.s, err = nfsserve.Run(r.t.Context(), r.cfg)
		return err == nil
	})
}

func (r *restartable) stop() {
	if err := r.s.Close(); err != nil {
		r.t.Errorf("close server: %v", err)
	}
}

// TestLocksSurviveServerRestart restarts the server while a process has locks. New locks wait until
// the grace period ends, and then find the old locks.
func TestLocksSurviveServerRestart(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	r := startRestartable(t)
	e := lockExportOf(t, r.s)
	a, b := e.mount(t, nil), e.mount(t, nil)
	p, q := startLockProcess(t), startLockProcess(t)
	open2(a, b, p, q)
	p.do("ok", "set 1 w 0 10")
	p.do("ok", "set 1 r 20 10")
	r.stop()
	r.cfg.LockGrace = 5 * time.Second
	r.start()
	// The new locks wait for the end of the grace period, and for the client to reclaim the old
	// locks of the file. If it connects later, the server grants these again as new ones.
	p.do("ok", "set 1 r 40 1")
	p.do("ok", "set 1 r 41 1")
	q.do("EAGAIN", "set 1 w 5 1")
	q.do("EAGAIN", "set 1 w 20 1")
	q.do("ok", "set 1 r 20 1")
	p.do("ok", "write 1 text")
	p.do("ok", "set 1 u 0 0")
	q.do("ok", "set 1 w 0 0")
	if lost := a.locks.Counters.Lost.Load() + b.locks.Counters.Lost.Load(); lost != 0 {
		t.Errorf("%d locks were lost", lost)
	}
}

// lockPort returns a change of a mount that makes it use relay for its locks.
func lockPort(relay *kit.Relay) func(*vfs.Options, *nlm.Config) {
	return func(_ *vfs.Options, c *nlm.Config) { c.Port = int(relay.Addr().Port()) }
}

// TestStolenLockFailsIO lets another client take locks while their holders cannot reach the
// restarted server. I/O of a holder fails until it unlocks or closes the file.
func TestStolenLockFailsIO(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	server := startRestartable(t)
	e, relay := lockExportOf(t, server.s), kit.StartRelay(t, server.s.TCPAddr, kit.RelayOptions{})
	a, b := e.mount(t, lockPort(relay)), e.mount(t, nil)
	// The processes end before the mounts: cleanups run in reverse order.
	p, q, closes, other := startLockProcess(t), startLockProcess(t), startLockProcess(t), startLockProcess(t)
	open2(a, b, p, q)
	open2(a, a, closes, other)
	p.do("ok", "set 1 w 0 10")
	p.do("ok", "set 1 w 100 10")
	closes.do("ok", "set 1 w 10 10")
	p.do("ok", "write 1 old")
	p.do(`"old"`, "read 1")
	p.do("ok", "open 2 %s", a.file())

	relay.Stop()
	server.stop()
	server.cfg.LockGrace = time.Nanosecond
	server.start()
	q.eventually("ok", "set 1 w 0 20")
	relay.Start()
	kit.Eventually(t, "two lost locks", func() bool { return a.locks.Counters.Lost.Load() == 2 })

	p.do("EIO", "write 1 new")
	p.eventually("EIO", "read 1") // the kernel discards its pages after the lock counts as lost
	p.do("EIO", "set 1 w 50 1")
	closes.do("EIO", "write 1 new")
	other.do(`"old"`, "read 1")     // a process without a lock
	q.do("EAGAIN", "set 1 w 100 1") // this lock was not lost
	p.do("ok", "set 1 u 0 10")
	p.do(`"old"`, "read 1")
	p.do("ok", "write 1 new")
	p.do("EAGAIN", "set 1 w 0 1")
	closes.do("ok", "close 1")
	closes.do("ok", "open 1 %s", a.file())
	closes.do("ok", "write 1 new")
	closes.do("EAGAIN", "set 1 w 10 1")
	q.do("ok", "set 1 u 0 20")
	p.do("ok", "set 1 w 0 1")
}

// TestLocalLocks leaves one kind of locks to the kernel.
func TestLocalLocks(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	e := serveLocks(t)
	for _, x := range []struct {
		name         string
		posix, flock bool
		set, lock    string // results for a second mount
	}{
		{"none", false, false, "EAGAIN", "EAGAIN"},
		{"posix", true, false, "ok", "EAGAIN"},
		{"flock", false, true, "EAGAIN", "ok"},
		{"all", true, true, "ok", "ok"},
	} {
		t.Run(x.name, func(t *testing.T) {
			change := func(o *vfs.Options, _ *nlm.Config) { o.LocalPosix, o.LocalFlock = x.posix, x.flock }
			a, b := e.mount(t, change), e.mount(t, change)
			p, q := startLockProcess(t), startLockProcess(t)
			open2(a, b, p, q)
			p.do("ok", "set 1 w 0 10")
			q.do(x.set, "set 1 w 0 10")
			p.do("ok", "set 1 u 0 10")
			q.do("ok", "set 1 u 0 10")
			p.do("ok", "flock 1 ex")
			q.do(x.lock, "flock 1 ex")
			q.do("ok", "open 2 %s", a.file())
			q.do("EAGAIN", "flock 2 ex") // on one mount the locks hold in any case
			p.kill()
			q.kill()
		})
	}
}

// statusHost runs rpcbind and rpc.statd in the network namespace of the test. It returns the state
// directory of rpc.statd, and a function that restarts rpc.statd with another state number.
func statusHost(t *testing.T) (dir string, restart func()) {
	t.Helper()
	kit.NeedsPrograms(t, "rpcbind", "rpc.statd", "sm-notify", "ip")
	dir = t.TempDir() // which the user of rpc.statd must reach
	kit.Must(t, os.Chmod(filepath.Dir(dir), 0o755))
	run(t, "", "mount", "-t", "tmpfs", "tmpfs", "/run")
	run(t, "", "sh", "-c", "ip link set lo up; mkdir -p /run/rpcbind "+dir+"/sm "+dir+"/sm.bak; "+
		"chown _rpc /run/rpcbind; chmod 755 "+dir+"; chown -R statd "+dir)
	start(t, "rpcbind", "-f")
	args := mountd.Args{Host: "127.0.0.1", Timeout: kit.Timeout}
	registered := func(program, version uint32) func() bool {
		return func() bool { _, err := mountd.GetPort(t.Context(), args, program, version); return err == nil }
	}
	kit.Eventually(t, "rpcbind", registered(100000, 2))
	monitor := func() *exec.Cmd {
		cmd := start(t, "rpc.statd", "-F", "-L", "-P", dir)
		kit.Eventually(t, "rpc.statd", registered(100024, 1))
		return cmd
	}
	statd := monitor()
	return dir, func() {
		kit.Must(t, statd.Process.Signal(syscall.SIGTERM)) // it withdraws its registration
		_ = statd.Wait()
		kit.Eventually(t, "end of the registration", func() bool { return !registered(100024, 1)() })
		run(t, "", "sh", "-c", "printf '\\7\\0\\0\\0' >"+dir+"/state")
		statd = monitor()
	}
}

func start(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	kit.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// TestStatusMonitorReportsRestart lets rpc.statd monitor the server. sm-notify of the server then
// reports a restart to rpc.statd, which calls the lock service of this process.
func TestStatusMonitorReportsRestart(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	dir, restartMonitor := statusHost(t)
	service := nlm.NewService(nlm.ServiceConfig{Listen: "127.0.0.1:0",
		Logger: hclog.New(&hclog.LoggerOptions{Output: os.Stderr})})
	t.Cleanup(service.Close)
	e := serveLocks(t)
	e.service = service
	relay := kit.StartRelay(t, net.JoinHostPort(e.export.Host, strconv.Itoa(e.export.Port)),
		kit.RelayOptions{})
	m := e.mount(t, lockPort(relay))
	p := startLockProcess(t)
	p.do("ok", "open 1 %s", m.file())
	p.do("ok", "set 1 w 0 10")
	found, err := filepath.Glob(filepath.Join(dir, "sm", "*"))
	if err != nil || len(found) != 1 {
		t.Errorf("hosts that rpc.statd monitors: got %v, error %v; want one", found, err)
	}
	// A notice costs no lock while the lock connection, or the number of the server's monitor, shows
	// that the server has not restarted. The monitor of this host is also that of the server.
	relay.Stop()
	restartMonitor()
	relay.Start()
	// The server's host is this host. Its monitor notifies the client, which is this host, too.
	peer := t.TempDir()
	const host = "0100007f 000186b5 00000003 00000010 00000000000000000000000000000000 127.0.0.1 127.0.0.1"
	run(t, "", "sh", "-c", "cd "+peer+" && mkdir sm sm.bak && printf '\\5\\0\\0\\0' >state && "+
		"echo '"+host+"' >sm/127.0.0.1 && chmod 755 . && chown -R statd .")
	run(t, "", "sm-notify", "-f", "-v", "127.0.0.1", "-P", peer)
	// The server has no grace period, so that the lock cannot be reclaimed.
	kit.Eventually(t, "a lost lock", func() bool { return m.locks.Counters.Lost.Load() == 1 })
	p.do("EIO", "write 1 text")
	p.kill()
}
