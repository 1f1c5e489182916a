package verbstest

import (
	"errors"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// errorTests cover the errors of package verbs that the other groups do not cover. messageTests
// cover ErrQPState and ErrQueueFull, and resourceTests cover ErrBusy. The statuses of lengths,
// accesses and flushes are in the groups of their operations.
var errorTests = []conformanceTest{
	{"LocalInvErrors", verbs.CapFastReg, testLocalInvErrors},
	{"FastRegOfDestroyed", verbs.CapFastReg, testFastRegOfDestroyed},
	{"NoReadDepth", 0, testNoReadDepth},
	{"AcceptErrors", 0, testAcceptErrors},
	{"RejectErrors", 0, testRejectErrors},
	{"ClosedConnID", 0, testClosedConnID},
	{"ListenErrors", 0, testListenErrors},
	{"DestroyedResources", 0, testDestroyedResources},
	{"ForeignResources", 0, testForeignResources},
	{"RecvChainError", 0, testRecvChainError},
	{"FullCQ", 0, testFullCQ},
}

// testLocalInvErrors checks that a LocalInv with an invalid key fails and ends the connection.
func testLocalInvErrors(t *testing.T, s *suite) {
	for _, name := range []string{"unknown", "stale key", "destroyed", "of another PD"} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).sendFirst()
			m, err := p.active.PD.AllocMR(1)
			if err != nil {
				t.Fatal(err)
			}
			w := p.active.fastReg(m, 9, remoteWrite, 0, p.active.Buffer(8).Buf)
			key := w.rkey
			switch name {
			case "unknown":
				key ^= 1 << 25
			case "stale key":
				key = key.WithKey(8)
			case "of another PD":
				foreign, err := mustPD(t, p.active.Dev).AllocMR(1)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { foreign.Dereg() })
				key = foreign.RKey()
			}
			destroy := func() {
				if err := m.Dereg(); err != nil {
					t.Error(err)
				}
			}
			if name == "destroyed" {
				destroy()
			} else {
				t.Cleanup(destroy)
			}
			l := p.active.do(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: key},
				&verbs.WorkRequest{Opcode: verbs.OpSend})
			if st := l[0].Status; st == verbs.StatusSuccess || st == verbs.StatusWRFlushErr {
				t.Errorf("LocalInv: got %v, want an error other than a flush", st)
			}
			if st := l[1].Status; st != verbs.StatusWRFlushErr {
				t.Errorf("request after the failed one: got %v, want %v", st, verbs.StatusWRFlushErr)
			}
			p.active.WaitDisconnect()
			p.passive.WaitDisconnect()
		})
	}
}

// testFastRegOfDestroyed checks that a FastReg of a deregistered MR fails.
func testFastRegOfDestroyed(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	m, err := p.active.PD.AllocMR(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Dereg(); err != nil {
		t.Fatal(err)
	}
	if err := m.Dereg(); err == nil {
		t.Error("second Dereg: got no error, want one")
	}
	out := newCompletions()
	wr := &verbs.WorkRequest{Opcode: verbs.OpFastReg, Done: out.done, MR: m, Access: remoteWrite,
		Segs: [][]byte{p.active.Buffer(8).Buf}}
	if _, err := p.active.QP.PostSend(wr); err != nil {
		return // refused by the post
	}
	if wc := out.wait(t, 1)[0]; wc.Status == verbs.StatusSuccess || wc.Status == verbs.StatusWRFlushErr {
		t.Errorf("FastReg of a deregistered MR: got %v, want an error other than a flush", wc.Status)
	}
	p.active.WaitDisconnect()
}

// beginConnect starts a Connect and returns the request that the listener accepts.
func beginConnect(t *testing.T, p verbs.Provider, l verbs.Listener, param verbs.ConnParam) (e *Endpoint,
	req verbs.ConnRequest, connected chan error) {
	t.Helper()
	id, e := resolve(t, p, l.Addr())
	connected = make(chan error, 1)
	go func() { connected <- id.Connect(Context(t), param) }()
	req, err := l.Accept(Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return e, req, connected
}

// testNoReadDepth checks that an RDMA Read cannot be posted without InitiatorDepth. The connection
// stays usable.
func testNoReadDepth(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	var o options
	o.defaults()
	e, req, connected := beginConnect(t, p, l, verbs.ConnParam{ResponderResources: 1})
	peer := newEndpoint(t, req, &o)
	if err := req.Accept(Context(t), verbs.ConnParam{}); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	wr := &verbs.WorkRequest{Opcode: verbs.OpRDMARead, Done: func(*verbs.WorkCompletion) {},
		SGList: []verbs.SGE{e.Buffer(8)}, RKey: 1}
	if bad, err := e.QP.PostSend(wr); !errors.Is(err, verbs.ErrInvalid) || bad != wr {
		t.Errorf("RDMA Read without InitiatorDepth: got %v, want ErrInvalid", err)
	}
	(&pair{active: e, passive: peer}).sendFirst()
}

func testAcceptErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	var o options
	o.defaults()
	_, req, connected := beginConnect(t, p, l, depthOne)
	wantConnError(t, "accept without a QP", req.Accept(Context(t), depthOne), verbs.ConnLocal)
	newEndpoint(t, req, &o)
	long := depthOne
	long.PrivateData = make([]byte, 1000)
	wantConnError(t, "accept with 1000 bytes of private data", req.Accept(Context(t), long), verbs.ConnLocal)
	if err := req.Accept(Context(t), depthOne); err != nil {
		t.Errorf("accept after failed ones: %v", err)
	}
	if err := <-connected; err != nil {
		t.Error(err)
	}
	wantConnError(t, "accept twice", req.Accept(Context(t), depthOne), verbs.ConnLocal)
}

// testRejectErrors checks that Reject closes the ConnID even when it fails, so that the peer does
// not wait.
func testRejectErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	_, req, connected := beginConnect(t, p, l, depthOne)
	wantConnError(t, "reject with 1000 bytes of private data", req.Reject(make([]byte, 1000)), verbs.ConnLocal)
	var ce *verbs.ConnError
	if err := <-connected; !errors.As(err, &ce) {
		t.Errorf("connect: got %v, want a *verbs.ConnError", err)
	}
	if err := req.Reject(nil); err == nil {
		t.Error("second Reject: got no error, want one")
	}
}

func testClosedConnID(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	id, err := p.Resolve(Context(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 4)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	if err := id.Close(); err != nil {
		t.Error(err)
	}
	if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("create QP on a closed ConnID: got %v, want ErrInvalid", err)
	}
	for range 8 { // no Connect reaches the peer
		id, e := resolve(t, p, l.Addr())
		id.Close()
		wantConnError(t, "connect a closed ConnID", id.Connect(Context(t), depthOne), verbs.ConnLocal)
		if _, err := e.QP.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend,
			Done: func(*verbs.WorkCompletion) {}}); !errors.Is(err, verbs.ErrQPState) {
			t.Errorf("post on a closed ConnID: got %v, want ErrQPState", err)
		}
	}
	connectPair(t, p, l, options{}).sendFirst() // the listener accepts this connection first
}

func testListenErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	if second, err := p.Listen(Context(t), l.Addr()); err == nil {
		second.Close()
		t.Error("second Listen on one address: got no error, want one")
	}
	l.Close()
	again, err := p.Listen(Context(t), l.Addr())
	if err != nil {
		t.Fatalf("Listen after Close: %v", err)
	}
	again.Close()
}

// testDestroyedResources checks that released resources cannot be used.
func testDestroyedResources(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	id, err := s.newProvider(t).Resolve(Context(t), p.active.ID.RemoteAddr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	dev := id.Device()
	pd, cq := mustPD(t, dev), mustCQ(t, dev, 4)
	freedPD, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	closedCQ, err := dev.CreateCQ(4)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(freedPD.Dealloc(), closedCQ.Close()); err != nil {
		t.Fatal(err)
	}
	if err := freedPD.Dealloc(); err == nil {
		t.Error("second Dealloc: got no error, want one")
	}
	if _, err := freedPD.RegMR(make([]byte, 8)); err == nil {
		t.Error("RegMR in a deallocated PD: got no error, want one")
	}
	if _, err := freedPD.AllocMR(1); err == nil {
		t.Error("AllocMR in a deallocated PD: got no error, want one")
	}
	if _, err := id.CreateQP(freedPD, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1,
		MaxRecvWR: 1}); err == nil {
		t.Error("CreateQP in a deallocated PD: got no error, want one")
	}
	if _, err := id.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: closedCQ, MaxSendWR: 1,
		MaxRecvWR: 1}); err == nil {
		t.Error("CreateQP with a closed CQ: got no error, want one")
	}
	// The failed calls must not hold references.
	if err := pd.Dealloc(); err != nil {
		t.Error(err)
	}
	if err := cq.Close(); err != nil {
		t.Error(err)
	}
	if _, err := dev.CreateCQ(dev.Attrs().MaxCQE + 1); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("CreateCQ above the device's limit: got %v, want ErrInvalid", err)
	}
}

// testForeignResources checks that a QP refuses resources of another device.
func testForeignResources(t *testing.T, s *suite) {
	here, there := s.pair(t, options{noConnect: true}), s.pair(t, options{noConnect: true})
	if here.active.Dev == there.active.Dev {
		t.Skip("all providers share one device")
	}
	id, err := s.newProvider(t).Resolve(Context(t), here.active.ID.RemoteAddr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 8)
	otherPD, otherCQ := mustPD(t, there.active.Dev), mustCQ(t, there.active.Dev, 8)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	if _, err := id.CreateQP(otherPD, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("CreateQP with a PD of another device: got %v, want ErrInvalid", err)
	}
	attr.RecvCQ = otherCQ
	if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("CreateQP with a CQ of another device: got %v, want ErrInvalid", err)
	}
}

// testRecvChainError checks that the Receives before an invalid one are posted, and the others are
// not.
func testRecvChainError(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	c := newCompletions()
	b := p.active.Buffer(8)
	last := &verbs.RecvRequest{SGE: b, Done: c.done}
	bad := &verbs.RecvRequest{SGE: b, Next: last}
	first := &verbs.RecvRequest{SGE: b, Done: c.done, Next: bad}
	if at, err := p.active.QP.PostRecv(first); !errors.Is(err, verbs.ErrInvalid) || at != bad {
		t.Errorf("post a Receive without handler: got %v, want ErrInvalid at the second request", err)
	}
	p.active.QP.Drain()
	if l := c.all(); len(l) != 1 || l[0].Status != verbs.StatusWRFlushErr {
		t.Errorf("completions of the chain: got %s, want 1 flushed", summary(l))
	}
}

// testFullCQ checks that a CQ with the minimum depth loses no completion while a handler blocks.
func testFullCQ(t *testing.T, s *suite) {
	const n = 8
	live := s.caps(t).Has(verbs.CapLiveStats)
	p := s.pair(t, options{sendDepth: n, recvDepth: n, blocking: true}).sendFirst()
	e := p.passive
	release, blocked := make(chan struct{}), make(chan struct{})
	all := newCompletions()
	b := e.Buffer(8)
	for i := range n {
		done := all.done
		if i == 0 {
			done = func(wc *verbs.WorkCompletion) {
				close(blocked)
				<-release
				all.done(wc)
			}
		}
		if _, err := e.QP.PostRecv(&verbs.RecvRequest{SGE: b, Done: done}); err != nil {
			t.Fatal(err)
		}
	}
	before := e.QP.Stats()
	send := func(k int) {
		var wrs []*verbs.WorkRequest
		for range k {
			wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend})
		}
		p.active.must(wrs...)
	}
	send(1)
	<-blocked
	e.recv(all, b) // the completed Receive has freed its slot
	send(n)
	var wrs []*verbs.WorkRequest
	for range n {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
	}
	e.post(all, wrs...)
	const total = 2*n + 1
	completed := func() int {
		st := e.QP.Stats()
		return int(st.SendCompletions - before.SendCompletions + st.RecvCompletions - before.RecvCompletions)
	}
	if live {
		for end := time.Now().Add(waitTimeout); completed() < total; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("completed requests while a handler blocks: got %d, want %d", completed(), total)
			}
		}
	} else {
		time.Sleep(time.Second) // without live statistics, wait until the CQ should be full
	}
	if k := len(all.all()); k != 0 {
		t.Errorf("handlers called while another one blocks: got %d, want 0", k)
	}
	close(release)
	for _, wc := range all.wait(t, total) {
		if wc.Status != verbs.StatusSuccess {
			t.Errorf("%v: got %v, want success", wc.Opcode, wc.Status)
		}
	}
	p.sync(p.active)
	if k := len(all.all()); k != total {
		t.Errorf("completions: got %d, want %d", k, total)
	}
}
