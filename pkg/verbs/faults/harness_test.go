package faults_test

import (
	"context"
	"encoding/binary"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

const testTimeout = 30 * time.Second

const queueDepth = 64

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

func parse(t testing.TB, spec string) *faults.Plan {
	t.Helper()
	p, err := faults.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// withFaults returns a softiwarp provider with the faults of spec.
func withFaults(t testing.TB, spec string) *faults.Provider {
	t.Helper()
	return faults.New(softiwarp.New(softiwarp.Config{}), parse(t, spec), nil)
}

func timeoutContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

// A side is one end of a connection.
type side struct {
	t           testing.TB
	id          verbs.ConnID
	pd          verbs.PD
	cq          verbs.CQ
	qp          verbs.QP
	disconnects chan error
	log         *completionLog // all completions
}

func newSide(t testing.TB, id verbs.ConnID) *side {
	t.Helper()
	s := &side{t: t, id: id, disconnects: make(chan error, 4), log: newLog(t)}
	var err error
	if s.pd, err = id.Device().AllocPD(); err != nil {
		t.Fatal(err)
	}
	if s.cq, err = id.Device().CreateCQ(2 * queueDepth); err != nil {
		t.Fatal(err)
	}
	s.qp, err = id.CreateQP(s.pd, verbs.QPInitAttr{SendCQ: s.cq, RecvCQ: s.cq, MaxSendWR: queueDepth,
		MaxRecvWR: queueDepth, MaxSendSGE: 2,
		OnDisconnect: func(cause error) { s.disconnects <- cause }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := id.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := s.cq.Close(); err != nil {
			t.Errorf("close completion queue: %v", err)
		}
		if err := s.pd.Dealloc(); err != nil {
			t.Errorf("deallocate protection domain: %v", err)
		}
		if n := len(s.disconnects); n > 1 {
			t.Errorf("OnDisconnect calls: got %d, want at most 1", n)
		}
	})
	return s
}

// connect makes a connection between two providers. The server may not send before the client's
// first message.
func connect(t testing.TB, client, server verbs.Provider) (c, s *side) {
	t.Helper()
	l, err := server.Listen(timeoutContext(t), loopback)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	id, err := client.Resolve(timeoutContext(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c = newSide(t, id)
	connected := make(chan error, 1)
	param := verbs.ConnParam{ResponderResources: 8, InitiatorDepth: 8}
	go func() { connected <- id.Connect(timeoutContext(t), param) }()
	req, err := l.Accept(timeoutContext(t))
	if err != nil {
		t.Fatal(err)
	}
	s = newSide(t, req)
	if err := req.Accept(timeoutContext(t), param); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return c, s
}

// connectClient makes a connection to a server without faults, and sends the client's first
// message.
func connectClient(t testing.TB, client verbs.Provider) (c, s *side) {
	t.Helper()
	c, s = connect(t, client, softiwarp.New(softiwarp.Config{}))
	s.recv("open", s.buffer(16))
	if bad, err := c.qp.PostSend(c.wr("open", &verbs.WorkRequest{Opcode: verbs.OpSend})); err != nil {
		t.Fatalf("post %v: %v", bad.Opcode, err)
	}
	c.log.want("open", verbs.StatusSuccess)
	s.log.want("open", verbs.StatusSuccess)
	return c, s
}

func (s *side) buffer(n int) verbs.SGE {
	s.t.Helper()
	b, err := membuf.Alloc(n)
	if err != nil {
		s.t.Fatal(err)
	}
	m, err := s.pd.RegMR(b)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		s.qp.Drain()
		m.Dereg()
		membuf.Free(b)
	})
	return verbs.SGE{Buf: b, LKey: m.LKey()}
}

func (s *side) mr() verbs.MR {
	s.t.Helper()
	m, err := s.pd.AllocMR(4)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := m.Dereg(); err != nil {
			s.t.Errorf("deregister: %v", err)
		}
	})
	return m
}

// wr makes a request signaled and records its completion.
func (s *side) wr(name string, wr *verbs.WorkRequest) *verbs.WorkRequest {
	wr.Signaled = true
	wr.Done = s.log.handler(name, &s.qp)
	return wr
}

func chain(wrs ...*verbs.WorkRequest) *verbs.WorkRequest {
	for i := range len(wrs) - 1 {
		wrs[i].Next = wrs[i+1]
	}
	return wrs[0]
}

// post posts a chain and fails the test on an error.
func (s *side) post(wrs ...*verbs.WorkRequest) {
	s.t.Helper()
	if bad, err := s.qp.PostSend(chain(wrs...)); err != nil {
		s.t.Fatalf("post %v: %v", bad.Opcode, err)
	}
}

// write returns an RDMA Write of 0 bytes. The only effect of the Write is its completion.
func (s *side) write(name string) *verbs.WorkRequest {
	return s.wr(name, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
}

func (s *side) recv(name string, sge verbs.SGE) {
	s.t.Helper()
	if _, err := s.qp.PostRecv(&verbs.RecvRequest{SGE: sge, Done: s.log.handler(name, &s.qp)}); err != nil {
		s.t.Fatalf("post Receive: %v", err)
	}
}

// send sends a message with the number n.
func (s *side) send(n uint32) {
	s.t.Helper()
	b := s.buffer(4)
	binary.BigEndian.PutUint32(b.Buf, n)
	s.post(s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: b.Buf[:4], LKey: b.LKey}}}))
}

func (s *side) wantDisconnect() error {
	s.t.Helper()
	select {
	case cause := <-s.disconnects:
		if cause == nil {
			s.t.Error("OnDisconnect: got no cause, want one")
		}
		return cause
	case <-time.After(testTimeout):
		s.t.Fatal("OnDisconnect was not called")
		return nil
	}
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
	timeout := time.After(testTimeout)
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
			l.t.Fatalf("no completion after %v", testTimeout)
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
