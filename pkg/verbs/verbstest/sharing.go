package verbstest

import (
	"bytes"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var sharingTests = []conformanceTest{
	{"SharedPD", verbs.CapFastReg, testSharedPD},
	{"SharedPDOtherKey", verbs.CapFastReg, testSharedPDOtherKey},
}

// A sharedEnd is a device with a PD and a CQ that several connections use.
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
	id, err := e.p.Resolve(within(t), e.l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer id.Close()
	if e.pd, err = id.Device().AllocPD(); err != nil {
		t.Fatal(err)
	}
	if e.cq, err = id.Device().CreateCQ(8 * defaultDepth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // behind those of the connections
		if err := e.cq.Close(); err != nil {
			t.Errorf("close the shared completion queue: %v", err)
		}
		if err := e.pd.Dealloc(); err != nil {
			t.Errorf("deallocate the shared protection domain: %v", err)
		}
	})
	return e
}

// pair connects another active end on the shared PD and CQ.
func (e *sharedEnd) pair() *pair {
	e.t.Helper()
	return connectPair(e.t, e.p, e.l, options{pd: e.pd, cq: e.cq}).open()
}

// useAll moves data over p in every way, with m registered at the active end, and leaves m invalid.
func (p *pair) useAll(m verbs.MR, key uint8) {
	t := p.active.t
	t.Helper()
	mem, out, back := p.active.buffer(9000), p.passive.buffer(9000), p.passive.buffer(9000)
	pattern(out.Buf, key)
	w := p.active.fastReg(m, key, forWriting|verbs.AccessRemoteRead, 0x4000, mem.Buf)
	p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{out}})
	p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{back}})
	p.sync(p.passive)
	p.active.localInv(w)
	if !bytes.Equal(mem.Buf, out.Buf) || !bytes.Equal(back.Buf, out.Buf) {
		t.Errorf("key %d: what was written or read back differs", key)
	}
}

// testSharedPD: of two connections on one PD and one CQ one is lost, in each way that there is. The
// other goes on, requests under way included; the registrations of the lost one can be destroyed,
// and a third connection takes its place.
func testSharedPD(t *testing.T, s *suite) {
	for name, lose := range map[string]func(p *pair){
		"closed here":   func(p *pair) { p.active.id.Close() },
		"drained here":  func(p *pair) { p.active.qp.Drain() },
		"closed there":  func(p *pair) { p.passive.id.Close(); p.active.goneWithin() },
		"refused write": func(p *pair) { p.passive.post(newComps(), badWrite(p.passive)); p.active.goneWithin() },
		"local error": func(p *pair) {
			p.active.post(newComps(), &verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: 1})
			p.active.goneWithin()
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := s.shared(t)
			lost, lives := e.pair(), e.pair()
			orphan, err := e.pd.AllocMR(depth)
			if err != nil {
				t.Fatal(err)
			}
			mem := lost.active.buffer(64)
			lost.active.fastReg(orphan, 1, forWriting, 0, mem.Buf)
			m := lives.active.mr(depth)
			waiting, doomed := newComps(), newComps()
			in := lives.active.buffer(8)
			lives.active.recv(waiting, in)
			lost.active.recv(doomed, lost.active.buffer(8))

			lose(lost)
			lost.active.qp.Drain()
			if wc := doomed.wait(t, 1)[0]; wc.Status != verbs.StatusWRFlushErr || wc.QP != lost.active.qp {
				t.Errorf("Receive of the lost connection: %+v", wc)
			}
			if n := len(waiting.all()); n != 0 {
				t.Error("a Receive of the other connection was flushed")
			}
			lives.passive.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{lives.passive.buffer(8)}})
			if wc := waiting.wait(t, 1)[0]; wc.Status != verbs.StatusSuccess || wc.QP != lives.active.qp {
				t.Errorf("Receive of the other connection: %+v", wc)
			}
			lives.useAll(m, 2)
			if err := orphan.Dereg(); err != nil {
				t.Errorf("destroy the MR that was valid on the lost connection: %v", err)
			}
			third := e.pair()
			third.useAll(m, 3) // an invalid MR is any connection's of the PD
			lives.useAll(m, 4)
			if len(lives.active.gone) != 0 {
				t.Error("OnDisconnect was called for the connection that lives")
			}
		})
	}
}

// badWrite is an RDMA Write that the peer refuses.
func badWrite(e *endpoint) *verbs.WorkRequest {
	return &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1, SGList: []verbs.SGE{e.buffer(8)}}
}

// testSharedPDOtherKey: a key that is valid on one connection is refused on another of the same PD,
// whether the first lives or not: for RDMA Write and Read, for Send With Invalidate, and for a
// LocalInv posted there.
func testSharedPDOtherKey(t *testing.T, s *suite) {
	if s.caps(t).Has(verbs.CapPerIOReg) {
		t.Skip("the device's keys are good on every connection of the protection domain")
	}
	for _, dead := range []bool{false, true} {
		for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead, verbs.OpSendWithInv, verbs.OpLocalInv} {
			t.Run(op.String()+map[bool]string{false: ", owner lives", true: ", owner lost"}[dead], func(t *testing.T) {
				e := s.shared(t)
				owner, other := e.pair(), e.pair()
				mem := owner.active.buffer(64)
				pattern(mem.Buf, 7)
				clean := append([]byte(nil), mem.Buf...)
				w := owner.active.fastReg(owner.active.mr(1), 5, forWriting|verbs.AccessRemoteRead, 0, mem.Buf)
				if dead {
					owner.active.qp.Drain()
				}
				if op == verbs.OpLocalInv {
					wc := other.active.do(&verbs.WorkRequest{Opcode: op, InvalidateRKey: w.rkey})[0]
					if wc.Status == verbs.StatusSuccess || wc.Status == verbs.StatusWRFlushErr {
						t.Errorf("LocalInv: %v, want an error of its own", wc.Status)
					}
				} else {
					other.active.recv(newComps(), other.active.buffer(8))
					other.passive.post(newComps(), &verbs.WorkRequest{Opcode: op, RKey: w.rkey, RemoteAddr: w.iova,
						InvalidateRKey: w.rkey, SGList: []verbs.SGE{other.passive.buffer(8)}})
				}
				other.active.goneWithin()
				if !bytes.Equal(mem.Buf, clean) {
					t.Error("the memory was written")
				}
				if !dead { // and the registration is still good where it belongs
					owner.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
						SGList: []verbs.SGE{owner.passive.buffer(8)}})
				}
			})
		}
	}
}
