package verbstest

import (
	"errors"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
	for name, key := range map[string]func(e *Endpoint, w window) verbs.RKey{
		"unknown":   func(_ *Endpoint, w window) verbs.RKey { return w.rkey ^ 1<<25 },
		"stale key": func(_ *Endpoint, w window) verbs.RKey { return w.rkey.WithKey(8) },
		"destroyed": func(e *Endpoint, w window) verbs.RKey {
			succeeds(e.T, "Dereg", w.mr.Dereg())
			return w.rkey
		},
		"of another PD": func(e *Endpoint, _ window) verbs.RKey {
			foreign, err := mustPD(e.T, e.Dev).AllocMR(1)
			kit.Must(e.T, err)
			e.T.Cleanup(func() { foreign.Dereg() })
			return foreign.RKey()
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).sendFirst()
			m, err := p.active.PD.AllocMR(1)
			kit.Must(t, err)
			t.Cleanup(func() { m.Dereg() })
			w := p.active.fastReg(m, 9, remoteWrite, 0, p.active.Buffer(8).Buf)
			l := p.active.do(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: key(p.active, w)},
				&verbs.WorkRequest{Opcode: verbs.OpSend})
			if st := l[0].Status; !failed(st) {
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
	kit.Must(t, err)
	kit.Must(t, m.Dereg())
	fails(t, "second Dereg", m.Dereg())
	out := newCompletions()
	wr := &verbs.WorkRequest{Opcode: verbs.OpFastReg, Done: out.done, MR: m, Access: remoteWrite,
		Segs: [][]byte{p.active.Buffer(8).Buf}}
	if _, err := p.active.QP.PostSend(wr); err != nil {
		return // refused by the post
	}
	if wc := out.wait(t, 1)[0]; !failed(wc.Status) {
		t.Errorf("FastReg of a deregistered MR: got %v, want an error other than a flush", wc.Status)
	}
	p.active.WaitDisconnect()
}

// testNoReadDepth checks that an RDMA Read cannot be posted without InitiatorDepth. The connection
// stays usable.
func testNoReadDepth(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, e := resolve(t, p, l.Addr())
	req, connected := beginConnect(t, id, l, verbs.ConnParam{ResponderResources: 1})
	peer := newEndpoint(t, req, options{})
	kit.Must(t, req.Accept(Context(t), verbs.ConnParam{}))
	kit.Must(t, <-connected)
	wr := &verbs.WorkRequest{Opcode: verbs.OpRDMARead, Done: func(*verbs.WorkCompletion) {},
		SGList: []verbs.SGE{e.Buffer(8)}, RKey: 1}
	if bad, err := e.QP.PostSend(wr); !errors.Is(err, verbs.ErrInvalid) || bad != wr {
		t.Errorf("RDMA Read without InitiatorDepth: got %v, want ErrInvalid", err)
	}
	(&pair{active: e, passive: peer}).sendFirst()
}

func testAcceptErrors(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, _ := resolve(t, p, l.Addr())
	req, connected := beginConnect(t, id, l, depthOne)
	wantConnError(t, "accept without a QP", req.Accept(Context(t), depthOne), verbs.ConnLocal)
	newEndpoint(t, req, options{})
	long := depthOne
	long.PrivateData = make([]byte, 1000)
	wantConnError(t, "accept with 1000 bytes of private data", req.Accept(Context(t), long), verbs.ConnLocal)
	succeeds(t, "accept after failed ones", req.Accept(Context(t), depthOne))
	kit.Must(t, <-connected)
	wantConnError(t, "accept twice", req.Accept(Context(t), depthOne), verbs.ConnLocal)
}

// testRejectErrors checks that Reject closes the ConnID even when it fails, so that the peer does
// not wait.
func testRejectErrors(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, _ := resolve(t, p, l.Addr())
	req, connected := beginConnect(t, id, l, depthOne)
	wantConnError(t, "reject with 1000 bytes of private data", req.Reject(make([]byte, 1000)), verbs.ConnLocal)
	var ce *verbs.ConnError
	if err := <-connected; !errors.As(err, &ce) {
		t.Errorf("connect: got %v, want a *verbs.ConnError", err)
	}
	fails(t, "second Reject", req.Reject(nil))
}

func testClosedConnID(t *testing.T, s *suite) {
	p, l := s.listen(t)
	id, err := p.Resolve(Context(t), l.Addr())
	kit.Must(t, err)
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 4)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	kit.Must(t, id.Close())
	_, err = id.CreateQP(pd, attr)
	failsWith(t, "create QP on a closed ConnID", err, verbs.ErrInvalid)
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
	p, l := s.listen(t)
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
	id := s.unconnected(t)
	dev := id.Device()
	pd, cq := mustPD(t, dev), mustCQ(t, dev, 4)
	freedPD, err := dev.AllocPD()
	kit.Must(t, err)
	closedCQ, err := dev.CreateCQ(4)
	kit.Must(t, err)
	kit.Must(t, errors.Join(freedPD.Dealloc(), closedCQ.Close()))
	fails(t, "second Dealloc", freedPD.Dealloc())
	_, err = freedPD.RegMR(make([]byte, 8))
	fails(t, "RegMR in a deallocated PD", err)
	_, err = freedPD.AllocMR(1)
	fails(t, "AllocMR in a deallocated PD", err)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	_, err = id.CreateQP(freedPD, attr)
	fails(t, "CreateQP in a deallocated PD", err)
	attr.RecvCQ = closedCQ
	_, err = id.CreateQP(pd, attr)
	fails(t, "CreateQP with a closed CQ", err)
	// The failed calls must not hold references.
	kit.Must(t, pd.Dealloc())
	kit.Must(t, cq.Close())
	_, err = dev.CreateCQ(dev.Attrs().MaxCQE + 1)
	failsWith(t, "CreateCQ above the device's limit", err, verbs.ErrInvalid)
}

// testForeignResources checks that a QP refuses resources of another device.
func testForeignResources(t *testing.T, s *suite) {
	id, there := s.unconnected(t), s.unconnected(t)
	if id.Device() == there.Device() {
		t.Skip("all providers share one device")
	}
	pd, cq := mustPD(t, id.Device()), mustCQ(t, id.Device(), 8)
	otherPD, otherCQ := mustPD(t, there.Device()), mustCQ(t, there.Device(), 8)
	attr := verbs.QPInitAttr{SendCQ: cq, RecvCQ: cq, MaxSendWR: 1, MaxRecvWR: 1}
	_, err := id.CreateQP(otherPD, attr)
	failsWith(t, "CreateQP with a PD of another device", err, verbs.ErrInvalid)
	attr.RecvCQ = otherCQ
	_, err = id.CreateQP(pd, attr)
	failsWith(t, "CreateQP with a CQ of another device", err, verbs.ErrInvalid)
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
		kit.Eventually(t, "completed requests while a handler blocks", func() bool { return completed() >= total })
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
