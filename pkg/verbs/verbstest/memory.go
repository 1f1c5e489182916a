package verbstest

import (
	"bytes"
	"testing"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var memoryTests = []conformanceTest{
	{"WriteSizes", verbs.CapFastReg, testWriteSizes},
	{"ReadSizes", verbs.CapFastReg, testReadSizes},
	{"Gaps", verbs.CapFastReg | verbs.CapGaps | verbs.CapChosenIOVA | verbs.CapRegisterAny, testGaps},
	{"ManyReads", verbs.CapFastReg, testManyReads},
	{"RegisterOften", verbs.CapFastReg, testRegisterOften},
	{"SendWithInvalidate", verbs.CapFastReg | verbs.CapRemoteInv, testSendWithInvalidate},
	{"LocalInvOfFreeMR", verbs.CapFastReg, testLocalInvOfFree},
	{"RegisterTwice", verbs.CapFastReg, testRegisterTwice},
	{"FastRegErrors", verbs.CapFastReg, testFastRegErrors},
	{"ChainOfOneRPC", verbs.CapFastReg, testChain},
}

// A window is registered memory of one end, with the key and address for the other end.
type window struct {
	mr   verbs.MR
	rkey verbs.RKey
	iova uint64
}

// bigIOVA is an I/O virtual address that is no memory address of any machine.
const bigIOVA = 0xfeed_0000_1234_5003

// reg returns a FastReg that suits the device. If the device cannot use a chosen address, iova is
// replaced by the memory's address. If the device binds memory windows, a key equal to the MR's
// last key is replaced.
func (e *Endpoint) reg(m verbs.MR, key uint8, access verbs.Access, iova uint64, segs ...[]byte) *verbs.WorkRequest {
	caps := e.Dev.Attrs().Caps
	if !caps.Has(verbs.CapChosenIOVA) {
		iova = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(segs[0]))))
	}
	last, ok := e.lastKey[m]
	if !ok {
		last = m.RKey().Key()
	}
	if caps.Has(verbs.CapMemWindow2B) && key == last {
		key ^= 0x80
	}
	e.lastKey[m] = key
	return &verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: m, NewKey: key, Access: access, IOVA: iova, Segs: segs}
}

// registered returns the window of a posted FastReg.
func (e *Endpoint) registered(wr *verbs.WorkRequest) window {
	if e.Dev.Attrs().Caps.Has(verbs.CapPerIOReg) {
		return window{mr: wr.MR, rkey: wr.MR.RKey(), iova: wr.IOVA}
	}
	return window{mr: wr.MR, rkey: wr.MR.RKey().WithKey(wr.NewKey), iova: wr.IOVA}
}

// fastReg registers segs and waits for the completion.
func (e *Endpoint) fastReg(m verbs.MR, key uint8, access verbs.Access, iova uint64, segs ...[]byte) window {
	e.T.Helper()
	wr := e.reg(m, key, access, iova, segs...)
	e.must(wr)
	return e.registered(wr)
}

func (e *Endpoint) localInv(w window) {
	e.T.Helper()
	e.must(&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: w.rkey})
}

const depth = 64 // pages of the tests' MRs

const remoteWrite = verbs.AccessLocalWrite | verbs.AccessRemoteWrite

// transferSizes are the lengths around the limits of words, pages and segments.
var transferSizes = []int{0, 1, 2, 3, 4, 5, 6, 7, 33, 1427, 1428, 4096, 65453, 65454, 65455, 65456, 131073}

func testWriteSizes(t *testing.T, s *suite) { testSizes(t, s, verbs.OpRDMAWrite) }
func testReadSizes(t *testing.T, s *suite)  { testSizes(t, s, verbs.OpRDMARead) }

// testSizes transfers data of each length to or from each residue of an address.
func testSizes(t *testing.T, s *suite, op verbs.Opcode) {
	const size = 140000
	p := s.pair(t, options{}).sendFirst()
	for _, from := range []*Endpoint{p.active, p.passive} {
		to := p.other(from)
		m := to.MR(depth)
		remote, local := to.Buffer(size), from.Buffer(size)
		clean := make([]byte, size)
		pattern(clean, 0x55)
		key := uint8(0)
		for _, n := range transferSizes {
			for _, off := range []int{0, 1, 2, 3, 4095} {
				key++
				copy(remote.Buf, clean)
				pattern(local.Buf[:n+1], key)
				wantRemote, wantLocal := bytes.Clone(remote.Buf), bytes.Clone(local.Buf)
				w := to.fastReg(m, key, remoteWrite|remoteRead, 0x1000, remote.Buf)
				wc := from.must(&verbs.WorkRequest{
					Opcode: op, RKey: w.rkey, RemoteAddr: w.iova + uint64(off),
					SGList: []verbs.SGE{{Buf: local.Buf[off&1:][:n], LKey: local.LKey}},
				})[0]
				if op == verbs.OpRDMAWrite {
					copy(wantRemote[off:], wantLocal[off&1:][:n])
					p.sync(from)
				} else if copy(wantLocal[off&1:], wantRemote[off:][:n]); int(wc.ByteLen) != n || wc.Opcode != op {
					t.Fatalf("completion of an RDMA Read of %d bytes: got %+v", n, wc)
				}
				to.localInv(w)
				if !bytes.Equal(remote.Buf, wantRemote) || !bytes.Equal(local.Buf, wantLocal) {
					t.Fatalf("%v of %d bytes at %d: memory differs at byte %d here, %d at the peer", op, n, off,
						firstDifference(local.Buf, wantLocal), firstDifference(remote.Buf, wantRemote))
				}
			}
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// testGaps checks that a registration can combine any pieces of memory at any address.
func testGaps(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	const pieces = 300
	m := p.passive.MR(512)
	backing := make([]byte, pieces*700) // in the Go heap
	pattern(backing, 0x11)
	original := append([]byte(nil), backing...)
	var segs [][]byte
	total := 0
	for i := range pieces {
		n := i % 600
		segs = append(segs, backing[i*700+i%13:][:n])
		total += n
	}
	data := p.active.Buffer(total)
	pattern(data.Buf, 0x22)

	w := p.passive.fastReg(m, 1, remoteWrite, bigIOVA, segs...)
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{data}})
	p.sync(p.active)
	p.passive.localInv(w)
	off := 0
	for i, seg := range segs {
		if !bytes.Equal(seg, data.Buf[off:off+len(seg)]) {
			t.Fatalf("piece %d: got wrong data", i)
		}
		copy(original[i*700+i%13:], seg)
		off += len(seg)
	}
	if !bytes.Equal(backing, original) {
		t.Fatalf("byte %d between the pieces was written", firstDifference(backing, original))
	}

	w = p.passive.fastReg(m, 2, verbs.AccessRemoteRead, bigIOVA+1, segs...)
	back := p.active.Buffer(total)
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
		SGList: []verbs.SGE{back}})
	p.passive.localInv(w)
	if !bytes.Equal(back.Buf, data.Buf) {
		t.Fatalf("RDMA Read: byte %d of %d differs", firstDifference(back.Buf, data.Buf), total)
	}
}

// testManyReads posts more RDMA Reads than the negotiated depth, and a Send. They complete in
// order.
func testManyReads(t *testing.T, s *suite) {
	const n = 40
	p := s.pair(t, options{activeParam: verbs.ConnParam{InitiatorDepth: 3, ResponderResources: 3},
		passiveParam: verbs.ConnParam{InitiatorDepth: 3, ResponderResources: 3}})
	src, dst := p.passive.Buffer(n*5000), p.active.Buffer(n*5000)
	pattern(src.Buf, 5)
	w := p.passive.fastReg(p.passive.MR(depth), 1, verbs.AccessRemoteRead, 0, src.Buf)
	var wrs []*verbs.WorkRequest
	order := make(chan int, n+1)
	for i := range n {
		wrs = append(wrs, &verbs.WorkRequest{
			Opcode: verbs.OpRDMARead, Signaled: true, RKey: w.rkey, RemoteAddr: w.iova +
				uint64(i*5000), SGList: []verbs.SGE{{Buf: dst.Buf[i*5000:][:5000], LKey: dst.LKey}},
			Done: func(wc *verbs.WorkCompletion) {
				if wc.Status != verbs.StatusSuccess {
					t.Errorf("RDMA Read %d: got %v, want success", i, wc.Status)
				}
				order <- i
			},
		})
	}
	p.passive.recv(newCompletions(), p.passive.Buffer(4))
	wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true,
		Done: func(*verbs.WorkCompletion) { order <- n }})
	_, err := p.active.QP.PostSend(Chain(wrs...))
	kit.Must(t, err)
	for want := range n + 1 {
		if got := next(t, "completion", order); got != want {
			t.Fatalf("completion: got request %d, want %d", got, want)
		}
	}
	if !bytes.Equal(src.Buf, dst.Buf) {
		t.Errorf("RDMA Reads: byte %d differs", firstDifference(src.Buf, dst.Buf))
	}
	p.passive.localInv(w)
}

// testRegisterOften registers one MR with each of its keys.
func testRegisterOften(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	m := p.passive.MR(1)
	dst, src := p.passive.Buffer(8), p.active.Buffer(8)
	for i := range 260 {
		pattern(src.Buf, byte(i))
		w := p.passive.fastReg(m, uint8(i), remoteWrite, uint64(i)<<32, dst.Buf)
		if !p.passive.Dev.Attrs().Caps.Has(verbs.CapPerIOReg) && w.rkey>>8 != m.RKey()>>8 {
			t.Fatal("STag index changed after FastReg")
		}
		p.active.must(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
			SGList: []verbs.SGE{src}})
		p.sync(p.active)
		p.passive.localInv(w)
		if !bytes.Equal(src.Buf, dst.Buf) {
			t.Fatalf("round %d: memory differs", i)
		}
	}
}

func testSendWithInvalidate(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	m := p.active.MR(1)
	mem := p.active.Buffer(8)
	for i := range 10 {
		w := p.active.fastReg(m, uint8(i), remoteWrite, 0, mem.Buf)
		in := newCompletions()
		p.active.recv(in, p.active.Buffer(64))
		p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpSendWithInv, InvalidateRKey: w.rkey,
			SGList: []verbs.SGE{p.passive.Buffer(40)}})
		wc := in.wait(t, 1)[0]
		if wc.Status != verbs.StatusSuccess || !wc.WithInv || wc.InvalidatedRKey != w.rkey || wc.ByteLen != 40 {
			t.Fatalf("Receive of a Send With Invalidate of %#x: got %+v", w.rkey, wc)
		}
		// The FastReg of the next round fails if the MR is still valid.
	}
	if n := p.active.QP.Stats().RemoteInvalidates; n != 10 {
		t.Errorf("remote invalidations: got %d, want 10", n)
	}
}

func testLocalInvOfFree(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	m := p.active.MR(1)
	w := p.active.fastReg(m, 1, remoteWrite, 0, p.active.Buffer(8).Buf)
	p.active.localInv(w)
	p.active.localInv(w)
}

// testRegisterTwice checks that a FastReg of a valid MR fails and ends the connection.
func testRegisterTwice(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	m := p.active.MR(1)
	w := p.active.fastReg(m, 1, remoteWrite, 0, p.active.Buffer(8).Buf)
	wr := p.active.reg(m, 2, remoteWrite, 0, p.active.Buffer(8).Buf)
	later := &verbs.WorkRequest{Opcode: verbs.OpSend}
	l := p.active.do(wr, later)
	if st := l[0].Status; !failed(st) {
		t.Errorf("FastReg of the valid MR %#x: got %v, want an error other than a flush", w.rkey, st)
	}
	if st := l[1].Status; st != verbs.StatusWRFlushErr {
		t.Errorf("request after the failed one: got %v, want %v", st, verbs.StatusWRFlushErr)
	}
	p.active.WaitDisconnect()
	p.passive.WaitDisconnect()
}

func testFastRegErrors(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	page := p.active.Dev.Attrs().PageSize
	m := p.active.MR(2)
	other, err := p.active.Dev.AllocPD()
	kit.Must(t, err)
	foreign, err := other.AllocMR(2)
	kit.Must(t, err)
	buf := p.active.Buffer(4 * page).Buf
	for name, wr := range map[string]*verbs.WorkRequest{
		"no MR":            {Segs: [][]byte{buf[:8]}},
		"no memory":        {MR: m},
		"too long":         {MR: m, Segs: [][]byte{buf}},
		"address wraps":    {MR: m, IOVA: 1<<64 - 4, Segs: [][]byte{buf[:8]}},
		"MR of another PD": {MR: foreign, Segs: [][]byte{buf[:8]}},
	} {
		wr.Opcode, wr.Access, wr.Done = verbs.OpFastReg, remoteWrite, func(*verbs.WorkCompletion) {}
		if bad, err := p.active.QP.PostSend(wr); bad != wr || err == nil {
			t.Errorf("post FastReg with %s: got no error, want one", name)
		}
	}
	kit.Must(t, foreign.Dereg())
	kit.Must(t, other.Dealloc())
	for _, d := range []int{0, -1, p.active.Dev.Attrs().MaxFastRegPageListLen + 1} {
		if _, err := p.active.PD.AllocMR(d); err == nil {
			t.Errorf("AllocMR with depth %d: got no error, want one", d)
		}
	}
}

// testChain posts registrations and the Send that advertises them as one chain. The requests take
// effect in order.
func testChain(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	m1, m2 := p.active.MR(depth), p.active.MR(depth)
	a, b := p.active.Buffer(70000), p.active.Buffer(70000)
	call, in := p.active.Buffer(100), newCompletions()
	for i := range 30 {
		key := uint8(i)
		pattern(a.Buf, key)
		clear(b.Buf)
		p.passive.recv(in, p.passive.Buffer(100))
		before := p.active.QP.Stats()
		reg1 := p.active.reg(m1, key, verbs.AccessRemoteRead, 0x10000, a.Buf)
		reg2 := p.active.reg(m2, key, remoteWrite, 0x20000, b.Buf)
		p.active.must(reg1, reg2, &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{call}})
		w1, w2 := p.active.registered(reg1), p.active.registered(reg2)
		if d := p.active.QP.Stats().PostedChains - before.PostedChains; d != 1 {
			t.Fatalf("PostedChains after one post: got %d, want 1", d)
		}
		in.wait(t, i+1)
		// The passive side acts as the server: read one window, write the other one, reply.
		tmp := p.passive.Buffer(70000)
		p.passive.must(&verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: w1.rkey, RemoteAddr: w1.iova,
			SGList: []verbs.SGE{tmp}})
		reply := newCompletions()
		p.active.recv(reply, call)
		p.passive.must(
			&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: w2.rkey, RemoteAddr: w2.iova, SGList: []verbs.SGE{tmp}},
			&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.passive.Buffer(100)}},
		)
		reply.wait(t, 1)
		p.active.must(
			&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: w1.rkey},
			&verbs.WorkRequest{Opcode: verbs.OpLocalInv, InvalidateRKey: w2.rkey},
		)
		if !bytes.Equal(a.Buf, b.Buf) {
			t.Fatalf("round %d: byte %d differs", i, firstDifference(a.Buf, b.Buf))
		}
	}
}
