package verbstest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var accessTests = []conformanceTest{
	{"AccessRefused", verbs.CapFastReg, testAccessRefused},
	{"OtherStream", verbs.CapFastReg, testOtherStream},
	{"BadRemoteInvalidate", verbs.CapFastReg | verbs.CapRemoteInv, testBadRemoteInvalidate},
	{"LocalInvFences", verbs.CapFastReg, testLocalInvFences},
	{"DeregFences", verbs.CapFastReg, testDeregFences},
	{"ReadFence", verbs.CapFastReg, testReadFence},
}

// guarded is memory with known octets before, in and behind a registration.
const (
	guardedSize = 3 * 4096
	guardedFrom = 4096
	guardedLen  = 4096
	guardedIOVA = 0x7000
)

// testAccessRefused: what the registration does not allow is not done, the connection ends at both
// ends, and an RDMA Read says why.
func testAccessRefused(t *testing.T, s *suite) {
	for name, c := range map[string]struct {
		op      verbs.Opcode
		access  verbs.Access
		rkey    func(verbs.RKey) verbs.RKey
		off     int64 // from the start of the registration
		wraps   bool  // from the end of all addresses
		n       int
		invalid bool // LocalInv first
		dereg   bool // Dereg first
	}{
		"write, stale key": {op: verbs.OpRDMAWrite, access: forWriting,
			rkey: func(k verbs.RKey) verbs.RKey { return k.WithKey(k.Key() - 1) }, n: 8},
		"write, other index": {op: verbs.OpRDMAWrite, access: forWriting,
			rkey: func(k verbs.RKey) verbs.RKey { return k ^ 1<<20 }, n: 8},
		"write, no right":         {op: verbs.OpRDMAWrite, access: verbs.AccessRemoteRead, n: 8},
		"write, before":           {op: verbs.OpRDMAWrite, access: forWriting, off: -1, n: 8},
		"write, behind":           {op: verbs.OpRDMAWrite, access: forWriting, off: guardedLen, n: 1},
		"write, over the end":     {op: verbs.OpRDMAWrite, access: forWriting, off: guardedLen - 7, n: 8},
		"write, far over the end": {op: verbs.OpRDMAWrite, access: forWriting, off: 1, n: guardedSize - guardedFrom},
		"write, address wraps":    {op: verbs.OpRDMAWrite, access: forWriting, off: -4, wraps: true, n: 8},
		"write, invalidated":      {op: verbs.OpRDMAWrite, access: forWriting, n: 8, invalid: true},
		"write, deregistered":     {op: verbs.OpRDMAWrite, access: forWriting, n: 8, dereg: true},
		"read, stale key": {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead,
			rkey: func(k verbs.RKey) verbs.RKey { return k.WithKey(k.Key() + 1) }, n: 8},
		"read, other index": {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead,
			rkey: func(k verbs.RKey) verbs.RKey { return k ^ 1<<20 }, n: 8},
		"read, no right":            {op: verbs.OpRDMARead, access: forWriting, n: 8},
		"read, over the end":        {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead, off: guardedLen - 7, n: 8},
		"read, before":              {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead, off: -8, n: 8},
		"read, address wraps":       {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead, off: -4, wraps: true, n: 8},
		"read, invalidated":         {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead, n: 8, invalid: true},
		"read, deregistered":        {op: verbs.OpRDMARead, access: verbs.AccessRemoteRead, n: 8, dereg: true},
		"write, MR was never valid": {op: verbs.OpRDMAWrite, n: 8},
		"read, local right alone":   {op: verbs.OpRDMARead, access: verbs.AccessLocalWrite, n: 8},
	} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).open()
			mem := p.active.buffer(guardedSize)
			pattern(mem.Buf, 0x33)
			clean := append([]byte(nil), mem.Buf...)
			m, err := p.active.pd.AllocMR(8)
			if err != nil {
				t.Fatal(err)
			}
			w := window{mr: m, rkey: m.RKey(), iova: guardedIOVA}
			if c.access != 0 {
				w = p.active.fastReg(m, 0x80, c.access, guardedIOVA, mem.Buf[guardedFrom:][:guardedLen])
			}
			if c.invalid {
				p.active.localInv(w)
			}
			if c.dereg {
				if err := m.Dereg(); err != nil {
					t.Fatal(err)
				}
			} else {
				t.Cleanup(func() { m.Dereg() })
			}
			key := w.rkey
			if c.rkey != nil {
				key = c.rkey(key)
			}
			addr := w.iova + uint64(c.off)
			if c.wraps {
				addr = uint64(c.off)
			}
			peer := p.passive.buffer(c.n)
			pattern(peer.Buf, 0x44)
			peerClean := append([]byte(nil), peer.Buf...)
			out := newComps()
			p.passive.post(out, &verbs.WorkRequest{Opcode: c.op, RKey: key, RemoteAddr: addr,
				SGList: []verbs.SGE{peer}})
			cause := p.active.goneWithin()
			told := p.passive.goneWithin()
			wc := out.wait(t, 1)[0]
			if c.op == verbs.OpRDMARead {
				a := p.active.dev.Attrs() // siw's verbs do not tell why
				tells := a.Caps.Has(verbs.CapTerminates) || a.Transport == verbs.TransportIB
				if wc.Status != verbs.StatusRemAccessErr && (tells || wc.Status == verbs.StatusSuccess) {
					t.Errorf("RDMA Read: %v, want %v", wc.Status, verbs.StatusRemAccessErr)
				}
				if !bytes.Equal(peer.Buf, peerClean) {
					t.Error("octets were read")
				}
			}
			// the segments inside the bounds may have been placed before the one that is not
			if c.n > guardedLen {
				copy(mem.Buf[guardedFrom:][:guardedLen], clean[guardedFrom:])
			}
			if !bytes.Equal(mem.Buf, clean) {
				t.Errorf("octet %d was written", firstDifference(mem.Buf, clean))
			}
			if p.active.dev.Attrs().Caps.Has(verbs.CapTerminates) {
				var te *verbs.TerminateError
				if !errors.As(cause, &te) || !te.Local {
					t.Errorf("cause %v, want a Terminate of this side", cause)
				}
				if !errors.As(told, &te) || te.Local {
					t.Errorf("the peer was told %v, want a Terminate of the other side", told)
				}
				if p.active.qp.Stats().RemoteAccessErrors == 0 {
					t.Error("the refusal was not counted")
				}
			}
		})
	}
}

// testOtherStream: a registration made on one connection is nothing to another, in the same PD or
// not.
func testOtherStream(t *testing.T, s *suite) {
	prov := s.newProvider(t)
	l := listen(t, prov, s.laddr)
	for _, op := range []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead} {
		p1 := connectPair(t, prov, l, options{}).open()
		p2 := connectPair(t, prov, l, options{}).open()
		mem := p1.active.buffer(64)
		pattern(mem.Buf, 1)
		clean := append([]byte(nil), mem.Buf...)
		w := p1.active.fastReg(p1.active.mr(1), 5, forWriting|verbs.AccessRemoteRead, 0, mem.Buf)
		out := newComps()
		p2.passive.post(out, &verbs.WorkRequest{Opcode: op, RKey: w.rkey, RemoteAddr: w.iova,
			SGList: []verbs.SGE{p2.passive.buffer(8)}})
		p2.active.goneWithin()
		if !bytes.Equal(mem.Buf, clean) {
			t.Errorf("%v by another connection got through", op)
		}
		p1.open() // the innocent connection lives
	}
}

// testBadRemoteInvalidate: a key that is not valid on the stream cannot be invalidated by the peer.
func testBadRemoteInvalidate(t *testing.T, s *suite) {
	for _, name := range []string{"unknown", "invalid already", "stale key"} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).open()
			w := p.active.fastReg(p.active.mr(1), 5, forWriting, 0, p.active.buffer(8).Buf)
			key := w.rkey
			switch name {
			case "unknown":
				key ^= 1 << 12
			case "invalid already":
				p.active.localInv(w)
			case "stale key":
				key = key.WithKey(4)
			}
			in := newComps()
			p.active.recv(in, p.active.buffer(8))
			p.passive.post(newComps(), &verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: key})
			p.active.goneWithin()
			if wc := in.wait(t, 1)[0]; wc.Status == verbs.StatusSuccess {
				t.Error("the Receive completed")
			}
		})
	}
}

// fenceRounds is how many connections a fence test ruins.
const fenceRounds = 12

// stream keeps RDMA Writes (or Reads) of the whole window coming until the connection ends.
func stream(e *endpoint, op verbs.Opcode, w window, sge verbs.SGE) {
	done := newComps()
	for {
		_, err := e.qp.PostSend(&verbs.WorkRequest{Opcode: op, Signaled: true, Done: done.done, RKey: w.rkey,
			RemoteAddr: w.iova, SGList: []verbs.SGE{sge}})
		switch {
		case errors.Is(err, verbs.ErrQueueFull):
			time.Sleep(50 * time.Microsecond)
		case err != nil:
			return
		}
	}
}

// fence lets the peer write while kill revokes the memory, and then looks whether any octet still
// changes.
func fence(t *testing.T, s *suite, kill func(e *endpoint, w window, m verbs.MR)) {
	const size = 200000
	for round := range fenceRounds {
		p := s.pair(t, options{}).open()
		mem, src := p.active.buffer(size), p.passive.buffer(size)
		pattern(src.Buf, 0x99)
		m, err := p.active.pd.AllocMR(depth)
		if err != nil {
			t.Fatal(err)
		}
		w := p.active.fastReg(m, 1, forWriting, 0, mem.Buf)
		stopped := make(chan struct{})
		go func() { defer close(stopped); stream(p.passive, verbs.OpRDMAWrite, w, src) }()
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		kill(p.active, w, m)
		// From here on the memory is the consumer's. The race detector does not see the device; the
		// octets do.
		for i := range mem.Buf {
			mem.Buf[i] = byte(round)
		}
		p.active.goneWithin()
		<-stopped
		for i, b := range mem.Buf {
			if b != byte(round) {
				t.Fatalf("round %d: octet %d was written after the end of the registration", round, i)
			}
		}
	}
}

func testLocalInvFences(t *testing.T, s *suite) {
	fence(t, s, func(e *endpoint, w window, m verbs.MR) {
		if st := e.do(&verbs.WorkRequest{Opcode: verbs.OpLocalInv,
			InvalidateRKey: w.rkey})[0].Status; st != verbs.StatusSuccess {
			e.t.Errorf("LocalInv under load: %v", st)
		}
		e.t.Cleanup(func() { m.Dereg() })
	})
}

func testDeregFences(t *testing.T, s *suite) {
	fence(t, s, func(e *endpoint, _ window, m verbs.MR) {
		if err := m.Dereg(); err != nil {
			e.t.Errorf("Dereg under load: %v", err)
		}
	})
}

// testReadFence: after LocalInv no octet leaves any more.
func testReadFence(t *testing.T, s *suite) {
	const size = 200000
	const before, after = 0x0b, 0xaf
	for range fenceRounds {
		p := s.pair(t, options{}).open()
		mem, dst := p.active.buffer(size), p.passive.buffer(size)
		for i := range mem.Buf {
			mem.Buf[i] = before
		}
		w := p.active.fastReg(p.active.mr(depth), 1, verbs.AccessRemoteRead, 0, mem.Buf)
		stopped := make(chan struct{})
		go func() { defer close(stopped); stream(p.passive, verbs.OpRDMARead, w, dst) }()
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		p.active.localInv(w)
		for i := range mem.Buf {
			mem.Buf[i] = after
		}
		p.active.goneWithin()
		<-stopped
		p.passive.qp.Drain()
		if i := bytes.IndexByte(dst.Buf, after); i >= 0 {
			t.Fatalf("octet %d was read after the end of the registration", i)
		}
	}
}
