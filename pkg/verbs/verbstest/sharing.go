package verbstest

import (
	"bytes"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var sharingTests = []conformanceTest{
	{"SharedPD", verbs.CapFastReg, testSharedPD},
	{"OtherStream", verbs.CapFastReg, testOtherStream},
	{"SharedPDOtherKey", verbs.CapFastReg, testSharedPDOtherKey},
}

// A sharedEnd is a device with a PD and a CQ for several connections.
type sharedEnd struct {
	t  *testing.T
	p  verbs.Provider
	l  verbs.Listener
	pd verbs.PD
	cq verbs.CQ
}

func (s *suite) shared(t *testing.T) *sharedEnd {
	t.Helper()
	e := &sharedEnd{t: t, p: s.newProvider(t)}
	e.l = listen(t, e.p, s.laddr)
	id, err := e.p.Resolve(Context(t), e.l.Addr())
	kit.Must(t, err)
	defer id.Close()
	e.pd, err = id.Device().AllocPD()
	kit.Must(t, err)
	e.cq, err = id.Device().CreateCQ(8 * defaultDepth)
	kit.Must(t, err)
	t.Cleanup(func() { // runs after the cleanups of the connections
		succeeds(t, "close shared completion queue", e.cq.Close())
		succeeds(t, "deallocate shared protection domain", e.pd.Dealloc())
	})
	return e
}

// pair connects another active end that uses the shared PD and CQ.
func (e *sharedEnd) pair() *pair {
	e.t.Helper()
	return connectPair(e.t, e.p, e.l, options{PD: e.pd, CQ: e.cq}).sendFirst()
}

// useAll transfers data over p in each direction, with m registered at the active end. useAll
// leaves m invalid.
func (p *pair) useAll(m verbs.MR, key uint8) {
	t := p.active.T
	t.Helper()
	mem, out, back := p.active.Buffer(9000), p.passive.Buffer(9000), p.passive.Buffer(9000)
	pattern(out.Buf, key)
	w := p.active.fastReg(m, key, remoteWrite|verbs.AccessRemoteRead, 0x4000, mem.Buf)
	p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{out}})
	p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{back}})
	p.sync(p.passive)
	p.active.localInv(w)
	if !bytes.Equal(mem.Buf, out.Buf) || !bytes.Equal(back.Buf, out.Buf) {
		t.Errorf("key %d: written or read data differs", key)
	}
}

// testSharedPD ends one of two connections that share a PD and a CQ, in several ways. The other one
// keeps working, including its pending requests. The MRs of the ended connection can be
// deregistered, and a third connection can use the PD and CQ.
func testSharedPD(t *testing.T, s *suite) {
	for name, end := range map[string]func(p *pair){
		"local close": func(p *pair) { p.active.ID.Close() },
		"local drain": func(p *pair) { p.active.QP.Drain() },
		"peer close":  func(p *pair) { p.passive.ID.Close(); p.active.WaitDisconnect() },
		"refused write": func(p *pair) {
			p.passive.post(newCompletions(),
				badWrite(p.passive))
			p.active.WaitDisconnect()
		},
		"local error": func(p *pair) {
			p.active.post(newCompletions(), &verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: 1})
			p.active.WaitDisconnect()
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := s.shared(t)
			ended, other := e.pair(), e.pair()
			orphan, err := e.pd.AllocMR(depth)
			kit.Must(t, err)
			mem := ended.active.Buffer(64)
			ended.active.fastReg(orphan, 1, remoteWrite, 0, mem.Buf)
			m := other.active.MR(depth)
			otherRecv, endedRecv := newCompletions(), newCompletions()
			in := other.active.Buffer(8)
			other.active.recv(otherRecv, in)
			ended.active.recv(endedRecv, ended.active.Buffer(8))

			end(ended)
			ended.active.QP.Drain()
			if wc := endedRecv.wait(t, 1)[0]; wc.Status != verbs.StatusWRFlushErr || wc.QP != ended.active.QP {
				t.Errorf("Receive of the ended connection: got %+v, want a flush", wc)
			}
			if n := len(otherRecv.all()); n != 0 {
				t.Error("a Receive of the other connection was flushed")
			}
			other.passive.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{other.passive.Buffer(8)}})
			if wc := otherRecv.wait(t, 1)[0]; wc.Status != verbs.StatusSuccess || wc.QP != other.active.QP {
				t.Errorf("Receive of the other connection: got %+v, want success", wc)
			}
			other.useAll(m, 2)
			succeeds(t, "deregister an MR that was valid on the ended connection", orphan.Dereg())
			third := e.pair()
			third.useAll(m, 3) // each connection of the PD may use an invalid MR
			other.useAll(m, 4)
			if len(other.active.Disconnects) != 0 {
				t.Error("OnDisconnect was called for the other connection")
			}
		})
	}
}

// badWrite returns an RDMA Write that the peer refuses.
func badWrite(e *Endpoint) *verbs.WorkRequest {
	return &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1, SGList: []verbs.SGE{e.Buffer(8)}}
}

// testOtherStream checks that a connection refuses the key of a connection with another PD.
func testOtherStream(t *testing.T, s *suite) {
	for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead} {
		e := s.shared(t)
		other := connectPair(t, e.p, e.l, options{}).sendFirst()
		otherKey(t, op, e.pair(), other, false)
	}
}

// testSharedPDOtherKey checks that a key of one connection is refused on another connection of the
// same PD, even after the first one has ended. testSharedPDOtherKey covers RDMA Write, RDMA Read,
// Send With Invalidate and LocalInv.
func testSharedPDOtherKey(t *testing.T, s *suite) {
	if s.caps(t).Has(verbs.CapPerIOReg) {
		t.Skip("keys of this device are valid on every connection of the protection domain")
	}
	for _, state := range []string{"connected", "disconnected"} {
		for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead, verbs.OpSendWithInv, verbs.OpLocalInv} {
			t.Run(op.String()+", owner "+state, func(t *testing.T) {
				e := s.shared(t)
				otherKey(t, op, e.pair(), e.pair(), state == "disconnected")
			})
		}
	}
}

// otherKey uses a key of owner on the connection other.
func otherKey(t *testing.T, op verbs.Opcode, owner, other *pair, ownerEnded bool) {
	t.Helper()
	mem := owner.active.Buffer(64)
	pattern(mem.Buf, 7)
	original := bytes.Clone(mem.Buf)
	w := owner.active.fastReg(owner.active.MR(1), 5, remoteWrite|verbs.AccessRemoteRead, 0, mem.Buf)
	if ownerEnded {
		owner.active.QP.Drain()
	}
	if op == verbs.OpLocalInv {
		wc := other.active.do(&verbs.WorkRequest{Opcode: op, InvalidateRKey: w.rkey})[0]
		if !failed(wc.Status) {
			t.Errorf("LocalInv: got %v, want an error other than a flush", wc.Status)
		}
	} else {
		other.active.recv(newCompletions(), other.active.Buffer(8))
		other.passive.post(newCompletions(), &verbs.WorkRequest{Opcode: op, RKey: w.rkey, RemoteAddr: w.iova,
			InvalidateRKey: w.rkey, SGList: []verbs.SGE{other.passive.Buffer(8)}})
	}
	other.active.WaitDisconnect()
	if !bytes.Equal(mem.Buf, original) {
		t.Errorf("%v: memory was written by the other connection", op)
	}
	if !ownerEnded { // the owner may still use its registration
		owner.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
			SGList: []verbs.SGE{owner.passive.Buffer(8)}})
	}
}
