package verbstest

import (
	"errors"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// failureTests: each error that verbs names, where no other group has it. (ErrQPState and
// ErrQueueFull are among the messages, ErrBusy among the resources; of the statuses, those of
// lengths, accesses and flushes are where they come about.)
var failureTests = []conformanceTest{
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

// testLocalInvErrors: a LocalInv that names no registration of the QP fails by itself, and ends the
// connection.
func testLocalInvErrors(t *testing.T, s *suite) {
	for _, name := range []string{"unknown", "stale key", "destroyed", "of another PD"} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).open()
			m, err := p.active.pd.AllocMR(1)
			if err != nil {
				t.Fatal(err)
			}
			w := p.active.fastReg(m, 9, forWriting, 0, p.active.buffer(8).Buf)
			key := w.rkey
			switch name {
			case "unknown":
				key ^= 1 << 25
			case "stale key":
				key = key.WithKey(8)
			case "of another PD":
				foreign, err := mustPD(t, p.active.dev).AllocMR(1)
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
				t.Errorf("LocalInv: %v, want an error of its own", st)
			}
			if st := l[1].Status; st != verbs.StatusWRFlushErr {
				t.Errorf("the request behind it: %v, want %v", st, verbs.StatusWRFlushErr)
			}
			p.active.goneWithin()
			p.passive.goneWithin()
		})
	}
}

// testFastRegOfDestroyed: a destroyed MR cannot be registered.
func testFastRegOfDestroyed(t *testing.T, s *suite) {
	p := s.pair(t, options{}).open()
	m, err := p.active.pd.AllocMR(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Dereg(); err != nil {
		t.Fatal(err)
	}
	if err := m.Dereg(); err == nil {
		t.Error("an MR was destroyed twice")
	}
	out := newComps()
	wr := &verbs.WorkRequest{Opcode: verbs.OpFastReg, Done: out.done, MR: m, Access: forWriting,
		Segs: [][]byte{p.active.buffer(8).Buf}}
	if _, err := p.active.qp.PostSend(wr); err != nil {
		return // refused at once
	}
	if wc := out.wait(t, 1)[0]; wc.Status == verbs.StatusSuccess || wc.Status == verbs.StatusWRFlushErr {
		t.Errorf("FastReg of a destroyed MR: %v, want an error of its own", wc.Status)
	}
	p.active.goneWithin()
}

// handshake brings an endpoint's connect and the request that it makes together.
func handshake(t *testing.T, p verbs.Provider, l verbs.Listener, param verbs.ConnParam) (e *endpoint,
	req verbs.ConnRequest, connected chan error) {
	t.Helper()
	id, e := resolve(t, p, l.Addr())
	connected = make(chan error, 1)
	go func() { connected <- id.Connect(within(t), param) }()
	req, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return e, req, connected
}

// testNoReadDepth: who asked for no InitiatorDepth cannot post an RDMA Read; the connection is none
// the worse for it.
func testNoReadDepth(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	var o options
	o.defaults()
	e, req, connected := handshake(t, p, l, verbs.ConnParam{ResponderResources: 1})
	peer := newEndpoint(t, req, &o)
	if err := req.Accept(within(t), verbs.ConnParam{}); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	wr := &verbs.WorkRequest{Opcode: verbs.OpRDMARead, Done: func(*verbs.WorkCompletion) {},
		SGList: []verbs.SGE{e.buffer(8)}, RKey: 1}
	if bad, err := e.qp.PostSend(wr); !errors.Is(err, verbs.ErrInvalid) || bad != wr {
		t.Errorf("RDMA Read without a depth: %v, want ErrInvalid", err)
	}
	(&pair{active: e, passive: peer}).open()
}

func testAcceptErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	var o options
	o.defaults()
	_, req, connected := handshake(t, p, l, someDepths)
	wantConnError(t, "accept without a QP", req.Accept(within(t), someDepths), verbs.ConnLocal)
	newEndpoint(t, req, &o)
	long := someDepths
	long.PrivateData = make([]byte, 1000)
	wantConnError(t, "accept with 1000 octets of private data", req.Accept(within(t), long), verbs.ConnLocal)
	if err := req.Accept(within(t), someDepths); err != nil {
		t.Errorf("accept after the wrong ones: %v", err)
	}
	if err := <-connected; err != nil {
		t.Error(err)
	}
	wantConnError(t, "accept twice", req.Accept(within(t), someDepths), verbs.ConnLocal)
}

// testRejectErrors: Reject closes the ConnID even when it fails, so that the peer is not left
// waiting.
func testRejectErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	_, req, connected := handshake(t, p, l, someDepths)
	wantConnError(t, "reject with 1000 octets of private data", req.Reject(make([]byte, 1000)), verbs.ConnLocal)
	var ce *verbs.ConnError
	if err := <-connected; !errors.As(err, &ce) {
		t.Errorf("connect: %v, want a *verbs.ConnError", err)
	}
	if err := req.Reject(nil); err == nil {
		t.Error("rejected what was closed")
	}
}

func testClosedConnID(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	id, err := p.Resolve(within(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 4)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	if err := id.Close(); err != nil {
		t.Error(err)
	}
	if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("create a QP on a closed ConnID: %v, want ErrInvalid", err)
	}
	for range 8 { // none of them reaches the peer
		id, e := resolve(t, p, l.Addr())
		id.Close()
		wantConnError(t, "connect a closed ConnID", id.Connect(within(t), someDepths), verbs.ConnLocal)
		if _, err := e.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpSend,
			Done: func(*verbs.WorkCompletion) {}}); !errors.Is(err, verbs.ErrQPState) {
			t.Errorf("post on a closed ConnID: %v, want ErrQPState", err)
		}
	}
	connectPair(t, p, l, options{}).open() // the first that is accepted is this one
}

func testListenErrors(t *testing.T, s *suite) {
	p := s.newProvider(t)
	l := listen(t, p, s.laddr)
	if second, err := p.Listen(within(t), l.Addr()); err == nil {
		second.Close()
		t.Error("one address was listened on twice")
	}
	l.Close()
	again, err := p.Listen(within(t), l.Addr())
	if err != nil {
		t.Fatalf("listen again after Close: %v", err)
	}
	again.Close()
}

// testDestroyedResources: what was released cannot be used.
func testDestroyedResources(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	id, err := s.newProvider(t).Resolve(within(t), p.active.id.RemoteAddr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	dev := id.Device()
	pd, cq := mustPD(t, dev), mustCQ(t, dev, 4)
	gonePD, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	goneCQ, err := dev.CreateCQ(4)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(gonePD.Dealloc(), goneCQ.Close()); err != nil {
		t.Fatal(err)
	}
	if err := gonePD.Dealloc(); err == nil {
		t.Error("a PD was deallocated twice")
	}
	if _, err := gonePD.RegMR(make([]byte, 8)); err == nil {
		t.Error("memory was registered in a deallocated PD")
	}
	if _, err := gonePD.AllocMR(1); err == nil {
		t.Error("an MR was allocated in a deallocated PD")
	}
	if _, err := id.CreateQP(gonePD, verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}); err == nil {
		t.Error("a QP was made in a deallocated PD")
	}
	if _, err := id.CreateQP(pd, verbs.QPInitAttr{SendCQ: cq, RecvCQ: goneCQ, MaxSendWR: 1, MaxRecvWR: 1}); err == nil {
		t.Error("a QP was made on a closed CQ")
	}
	// None of the refusals holds anything.
	if err := pd.Dealloc(); err != nil {
		t.Error(err)
	}
	if err := cq.Close(); err != nil {
		t.Error(err)
	}
	if _, err := dev.CreateCQ(dev.Attrs().MaxCQE + 1); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("a CQ deeper than the device's limit: %v, want ErrInvalid", err)
	}
}

// testForeignResources: a QP takes nothing of another device.
func testForeignResources(t *testing.T, s *suite) {
	here, there := s.pair(t, options{noConnect: true}), s.pair(t, options{noConnect: true})
	if here.active.dev == there.active.dev {
		t.Skip("all providers share one device")
	}
	id, err := s.newProvider(t).Resolve(within(t), here.active.id.RemoteAddr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 8)
	otherPD, otherCQ := mustPD(t, there.active.dev), mustCQ(t, there.active.dev, 8)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	if _, err := id.CreateQP(otherPD, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("a PD of another device: %v, want ErrInvalid", err)
	}
	attr.RecvCQ = otherCQ
	if _, err := id.CreateQP(pd, attr); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("a CQ of another device: %v, want ErrInvalid", err)
	}
}

// testRecvChainError: of a chain of Receives, those before the bad one are queued, and it and those
// behind are not.
func testRecvChainError(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	c := newComps()
	b := p.active.buffer(8)
	last := &verbs.RecvRequest{SGE: b, Done: c.done}
	bad := &verbs.RecvRequest{SGE: b, Next: last}
	first := &verbs.RecvRequest{SGE: b, Done: c.done, Next: bad}
	if at, err := p.active.qp.PostRecv(first); !errors.Is(err, verbs.ErrInvalid) || at != bad {
		t.Errorf("chain with a Receive that has no handler: %v, want ErrInvalid at the second", err)
	}
	p.active.qp.Drain()
	if l := c.all(); len(l) != 1 || l[0].Status != verbs.StatusWRFlushErr {
		t.Errorf("completions of that chain: %s, want 1 flushed", summary(l))
	}
}

// testFullCQ: a CQ of just the depth that its queues need holds all their completions while a
// handler does not return, and loses none.
func testFullCQ(t *testing.T, s *suite) {
	const n = 8
	live := s.caps(t).Has(verbs.CapLiveStats)
	p := s.pair(t, options{sendDepth: n, recvDepth: n}).open()
	e := p.passive
	hold, held := make(chan struct{}), make(chan struct{})
	all := newComps()
	b := e.buffer(8)
	for i := range n {
		done := all.done
		if i == 0 {
			done = func(wc *verbs.WorkCompletion) {
				close(held)
				<-hold
				all.done(wc)
			}
		}
		if _, err := e.qp.PostRecv(&verbs.RecvRequest{SGE: b, Done: done}); err != nil {
			t.Fatal(err)
		}
	}
	before := e.qp.Stats()
	send := func(k int) {
		var wrs []*verbs.WorkRequest
		for range k {
			wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend})
		}
		p.active.must(wrs...)
	}
	send(1)
	<-held
	e.recv(all, b) // the held one has left its slot
	send(n)
	var wrs []*verbs.WorkRequest
	for range n {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite})
	}
	e.post(all, wrs...)
	const total = 2*n + 1
	completed := func() int {
		st := e.qp.Stats()
		return int(st.SendCompletions - before.SendCompletions + st.RecvCompletions - before.RecvCompletions)
	}
	if live {
		for end := time.Now().Add(patience); completed() < total; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d of %d requests completed while a handler was held", completed(), total)
			}
		}
	} else {
		time.Sleep(time.Second) // the device tells nobody but the handlers; in time the CQ is full
	}
	if k := len(all.all()); k != 0 {
		t.Errorf("%d handlers were called beside one that had not returned", k)
	}
	close(hold)
	for _, wc := range all.wait(t, total) {
		if wc.Status != verbs.StatusSuccess {
			t.Errorf("%v: %v", wc.Opcode, wc.Status)
		}
	}
	p.sync(p.active)
	if k := len(all.all()); k != total {
		t.Errorf("%d completions, want %d", k, total)
	}
}
