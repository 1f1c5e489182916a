package lab

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/rpc"
	"net/rpc/jsonrpc"
	"runtime"
	"sync"
	"testing"
	"time"
)

const (
	// remoteRetry is how often the host looks for a process in the guest.
	remoteRetry = 200 * time.Millisecond
	// remoteGreeting bounds the wait for its first line. Where nobody waits the guest says so at
	// once; who waits has one connection only, so this is not to be left for a busy host.
	remoteGreeting = time.Minute
)

// Lend lets processes in the guest that have RemoteEnv in their environment use the lab, one at a
// time, until the test ends. There Borrow gives them server, which stays, and Start boots guests of
// their own, with the options as adapt changes them; what a process leaves behind ends with it.
// Captures are in the test's artifact directory. Lend may be called again when the test has ended.
func (g *Guest) Lend(t testing.TB, server *Guest, adapt func(*Options)) {
	over := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for {
			conn, err := g.meet()
			if err == nil {
				l := &lease{t: t, server: server, adapt: adapt, guests: make(map[int]*lent),
					captures: make(map[int]*Capture)}
				l.serve(conn, over)
			}
			select {
			case <-over:
				return
			case <-time.After(remoteRetry):
			}
		}
	})
	t.Cleanup(func() {
		close(over)
		work.Wait()
	})
}

// meet looks whether a process in the guest waits.
func (g *Guest) meet() (net.Conn, error) {
	conn, err := net.Dial("tcp", g.lend.String())
	if err != nil {
		return nil, err
	}
	conn.SetReadDeadline(time.Now().Add(remoteGreeting))
	hello := make([]byte, len(remoteHello))
	if _, err := io.ReadFull(conn, hello); err != nil || string(hello) != remoteHello {
		conn.Close()
		return nil, fmt.Errorf("greeting %q: %w", hello, err)
	}
	conn.SetReadDeadline(time.Time{})
	return conn, nil
}

// A lease is what one process in the guest has of the lab.
type lease struct {
	t      testing.TB // of Lend
	server *Guest
	adapt  func(*Options)

	mu       sync.Mutex
	last     int              // guarded by mu: the newest id
	guests   map[int]*lent    // guarded by mu
	captures map[int]*Capture // guarded by mu
}

// A lent guest runs for a process in another one.
type lent struct {
	*Guest
	test *lentTest // that it was started by; nil for the lease's server
}

// serve answers the process until it ends, or the lease does.
func (l *lease) serve(conn net.Conn, over <-chan struct{}) {
	server := rpc.NewServer()
	if err := server.RegisterName("Lab", l); err != nil {
		panic("lab: " + err.Error())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		server.ServeCodec(jsonrpc.NewServerCodec(conn)) // returns when all calls have
	}()
	select {
	case <-ended:
	case <-over:
		conn.Close()
		<-ended
	}
	conn.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.captures {
		c.Stop()
	}
	for _, g := range l.guests {
		if g.test != nil {
			g.test.end(true)
			l.t.Logf("guest %s: the process that had started it is gone:\n%s", g.opts.Name, g.test.report())
		}
	}
}

// Do is what a process in the guest calls.
func (l *lease) Do(request json.RawMessage, answer *json.RawMessage) error {
	var r remoteRequest
	if err := json.Unmarshal(request, &r); err != nil {
		return err
	}
	*answer = pack(l.do(&r))
	return nil
}

func (l *lease) do(r *remoteRequest) remoteAnswer {
	switch r.Op {
	case opServer:
		return l.add(&lent{Guest: l.server})
	case opStart:
		return l.start(r.Options)
	case opStopCapture, opReadCapture:
		return l.capture(r)
	}
	l.mu.Lock()
	g := l.guests[r.ID]
	if r.Op == opEnd {
		delete(l.guests, r.ID)
	}
	l.mu.Unlock()
	if g == nil {
		return remoteAnswer{Err: packError(fmt.Errorf("the host's lab has no guest %d", r.ID))}
	}
	var text string
	var err error
	switch r.Op {
	case opRun:
		text, err = g.RunFor(r.Command, r.Limit)
	case opLog:
		text = g.Log()
	case opPowerOff:
		g.PowerOff()
	case opBoot:
		err = g.Boot()
	case opReset:
		err = g.Reset()
	case opFreeze:
		err = g.Freeze()
	case opThaw:
		err = g.Thaw()
	case opCut:
		err = g.CutNetwork()
	case opRestore:
		err = g.RestoreNetwork()
	case opSlow:
		err = g.SlowNetwork(r.Line)
	case opCapture:
		return l.record(g, r.Name)
	case opEnd:
		return l.end(g, r.Failed)
	default:
		err = fmt.Errorf(unknownRequest, r.Op)
	}
	return remoteAnswer{Text: text, Err: packError(err)}
}

// add gives a guest a number.
func (l *lease) add(g *lent) remoteAnswer {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.guests[l.last] = g
	a := remoteAnswer{ID: l.last, RDMA: g.RDMA, NFS: g.NFS, Mount: g.Mount, Portmap: g.Portmap, Linked: g.Linked,
		Release: g.Release}
	if g.Linked.IsValid() {
		// The addresses on the host's loopback mean nothing in another guest.
		a.RDMA, a.NFS = netip.AddrPortFrom(g.Linked, rdmaPort), netip.AddrPortFrom(g.Linked, nfsPort)
		a.Mount, a.Portmap = netip.AddrPortFrom(g.Linked, mountPort), netip.AddrPortFrom(g.Linked, portmapPort)
	}
	return a
}

func (l *lease) start(o Options) remoteAnswer {
	if l.adapt != nil {
		l.adapt(&o)
	}
	g := &lent{test: &lentTest{TB: l.t}}
	err := g.test.try(func() { g.Guest = Start(g.test, o) })
	if err != nil {
		g.test.end(true)
		return remoteAnswer{Logs: g.test.logs, Err: packError(err)}
	}
	a := l.add(g)
	a.Logs = g.test.logs
	return a
}

// end ends a guest, and hands over what the host has to say.
func (l *lease) end(g *lent, failed bool) remoteAnswer {
	if g.test == nil {
		return remoteAnswer{}
	}
	already := len(g.test.logs)
	g.test.end(failed)
	return remoteAnswer{Logs: g.test.logs[already:], Errors: g.test.errors}
}

func (l *lease) record(g *lent, name string) remoteAnswer {
	t := &lentTest{TB: l.t}
	var c *Capture
	if err := t.try(func() { c = g.Guest.Capture(t, name) }); err != nil {
		t.end(true)
		return remoteAnswer{Logs: t.logs, Err: packError(err)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.captures[l.last] = c
	return remoteAnswer{ID: l.last, Text: c.File}
}

func (l *lease) capture(r *remoteRequest) remoteAnswer {
	l.mu.Lock()
	c := l.captures[r.ID]
	l.mu.Unlock()
	if c == nil {
		return remoteAnswer{Err: packError(fmt.Errorf("the host's lab has no capture %d", r.ID))}
	}
	if r.Op == opStopCapture {
		return remoteAnswer{Err: packError(c.Stop())}
	}
	text, err := c.Tshark(r.Args...)
	return remoteAnswer{Text: text, Err: packError(err)}
}

// A lentTest stands for a test that runs elsewhere: it keeps what is to be told there. Its artifact
// directory is the host's test's.
type lentTest struct {
	testing.TB // of Lend

	mu           sync.Mutex
	logs, errors []string // guarded by mu until end
	fatal        string   // guarded by mu: what ended try
	failed       bool     // guarded by mu
	cleanups     []func() // guarded by mu
}

// try runs f, which may end by Fatal or Skip; that is its error then.
func (t *lentTest) try(f func()) error {
	done := make(chan struct{})
	ok := false
	go func() {
		defer close(done)
		f()
		ok = true
	}()
	<-done
	if ok {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Errorf("%s", t.fatal)
}

// end does what is to be done at the end of the test. failed says that it has failed where it runs.
func (t *lentTest) end(failed bool) {
	t.mu.Lock()
	t.failed = t.failed || failed
	todo := t.cleanups
	t.cleanups = nil
	t.mu.Unlock()
	for i := len(todo) - 1; i >= 0; i-- {
		todo[i]()
	}
}

func (t *lentTest) report() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintln(t.errors) + fmt.Sprintln(t.logs)
}

func (t *lentTest) Helper() {}

func (t *lentTest) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

func (t *lentTest) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

func (t *lentTest) Logf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.logs = append(t.logs, fmt.Sprintf(format, args...))
}

func (t *lentTest) Errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = true
	t.errors = append(t.errors, fmt.Sprintf(format, args...))
}

func (t *lentTest) stop(why string) {
	t.mu.Lock()
	t.failed, t.fatal = true, why
	t.mu.Unlock()
	runtime.Goexit()
}

func (t *lentTest) Fatal(args ...any)                 { t.stop(fmt.Sprint(args...)) }
func (t *lentTest) Fatalf(format string, args ...any) { t.stop(fmt.Sprintf(format, args...)) }
func (t *lentTest) Skipf(format string, args ...any)  { t.stop(fmt.Sprintf(format, args...)) }
