package integration

import (
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
	var err error
	for range 100 { // the old connections may still hold the port
		if r.s, err = nfsserve.Run(r.t.Context(), r.cfg); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	r.t.Fatal(err)
}

func (r *restartable) stop() {
	if err := r.s.Close(); err != nil {
		r.t.Errorf("close server: %v", err)
	}
}

// TestLocksSurviveServerRestart restarts the server while a process has locks. New locks wait until
// the grace period ends, and then find the old locks.
func TestLocksSurviveServerRestart(t *testing.T) {
	if !inOwnProcess(t) {
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
	r.cfg.LockGrace = 30 * time.Second // the client reconnects within 10 seconds; a busy host needs longer
	r.start()
	eventually(t, "reclaimed locks", func() bool { return a.locks.Counters.Reclaimed.Load() >= 2 })
	q.do("EAGAIN", "set 1 w 5 1")
	q.do("EAGAIN", "set 1 w 20 1")
	q.do("ok", "set 1 r 20 1")
	q.do("ok", "set 1 w 10 10")
	p.do("ok", "write 1 text")
	p.do("ok", "set 1 u 0 0")
	q.do("ok", "set 1 w 0 0")
	if lost := a.locks.Counters.Lost.Load() + b.locks.Counters.Lost.Load(); lost != 0 {
		t.Errorf("%d locks were lost", lost)
	}
}

// lockPort returns a change of a mount that makes it use relay for its locks.
func lockPort(relay *kit.Relay) func(*fusefs.Options, *nlm.Config) {
	return func(_ *fusefs.Options, c *nlm.Config) { c.Port = int(relay.Addr().Port()) }
}

// A theft has two mounts and processes that opened their file. The mount a reaches the lock service
// only through the relay.
type theft struct {
	server *restartable
	relay  *kit.Relay
	a      *lockMount
	p, q   *lockProcess
}

func startTheft(t *testing.T) *theft {
	t.Helper()
	r := startRestartable(t)
	e, relay := lockExportOf(t, r.s), kit.StartRelay(t, r.s.TCPAddr, kit.RelayOptions{})
	a, b := e.mount(t, lockPort(relay)), e.mount(t, nil)
	// The processes end before the mounts: cleanups run in reverse order.
	x := &theft{server: r, relay: relay, a: a, p: startLockProcess(t), q: startLockProcess(t)}
	open2(a, b, x.p, x.q)
	return x
}

// steal restarts the server without a grace period, lets q lock with a command, and returns when
// the mount a has lost its lock.
func (x *theft) steal(command string) {
	t := x.server.t
	t.Helper()
	x.relay.Stop()
	x.server.stop()
	x.server.cfg.LockGrace = time.Nanosecond
	x.server.start()
	x.q.eventually("ok", "%s", command)
	x.relay.Start()
	eventually(t, "a lost lock", func() bool { return x.a.locks.Counters.Lost.Load() == 1 })
}

// TestStolenLockFailsIO lets another client take a lock while its holder cannot reach the restarted
// server. I/O of the holder fails until it unlocks.
func TestStolenLockFailsIO(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	x := startTheft(t)
	a, p, q := x.a, x.p, x.q
	other := startLockProcess(t)
	other.do("ok", "open 1 %s", a.file())
	p.do("ok", "set 1 w 0 10")
	p.do("ok", "set 1 w 100 10")
	p.do("ok", "write 1 old")
	p.do(`"old"`, "read 1")
	p.do("ok", "open 2 %s", a.file())
	x.steal("set 1 w 0 10")
	p.do("EIO", "write 1 new")
	p.eventually("EIO", "read 1") // the kernel discards its pages after the lock counts as lost
	p.do("EIO", "set 1 w 50 1")
	other.do(`"old"`, "read 1")     // another process of the mount has no lock
	q.do("EAGAIN", "set 1 w 100 1") // the other lock was not lost
	p.do("ok", "set 1 u 0 10")
	p.do(`"old"`, "read 1")
	p.do("ok", "write 1 new")
	p.do("EAGAIN", "set 1 w 0 1")
	q.do("ok", "set 1 u 0 10")
	p.do("ok", "set 1 w 0 1")
}

// TestClosedFileForgetsLostLock closes the file instead of unlocking it.
func TestClosedFileForgetsLostLock(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	x := startTheft(t)
	a, p, q := x.a, x.p, x.q
	p.do("ok", "flock 1 ex")
	x.steal("flock 1 ex")
	p.do("EIO", "write 1 new")
	p.do("ok", "close 1")
	p.do("ok", "open 1 %s", a.file())
	p.do("ok", "write 1 new")
	p.do("EAGAIN", "flock 1 ex")
	q.do("ok", "close 1")
	p.eventually("ok", "flock 1 ex")
}

// TestLocalLocks leaves one kind of locks to the kernel.
func TestLocalLocks(t *testing.T) {
	if !inOwnProcess(t) {
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
			change := func(o *fusefs.Options, _ *nlm.Config) { o.LocalPosix, o.LocalFlock = x.posix, x.flock }
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

// TestLocksWithoutService mounts from a server without NLM.
func TestLocksWithoutService(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	e := serveLocks(t)
	closed := kit.StartRelay(t, "127.0.0.1:1", kit.RelayOptions{})
	closed.Stop()
	a := e.mount(t, lockPort(closed))
	p := startLockProcess(t)
	p.do("ok", "open 1 %s", a.file())
	p.do("ENOLCK", "set 1 w 0 10")
	p.do("ENOLCK", "flock 1 ex")
	p.do("ENOLCK", "get 1 w 0 10")
	p.do("ok", "write 1 text")
	p.do("ok", "close 1")
	p.kill()
}
