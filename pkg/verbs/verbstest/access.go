package verbstest

import (
	"bytes"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var accessTests = []conformanceTest{
	{"AccessRefused", verbs.CapFastReg, testAccessRefused},
	{"BadRemoteInvalidate", verbs.CapFastReg | verbs.CapRemoteInv, testBadRemoteInvalidate},
	{"LocalInvFences", verbs.CapFastReg, testLocalInvFences},
	{"DeregFences", verbs.CapFastReg, testDeregFences},
	{"ReadFence", verbs.CapFastReg, testReadFence},
	{"Withdraw", verbs.CapFastReg, testWithdraw},
}

// Sizes and addresses of a registration in the middle of a larger buffer with known content.
const (
	guardedSize = 3 * 4096
	guardedFrom = 4096
	guardedLen  = 4096
	guardedIOVA = 0x7000
)

// An accessCase is an access of the peer that the registration does not allow.
type accessCase struct {
	op      verbs.Opcode
	access  verbs.Access // of the registration; 0 means no registration
	rkey    func(verbs.RKey) verbs.RKey
	off     int64 // from the start of the registration
	wraps   bool  // off counts from address 0 instead
	n       int   // bytes
	invalid bool  // LocalInv before the access
	dereg   bool  // Dereg before the access
}

func previousKey(k verbs.RKey) verbs.RKey { return k.WithKey(k.Key() - 1) }
func nextKey(k verbs.RKey) verbs.RKey     { return k.WithKey(k.Key() + 1) }
func otherIndex(k verbs.RKey) verbs.RKey  { return k ^ 1<<20 }

const remoteRead = verbs.AccessRemoteRead

var accessCases = map[string]accessCase{
	"write, stale key":          {op: verbs.OpRDMAWrite, access: remoteWrite, rkey: previousKey, n: 8},
	"write, other index":        {op: verbs.OpRDMAWrite, access: remoteWrite, rkey: otherIndex, n: 8},
	"write, no right":           {op: verbs.OpRDMAWrite, access: remoteRead, n: 8},
	"write, before":             {op: verbs.OpRDMAWrite, access: remoteWrite, off: -1, n: 8},
	"write, after the end":      {op: verbs.OpRDMAWrite, access: remoteWrite, off: guardedLen, n: 1},
	"write, across the end":     {op: verbs.OpRDMAWrite, access: remoteWrite, off: guardedLen - 7, n: 8},
	"write, far across the end": {op: verbs.OpRDMAWrite, access: remoteWrite, off: 1, n: guardedSize - guardedFrom},
	"write, address wraps":      {op: verbs.OpRDMAWrite, access: remoteWrite, off: -4, wraps: true, n: 8},
	"write, invalidated":        {op: verbs.OpRDMAWrite, access: remoteWrite, n: 8, invalid: true},
	"write, deregistered":       {op: verbs.OpRDMAWrite, access: remoteWrite, n: 8, dereg: true},
	"write, MR was never valid": {op: verbs.OpRDMAWrite, n: 8},
	"read, stale key":           {op: verbs.OpRDMARead, access: remoteRead, rkey: nextKey, n: 8},
	"read, other index":         {op: verbs.OpRDMARead, access: remoteRead, rkey: otherIndex, n: 8},
	"read, no right":            {op: verbs.OpRDMARead, access: remoteWrite, n: 8},
	"read, across the end":      {op: verbs.OpRDMARead, access: remoteRead, off: guardedLen - 7, n: 8},
	"read, before":              {op: verbs.OpRDMARead, access: remoteRead, off: -8, n: 8},
	"read, address wraps":       {op: verbs.OpRDMARead, access: remoteRead, off: -4, wraps: true, n: 8},
	"read, invalidated":         {op: verbs.OpRDMARead, access: remoteRead, n: 8, invalid: true},
	"read, deregistered":        {op: verbs.OpRDMARead, access: remoteRead, n: 8, dereg: true},
	"read, local right alone":   {op: verbs.OpRDMARead, access: verbs.AccessLocalWrite, n: 8},
}

// testAccessRefused checks that an access beyond the registration's rights or bounds does nothing.
// The connection ends at both ends, and an RDMA Read completes with the reason.
func testAccessRefused(t *testing.T, s *suite) {
	for name, c := range accessCases {
		t.Run(name, func(t *testing.T) { c.run(t, s.pair(t, options{}).sendFirst()) })
	}
}

func (c *accessCase) run(t *testing.T, p *pair) {
	mem := p.active.Buffer(guardedSize)
	pattern(mem.Buf, 0x33)
	original := bytes.Clone(mem.Buf)
	key, addr := c.register(t, p.active, mem.Buf[guardedFrom:][:guardedLen])
	peer := p.passive.Buffer(c.n)
	pattern(peer.Buf, 0x44)
	peerOriginal := bytes.Clone(peer.Buf)
	out := newCompletions()
	p.passive.post(out, &verbs.WorkRequest{Opcode: c.op, RKey: key, RemoteAddr: addr, SGList: []verbs.SGE{peer}})
	cause, peerCause := p.active.WaitDisconnect(), p.passive.WaitDisconnect()
	wc := out.wait(t, 1)[0]
	if c.op == verbs.OpRDMARead {
		a := p.active.Dev.Attrs() // siw's verbs do not report the reason
		reported := a.Caps.Has(verbs.CapTerminates) || a.Transport == verbs.TransportIB
		if wc.Status != verbs.StatusRemAccessErr && (reported || wc.Status == verbs.StatusSuccess) {
			t.Errorf("RDMA Read: got %v, want %v", wc.Status, verbs.StatusRemAccessErr)
		}
		if !bytes.Equal(peer.Buf, peerOriginal) {
			t.Error("the refused RDMA Read returned data")
		}
	}
	// The device may have placed the segments inside the bounds before the refused one.
	if c.n > guardedLen {
		copy(mem.Buf[guardedFrom:][:guardedLen], original[guardedFrom:])
	}
	if !bytes.Equal(mem.Buf, original) {
		t.Errorf("the refused access wrote byte %d", firstDifference(mem.Buf, original))
	}
	if p.active.Dev.Attrs().Caps.Has(verbs.CapTerminates) {
		wantTerminate(t, cause, true)
		wantTerminate(t, peerCause, false)
		if p.active.QP.Stats().RemoteAccessErrors == 0 {
			t.Error("RemoteAccessErrors: got 0, want at least 1")
		}
	}
}

// register registers mem as the case says. register returns the key and address of the forbidden
// access.
func (c *accessCase) register(t *testing.T, e *Endpoint, mem []byte) (key verbs.RKey, addr uint64) {
	t.Helper()
	m, err := e.PD.AllocMR(8)
	kit.Must(t, err)
	w := window{mr: m, rkey: m.RKey(), iova: guardedIOVA}
	if c.access != 0 {
		w = e.fastReg(m, 0x80, c.access, guardedIOVA, mem)
	}
	if c.invalid {
		e.localInv(w)
	}
	if c.dereg {
		kit.Must(t, m.Dereg())
	} else {
		t.Cleanup(func() { m.Dereg() })
	}
	key, addr = w.rkey, w.iova+uint64(c.off)
	if c.rkey != nil {
		key = c.rkey(key)
	}
	if c.wraps {
		addr = uint64(c.off)
	}
	return key, addr
}

// wantTerminate checks that cause is a Terminate message sent by this side (local) or by the peer.
func wantTerminate(t *testing.T, cause error, local bool) {
	t.Helper()
	var te *verbs.TerminateError
	if !errors.As(cause, &te) || te.Local != local {
		t.Errorf("disconnect cause: got %v, want a Terminate with Local=%v", cause, local)
	}
}

// testBadRemoteInvalidate checks that a peer cannot invalidate a key that is not valid on its
// connection.
func testBadRemoteInvalidate(t *testing.T, s *suite) {
	for _, name := range []string{"unknown", "invalid already", "stale key"} {
		t.Run(name, func(t *testing.T) {
			p := s.pair(t, options{}).sendFirst()
			w := p.active.fastReg(p.active.MR(1), 5, remoteWrite, 0, p.active.Buffer(8).Buf)
			key := w.rkey
			switch name {
			case "unknown":
				key ^= 1 << 12
			case "invalid already":
				p.active.localInv(w)
			case "stale key":
				key = key.WithKey(4)
			}
			in := newCompletions()
			p.active.recv(in, p.active.Buffer(8))
			p.passive.post(newCompletions(), &verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: key})
			p.active.WaitDisconnect()
			if wc := in.wait(t, 1)[0]; wc.Status == verbs.StatusSuccess {
				t.Error("Receive: got success, want an error")
			}
		})
	}
}

// fenceRounds is the number of connections that a fence test ends.
const fenceRounds = 4

// postUntilError posts RDMA Writes or Reads of the whole window until the connection ends.
func postUntilError(e *Endpoint, op verbs.Opcode, w window, sge verbs.SGE, done *completions) {
	for {
		_, err := e.QP.PostSend(&verbs.WorkRequest{Opcode: op, Signaled: true, Done: done.done, RKey: w.rkey,
			RemoteAddr: w.iova, SGList: []verbs.SGE{sge}})
		switch {
		case errors.Is(err, verbs.ErrQueueFull):
			runtime.Gosched()
		case err != nil:
			return
		}
	}
}

// testFence lets the peer write while revoke revokes the memory. testFence then checks that no byte
// changes any more.
func testFence(t *testing.T, s *suite, revoke func(e *Endpoint, w window, m verbs.MR)) {
	const size = 200000
	for round := range fenceRounds {
		p := s.pair(t, options{}).sendFirst()
		mem, src := p.active.Buffer(size), p.passive.Buffer(size)
		pattern(src.Buf, 0x99)
		m, err := p.active.PD.AllocMR(depth)
		kit.Must(t, err)
		w := p.active.fastReg(m, 1, remoteWrite, 0, mem.Buf)
		stopped, done := make(chan struct{}), newCompletions()
		go func() { defer close(stopped); postUntilError(p.passive, verbs.OpRDMAWrite, w, src, done) }()
		done.wait(t, 1+round)
		revoke(p.active, w, m)
		// The consumer owns the memory from here on. The race detector does not see the device's
		// writes, so compare the bytes.
		for i := range mem.Buf {
			mem.Buf[i] = byte(round)
		}
		p.active.WaitDisconnect()
		<-stopped
		for i, b := range mem.Buf {
			if b != byte(round) {
				t.Fatalf("round %d: byte %d was written after the end of the registration", round, i)
			}
		}
	}
}

func testLocalInvFences(t *testing.T, s *suite) {
	testFence(t, s, func(e *Endpoint, w window, m verbs.MR) {
		if st := e.do(&verbs.WorkRequest{Opcode: verbs.OpLocalInv,
			InvalidateRKey: w.rkey})[0].Status; st != verbs.StatusSuccess {
			e.T.Errorf("LocalInv under load: got %v, want success", st)
		}
		e.T.Cleanup(func() { m.Dereg() })
	})
}

func testDeregFences(t *testing.T, s *suite) {
	testFence(t, s, func(e *Endpoint, _ window, m verbs.MR) {
		succeeds(e.T, "Dereg under load", m.Dereg())
	})
}

// testReadFence checks that the peer reads no byte after a LocalInv.
func testReadFence(t *testing.T, s *suite) {
	const size = 200000
	const before, after = 0x0b, 0xaf
	for round := range fenceRounds {
		p := s.pair(t, options{}).sendFirst()
		mem, dst := p.active.Buffer(size), p.passive.Buffer(size)
		for i := range mem.Buf {
			mem.Buf[i] = before
		}
		w := p.active.fastReg(p.active.MR(depth), 1, verbs.AccessRemoteRead, 0, mem.Buf)
		stopped, done := make(chan struct{}), newCompletions()
		go func() { defer close(stopped); postUntilError(p.passive, verbs.OpRDMARead, w, dst, done) }()
		done.wait(t, 1+round)
		p.active.localInv(w)
		for i := range mem.Buf {
			mem.Buf[i] = after
		}
		p.active.WaitDisconnect()
		<-stopped
		p.passive.QP.Drain()
		if i := bytes.IndexByte(dst.Buf, after); i >= 0 {
			t.Fatalf("byte %d was read after the end of the registration", i)
		}
	}
}

// writeIsRefused writes to the window of the passive end. The connection must end.
func (p *pair) writeIsRefused(w window) {
	data := p.active.Buffer(100)
	pattern(data.Buf, 0x99)
	p.active.post(newCompletions(), &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{data}})
	p.passive.WaitDisconnect()
}

// testWithdraw takes chains of a FastReg and a Send back, while the peer permits this end to send
// them. Each chain must either reach the peer as it was posted, or not at all. In the second case,
// its memory belongs to the consumer, and the peer can access none of it.
func testWithdraw(t *testing.T, s *suite) {
	const chains = 8
	withdrawn := 0
	for round := range fenceRounds {
		p := s.pair(t, options{})
		e := p.passive // may not send before the first message of the other end
		qp, ok := e.QP.(verbs.WithdrawingQP)
		if !ok {
			t.Skip("the queue pair takes no chain back")
		}
		in, done := newCompletions(), newCompletions()
		var got, sent, mem [chains + 1]verbs.SGE
		var regs [chains]*verbs.WorkRequest
		for i := range got {
			got[i], sent[i] = p.active.Buffer(1), e.Buffer(1)
			sent[i].Buf[0] = byte(i + 1)
			p.active.recv(in, got[i])
		}
		for i := range regs {
			mem[i] = e.Buffer(100)
			regs[i] = e.reg(e.MR(depth), 1, remoteWrite, 0, mem[i].Buf)
			e.post(done, regs[i], &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sent[i : i+1]})
		}
		first := newCompletions()
		e.recv(first, e.Buffer(1))
		send := &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.active.Buffer(1)}}
		open := func() { p.active.post(newCompletions(), send) }
		var want []byte
		var last window // of a chain that was taken back
		if round%2 == 1 {
			open()
		}
		for i := range regs {
			if round < fenceRounds/2 {
				i = chains - 1 - i // behind requests that are not executed
			}
			if !qp.Withdraw(regs[i]) {
				want = append(want, byte(i+1))
				continue
			}
			if last.mr == nil {
				last = e.registered(regs[i])
			}
			sent[i].Buf[0] = 0xff
			withdrawn++
		}
		slices.Sort(want)
		if round%2 == 0 {
			open()
		}
		first.wait(t, 1)
		e.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sent[chains:]})
		want = append(want, chains+1)
		for i, wc := range in.wait(t, len(want)) {
			if wc.Status != verbs.StatusSuccess || got[i].Buf[0] != want[i] {
				t.Fatalf("round %d, Receive %d: got %v, message %d; want messages %v", round, i, wc.Status,
					got[i].Buf[0], want)
			}
		}
		for _, wc := range done.wait(t, 2*chains) {
			if wc.Status != verbs.StatusSuccess {
				t.Errorf("round %d: %v: got %v, want success", round, wc.Opcode, wc.Status)
			}
		}
		if last.mr == nil {
			continue
		}
		if round%4 < 2 {
			e.localInv(last)
		}
		p.writeIsRefused(last)
		for i := range mem[:chains] {
			if bytes.Count(mem[i].Buf, []byte{0}) != 100 {
				t.Errorf("round %d: the peer wrote to memory %d", round, i)
			}
		}
	}
	if withdrawn == 0 {
		t.Error("no chain was taken back")
	}
}
