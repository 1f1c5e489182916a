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
	// remoteRetry is the interval at which the host tries to connect to a process in the guest.
	remoteRetry = 200 * time.Millisecond
	// remoteGreeting bounds the wait for remoteHello. If no process listens, the guest closes the
	// connection at once. A process that listens accepts only one connection, so a busy host must
	// not give this connection up too early.
	remoteGreeting = time.Minute
)

// ServeRemote lets processes in the guest that have RemoteEnv in their environment use the lab, one
// at a time, until the test ends. In such a process RemoteServer returns server, which outlives the
// process. Start boots further guests, with the options that adapt has changed; they end with the
// process at the latest. Captures are in the artifact directory of t. ServeRemote can be called
// again after the test has ended.
func (g *Guest) ServeRemote(t testing.TB, server *Guest, adapt func(*Options)) {
	stopC := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for {
			conn, err := g.dialRemote()
			if err == nil {
				s := &remoteSession{t: t, server: server, adapt: adapt, guests: make(map[int]*sessionGuest),
					captures: make(map[int]*Capture)}
				s.serve(conn, stopC)
			}
			select {
			case <-stopC:
				return
			case <-time.After(remoteRetry):
			}
		}
	})
	t.Cleanup(func() {
		close(stopC)
		work.Wait()
	})
}

// dialRemote connects to a process in the guest that waits for its host.
func (g *Guest) dialRemote() (net.Conn, error) {
	conn, err := net.Dial("tcp", g.remoteAddr.String())
	if err != nil {
		return nil, err
	}
	conn.SetReadDeadline(time.Now().Add(remoteGreeting))
	hello := make([]byte, len(remoteHello))
	if _, err := io.ReadFull(conn, hello); err != nil || string(hello) != remoteHello {
		conn.Close()
		return nil, fmt.Errorf("read greeting of the guest's process: got %q: %w", hello, err)
	}
	conn.SetReadDeadline(time.Time{})
	return conn, nil
}

// A remoteSession serves the lab to one process in the guest.
type remoteSession struct {
	t      testing.TB // of ServeRemote
	server *Guest
	adapt  func(*Options)

	mu       sync.Mutex
	last     int                   // guarded by mu; the last ID
	guests   map[int]*sessionGuest // guarded by mu
	captures map[int]*Capture      // guarded by mu
}

// A sessionGuest is a guest that runs for a process in another guest.
type sessionGuest struct {
	*Guest
	test *sessionTB // receives the guest's output; nil for the session's server
}

// serve answers requests until the process ends or stopC is closed.
func (s *remoteSession) serve(conn net.Conn, stopC <-chan struct{}) {
	server := rpc.NewServer()
	if err := server.RegisterName("Lab", s); err != nil {
		panic("lab: " + err.Error())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		server.ServeCodec(jsonrpc.NewServerCodec(conn)) // returns when all calls have returned
	}()
	select {
	case <-ended:
	case <-stopC:
		conn.Close()
		<-ended
	}
	conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.captures {
		c.Stop()
	}
	for _, g := range s.guests {
		if g.test != nil {
			g.test.end(true)
			s.t.Logf("guest %s: the process that started it has ended:\n%s", g.opts.Name, g.test.report())
		}
	}
}

// Do is the RPC method that a process in the guest calls.
func (s *remoteSession) Do(request json.RawMessage, answer *json.RawMessage) error {
	var r remoteRequest
	if err := json.Unmarshal(request, &r); err != nil {
		return err
	}
	*answer = pack(s.do(&r))
	return nil
}

func (s *remoteSession) do(r *remoteRequest) remoteAnswer {
	switch r.Op {
	case opServer:
		return s.add(&sessionGuest{Guest: s.server})
	case opStart:
		return s.start(r.Options)
	case opStopCapture, opReadCapture:
		return s.capture(r)
	}
	s.mu.Lock()
	g := s.guests[r.ID]
	if r.Op == opEnd {
		delete(s.guests, r.ID)
	}
	s.mu.Unlock()
	if g == nil {
		return remoteAnswer{Err: packError(fmt.Errorf("host's lab: unknown guest %d", r.ID))}
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
		err = g.SlowNetwork(r.Impairment)
	case opCapture:
		return s.record(g, r.Name)
	case opEnd:
		return s.end(g, r.Failed)
	default:
		err = fmt.Errorf(unknownRequest, r.Op)
	}
	return remoteAnswer{Text: text, Err: packError(err)}
}

// add assigns an ID to a guest.
func (s *remoteSession) add(g *sessionGuest) remoteAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	s.guests[s.last] = g
	a := remoteAnswer{ID: s.last, RDMA: g.RDMA, NFS: g.NFS, Mount: g.Mount, Portmap: g.Portmap, NLM: g.NLM,
		Linked: g.Linked, Release: g.Release}
	if g.Linked.IsValid() {
		// Addresses on the host's loopback are not reachable from another guest.
		a.RDMA, a.NFS = netip.AddrPortFrom(g.Linked, rdmaPort), netip.AddrPortFrom(g.Linked, nfsPort)
		a.NLM = netip.AddrPortFrom(g.Linked, nlmPort)
		a.Mount, a.Portmap = netip.AddrPortFrom(g.Linked, mountPort), netip.AddrPortFrom(g.Linked, portmapPort)
	}
	return a
}

func (s *remoteSession) start(o Options) remoteAnswer {
	if s.adapt != nil {
		s.adapt(&o)
	}
	g := &sessionGuest{test: &sessionTB{TB: s.t}}
	err := g.test.try(func() { g.Guest = Start(g.test, o) })
	if err != nil {
		g.test.end(true)
		return remoteAnswer{Logs: g.test.logs, Err: packError(err)}
	}
	a := s.add(g)
	a.Logs = g.test.logs
	return a
}

// end ends a guest and returns its output for the test.
func (s *remoteSession) end(g *sessionGuest, failed bool) remoteAnswer {
	if g.test == nil {
		return remoteAnswer{}
	}
	already := len(g.test.logs)
	g.test.end(failed)
	return remoteAnswer{Logs: g.test.logs[already:], Errors: g.test.errors}
}

func (s *remoteSession) record(g *sessionGuest, name string) remoteAnswer {
	t := &sessionTB{TB: s.t}
	var c *Capture
	if err := t.try(func() { c = g.Guest.Capture(t, name) }); err != nil {
		t.end(true)
		return remoteAnswer{Logs: t.logs, Err: packError(err)}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	s.captures[s.last] = c
	return remoteAnswer{ID: s.last, Text: c.File}
}

func (s *remoteSession) capture(r *remoteRequest) remoteAnswer {
	s.mu.Lock()
	c := s.captures[r.ID]
	s.mu.Unlock()
	if c == nil {
		return remoteAnswer{Err: packError(fmt.Errorf("host's lab: unknown capture %d", r.ID))}
	}
	if r.Op == opStopCapture {
		return remoteAnswer{Err: packError(c.Stop())}
	}
	text, err := c.Tshark(r.Args...)
	return remoteAnswer{Text: text, Err: packError(err)}
}

// A sessionTB stands for a test in a guest's process: it collects the output for that test. Its
// artifact directory is that of the host's test.
type sessionTB struct {
	testing.TB // of ServeRemote

	mu           sync.Mutex
	logs, errors []string // guarded by mu until end
	fatal        string   // guarded by mu; message of the Fatal or Skip that ended try
	failed       bool     // guarded by mu
	cleanups     []func() // guarded by mu
}

// try runs f and returns the message as an error if f ends with Fatal or Skip.
func (t *sessionTB) try(f func()) error {
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

// end runs the clean-up functions. failed reports that the test has failed in its process.
func (t *sessionTB) end(failed bool) {
	t.mu.Lock()
	t.failed = t.failed || failed
	todo := t.cleanups
	t.cleanups = nil
	t.mu.Unlock()
	for i := len(todo) - 1; i >= 0; i-- {
		todo[i]()
	}
}

func (t *sessionTB) report() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintln(t.errors) + fmt.Sprintln(t.logs)
}

func (t *sessionTB) Helper() {}

func (t *sessionTB) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

func (t *sessionTB) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

func (t *sessionTB) Logf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.logs = append(t.logs, fmt.Sprintf(format, args...))
}

func (t *sessionTB) Errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = true
	t.errors = append(t.errors, fmt.Sprintf(format, args...))
}

func (t *sessionTB) stop(why string) {
	t.mu.Lock()
	t.failed, t.fatal = true, why
	t.mu.Unlock()
	runtime.Goexit()
}

func (t *sessionTB) Fatal(args ...any)                 { t.stop(fmt.Sprint(args...)) }
func (t *sessionTB) Fatalf(format string, args ...any) { t.stop(fmt.Sprintf(format, args...)) }
func (t *sessionTB) Skipf(format string, args ...any)  { t.stop(fmt.Sprintf(format, args...)) }
