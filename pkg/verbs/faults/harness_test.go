package faults_test

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

func parse(t testing.TB, spec string) *faults.Plan {
	t.Helper()
	p, err := faults.Parse(spec)
	kit.Must(t, err)
	return p
}

// withFaults returns a softiwarp provider with the faults of spec.
func withFaults(t testing.TB, spec string) *faults.Provider {
	t.Helper()
	return faults.New(softiwarp.New(softiwarp.Config{}), parse(t, spec), nil)
}

// A side is one end of a connection.
type side struct {
	*verbstest.Endpoint
	log *completionLog // all completions
}

// connect makes a connection between two providers. The server may not send before the client's
// first message.
func connect(t testing.TB, client, server verbs.Provider) (c, s *side) {
	t.Helper()
	l, err := server.Listen(verbstest.Context(t), loopback)
	kit.Must(t, err)
	defer l.Close()
	active, passive := verbstest.Connect(t, client, l)
	return &side{active, newLog(t)}, &side{passive, newLog(t)}
}

// connectClient makes a connection to a server without faults, and sends the client's first
// message.
func connectClient(t testing.TB, client verbs.Provider) (c, s *side) {
	t.Helper()
	c, s = connect(t, client, softiwarp.New(softiwarp.Config{}))
	s.recv("open", s.Buffer(16))
	if bad, err := c.QP.PostSend(c.wr("open", &verbs.WorkRequest{Opcode: verbs.OpSend})); err != nil {
		t.Fatalf("post %v: %v", bad.Opcode, err)
	}
	c.log.want("open", verbs.StatusSuccess)
	s.log.want("open", verbs.StatusSuccess)
	return c, s
}

// wr makes a request signaled and records its completion.
func (s *side) wr(name string, wr *verbs.WorkRequest) *verbs.WorkRequest {
	wr.Signaled = true
	wr.Done = s.log.handler(name, &s.QP)
	return wr
}

// post posts a chain and fails the test on an error.
func (s *side) post(wrs ...*verbs.WorkRequest) {
	s.T.Helper()
	if bad, err := s.QP.PostSend(verbstest.Chain(wrs...)); err != nil {
		s.T.Fatalf("post %v: %v", bad.Opcode, err)
	}
}

// write returns an RDMA Write of 0 bytes. The only effect of the Write is its completion.
func (s *side) write(name string) *verbs.WorkRequest {
	return s.wr(name, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
}

func (s *side) recv(name string, sge verbs.SGE) {
	s.T.Helper()
	if _, err := s.QP.PostRecv(&verbs.RecvRequest{SGE: sge, Done: s.log.handler(name, &s.QP)}); err != nil {
		s.T.Fatalf("post Receive: %v", err)
	}
}

// send sends a message with the number n.
func (s *side) send(n uint32) {
	s.T.Helper()
	b := s.Buffer(4)
	binary.BigEndian.PutUint32(b.Buf, n)
	s.post(s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: b.Buf[:4], LKey: b.LKey}}}))
}

// wantCounts compares the counts of p with want.
func wantCounts(t testing.TB, p *faults.Provider, want ...faults.Count) {
	t.Helper()
	got := p.Counts()
	if len(got) != len(want) {
		t.Fatalf("counts: got %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("counts: got %v, want %v", got, want)
		}
	}
}

// A completionLog records completions in order and checks that no request completes twice.
type completionLog struct {
	t      testing.TB
	mu     sync.Mutex
	list   []entry
	notify chan struct{}
}

type entry struct {
	name string
	wc   verbs.WorkCompletion
}

func newLog(t testing.TB) *completionLog { return &completionLog{t: t, notify: make(chan struct{}, 1)} }

func (l *completionLog) handler(name string, qp *verbs.QP) func(*verbs.WorkCompletion) {
	var once sync.Once
	return func(wc *verbs.WorkCompletion) {
		first := false
		once.Do(func() { first = true })
		if !first {
			l.t.Errorf("request %s completed twice", name)
		}
		if wc.QP != *qp {
			l.t.Errorf("request %s completed on another queue pair", name)
		}
		l.mu.Lock()
		l.list = append(l.list, entry{name, *wc})
		l.mu.Unlock()
		select {
		case l.notify <- struct{}{}:
		default:
		}
	}
}

// next removes and returns the oldest completion. next waits for one if necessary.
func (l *completionLog) next() entry {
	l.t.Helper()
	timeout := time.After(kit.Timeout)
	for {
		l.mu.Lock()
		if len(l.list) > 0 {
			e := l.list[0]
			l.list = l.list[1:]
			l.mu.Unlock()
			return e
		}
		l.mu.Unlock()
		select {
		case <-l.notify:
		case <-timeout:
			l.t.Fatal("timeout: no completion")
		}
	}
}

// want checks the next completion.
func (l *completionLog) want(name string, status verbs.Status) entry {
	l.t.Helper()
	e := l.next()
	if e.name != name || e.wc.Status != status {
		l.t.Fatalf("completion: got %s %v, want %s %v", e.name, e.wc.Status, name, status)
	}
	return e
}

// wantEmpty checks that no completion is left.
func (l *completionLog) wantEmpty() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.list {
		l.t.Errorf("unexpected completion of %s: %v", e.name, e.wc.Status)
	}
}
