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

const patience = 30 * time.Second

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

// broken is a softiwarp with the faults of spec.
func broken(t testing.TB, spec string) *faults.Provider {
	t.Helper()
	return faults.New(softiwarp.New(softiwarp.Config{}), parse(t, spec), nil)
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// A side is one end of a connection.
type side struct {
	t    testing.TB
	id   verbs.ConnID
	pd   verbs.PD
	cq   verbs.CQ
	qp   verbs.QP
	gone chan error
	log  *log // of every completion
}

func newSide(t testing.TB, id verbs.ConnID) *side {
	t.Helper()
	s := &side{t: t, id: id, gone: make(chan error, 4), log: newLog(t)}
	var err error
	if s.pd, err = id.Device().AllocPD(); err != nil {
		t.Fatal(err)
	}
	if s.cq, err = id.Device().CreateCQ(2 * queueDepth); err != nil {
		t.Fatal(err)
	}
	s.qp, err = id.CreateQP(s.pd, verbs.QPInitAttr{SendCQ: s.cq, RecvCQ: s.cq, MaxSendWR: queueDepth,
		MaxRecvWR: queueDepth, MaxSendSGE: 2,
		OnDisconnect: func(cause error) { s.gone <- cause }})
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
		if n := len(s.gone); n > 1 {
			t.Errorf("OnDisconnect was called %d times", n)
		}
	})
	return s
}

// connect makes a connection between two providers; the client's first message, with which the
// server may speak, is through.
func connect(t testing.TB, client, server verbs.Provider) (c, s *side) {
	t.Helper()
	l, err := server.Listen(within(t), loopback)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	id, err := client.Resolve(within(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	c = newSide(t, id)
	connected := make(chan error, 1)
	param := verbs.ConnParam{ResponderResources: 8, InitiatorDepth: 8}
	go func() { connected <- id.Connect(within(t), param) }()
	req, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	s = newSide(t, req)
	if err := req.Accept(within(t), param); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return c, s
}

// clean is connect with an undecorated server that may speak.
func clean(t testing.TB, client verbs.Provider) (c, s *side) {
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

// wr makes a request signaled and logged.
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

// post posts a chain that must be taken.
func (s *side) post(wrs ...*verbs.WorkRequest) {
	s.t.Helper()
	if bad, err := s.qp.PostSend(chain(wrs...)); err != nil {
		s.t.Fatalf("post %v: %v", bad.Opcode, err)
	}
}

// write is an RDMA Write of no octets, which has no effect but its completion.
func (s *side) write(name string) *verbs.WorkRequest {
	return s.wr(name, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
}

func (s *side) recv(name string, sge verbs.SGE) {
	s.t.Helper()
	if _, err := s.qp.PostRecv(&verbs.RecvRequest{SGE: sge, Done: s.log.handler(name, &s.qp)}); err != nil {
		s.t.Fatalf("post Receive: %v", err)
	}
}

// send sends a message that holds n.
func (s *side) send(n uint32) {
	s.t.Helper()
	b := s.buffer(4)
	binary.BigEndian.PutUint32(b.Buf, n)
	s.post(s.wr("send", &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: b.Buf[:4], LKey: b.LKey}}}))
}

func (s *side) wantGone() error {
	s.t.Helper()
	select {
	case cause := <-s.gone:
		if cause == nil {
			s.t.Error("OnDisconnect without a cause")
		}
		return cause
	case <-time.After(patience):
		s.t.Fatal("OnDisconnect was not called")
		return nil
	}
}

// wantCounts compares the counts of p with name, number pairs.
func wantCounts(t testing.TB, p *faults.Provider, want ...faults.Count) {
	t.Helper()
	got := p.Counts()
	if len(got) != len(want) {
		t.Fatalf("counts %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("counts %v, want %v", got, want)
		}
	}
}

// A log keeps completions in their order, and proves that each request had one.
type log struct {
	t    testing.TB
	mu   sync.Mutex
	list []entry
	tell chan struct{}
}

type entry struct {
	name string
	wc   verbs.WorkCompletion
}

func newLog(t testing.TB) *log { return &log{t: t, tell: make(chan struct{}, 1)} }

func (l *log) handler(name string, qp *verbs.QP) func(*verbs.WorkCompletion) {
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
		case l.tell <- struct{}{}:
		default:
		}
	}
}

// next removes and returns the oldest completion that has not been looked at.
func (l *log) next() entry {
	l.t.Helper()
	timeout := time.After(patience)
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
		case <-l.tell:
		case <-timeout:
			l.t.Fatalf("no completion after %v", patience)
		}
	}
}

// want asserts the next completion.
func (l *log) want(name string, status verbs.Status) entry {
	l.t.Helper()
	e := l.next()
	if e.name != name || e.wc.Status != status {
		l.t.Fatalf("completion of %s: %v; want %s: %v", e.name, e.wc.Status, name, status)
	}
	return e
}

// quiet asserts that there is no completion left.
func (l *log) quiet() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.list {
		l.t.Errorf("unexpected completion of %s: %v", e.name, e.wc.Status)
	}
}
