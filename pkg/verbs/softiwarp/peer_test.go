package softiwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A rawPeer is the connecting end of a TCP connection. A rawPeer sends any bytes that a test needs.
type rawPeer struct {
	t   testing.TB
	c   *net.TCPConn
	crc bool
}

// fpdu returns the FPDU of a ULPDU: length field, ULPDU, pad and CRC.
func fpdu(ulpdu []byte, crc bool) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(b, ulpdu...)
	b = append(b, make([]byte, padding(len(ulpdu)))...)
	var sum [fpduCRCSize]byte
	if crc {
		putCRC(sum[:], crc32.Checksum(b, castagnoli))
	}
	return append(b, sum[:]...)
}

// tagged, untagged and readReq return ULPDUs.
func tagged(op uint8, last bool, stag uint32, to uint64, p []byte) []byte {
	b := make([]byte, fpduLenSize+taggedHdr)
	putTagged(b, op, last, stag, to, len(p))
	return append(b[fpduLenSize:], p...)
}

func untagged(op uint8, last bool, ulp, qn, msn, mo uint32, p []byte) []byte {
	b := make([]byte, fpduLenSize+untaggedHdr)
	putUntagged(b, op, last, ulp, qn, msn, mo, len(p))
	return append(b[fpduLenSize:], p...)
}

func readReq(r readRequest) []byte {
	b := make([]byte, maxHeaderSize)
	putReadRequest(b, &r)
	return b[fpduLenSize:]
}

// send writes the FPDUs of the ULPDUs with one system call.
func (p *rawPeer) send(ulpdus ...[]byte) {
	p.t.Helper()
	var b []byte
	for _, u := range ulpdus {
		b = append(b, fpdu(u, p.crc)...)
	}
	p.write(b)
}

func (p *rawPeer) write(b []byte) {
	p.t.Helper()
	p.c.SetWriteDeadline(time.Now().Add(kit.Timeout))
	if _, err := p.c.Write(b); err != nil {
		p.t.Fatalf("write %d bytes: %v", len(b), err)
	}
}

// next reads one FPDU, checks its trailer and returns the header and the payload.
func (p *rawPeer) next() (header, []byte, error) {
	p.t.Helper()
	p.c.SetReadDeadline(time.Now().Add(kit.Timeout))
	var l [fpduLenSize]byte
	if _, err := io.ReadFull(p.c, l[:]); err != nil {
		return header{}, nil, err
	}
	n := int(binary.BigEndian.Uint16(l[:]))
	b := append(l[:], make([]byte, n+padding(n)+fpduCRCSize)...)
	if _, err := io.ReadFull(p.c, b[fpduLenSize:]); err != nil {
		return header{}, nil, err
	}
	if !bytes.Equal(b, fpdu(b[fpduLenSize:fpduLenSize+n], p.crc)) {
		p.t.Errorf("FPDU %x: the pad or the CRC is invalid", b)
	}
	var h header
	h.parseControl(b)
	h.parseRest(b)
	return h, b[fpduLenSize+h.size() : fpduLenSize+n], nil
}

// mustNext is next; it fails the test on an error.
func (p *rawPeer) mustNext() (header, []byte) {
	p.t.Helper()
	h, b, err := p.next()
	if err != nil {
		p.t.Fatalf("read an FPDU: %v", err)
	}
	return h, b
}

// readTerminate skips FPDUs until a Terminate and returns it. readTerminate checks the form of the
// Terminate, and that the stream ends after it.
func (p *rawPeer) readTerminate() (termCode, []byte) {
	p.t.Helper()
	for {
		h, b := p.mustNext()
		if h.op != opTerminate {
			continue
		}
		if h.tagged || !h.last || h.qn != qnTerminate || h.msn != firstMSN || h.mo != 0 || len(b) < termHdr {
			p.t.Errorf("Terminate: got malformed %+v %x", h, b)
		}
		if _, _, err := p.next(); err != io.EOF {
			p.t.Errorf("read after the Terminate: got %v, want io.EOF", err)
		}
		p.c.CloseWrite()
		return termCode{b[0] >> 4, b[0] & 0xf, b[1]}, b
	}
}

// An endpoint is the softiwarp end of the connection of a rawPeer, with registrations of every
// kind.
type endpoint struct {
	t            testing.TB
	id           verbs.ConnID
	pd           verbs.PD
	cq           verbs.CQ
	qp           *qp
	disconnected chan error

	mem   []byte // guard, window, guard
	clean []byte // the initial content of mem
	wkey  uint32 // window for writing
	rkey  uint32 // the same memory for reading
	// the same memory with all rights
	otherPD uint32 // registered in another PD
	otherQP uint32 // registered on another QP of the PD
	wmr     verbs.MR
	recvs   chan verbs.WorkCompletion
	bufs    [][]byte
}

// The window.
const (
	guard    = 512
	winLen   = 2000
	winIOVA  = 0x12345678_00000100
	recvSize = 64
	numRecvs = 4
)

var endpointParam = verbs.ConnParam{ResponderResources: 4, InitiatorDepth: 4}

// defaultConfig is the configuration of most tests.
var defaultConfig = Config{}

// newEndpoint creates a QP on id and posts Receives. The method windows registers memory.
func newEndpoint(t testing.TB, id verbs.ConnID) *endpoint {
	t.Helper()
	return newEndpointOf(t, id, recvSize)
}

// newEndpointOf is newEndpoint with Receives of recvSize bytes.
func newEndpointOf(t testing.TB, id verbs.ConnID, recvSize int) *endpoint {
	t.Helper()
	v := &endpoint{t: t, id: id, disconnected: make(chan error, 2), recvs: make(chan verbs.WorkCompletion, 64)}
	var err error
	v.pd, err = id.Device().AllocPD()
	kit.Must(t, err)
	v.cq, err = id.Device().CreateCQ(64)
	kit.Must(t, err)
	q, err := id.CreateQP(v.pd, verbs.QPInitAttr{
		SendCQ: v.cq, RecvCQ: v.cq, MaxSendWR: 32, MaxRecvWR: 32, MaxSendSGE: 4, InlineHandlers: true,
		OnDisconnect: func(cause error) { v.disconnected <- cause },
	})
	kit.Must(t, err)
	v.qp = q.(*qp)
	t.Cleanup(func() {
		id.Close()
		v.cq.Close()
		v.pd.Dealloc()
	})
	for range numRecvs {
		b := make([]byte, recvSize)
		v.bufs = append(v.bufs, b)
		if _, err := q.PostRecv(&verbs.RecvRequest{SGE: verbs.SGE{Buf: b},
			Done: func(wc *verbs.WorkCompletion) { v.recvs <- *wc }}); err != nil {
			t.Fatal(err)
		}
	}
	return v
}

// run posts one request and waits for its completion.
func (v *endpoint) run(wr *verbs.WorkRequest) verbs.WorkCompletion {
	v.t.Helper()
	c := v.post(wr)
	return next(v.t, wr.Opcode.String(), c)
}

// next returns the next value of c.
func next[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case x := <-c:
		return x
	case <-time.After(kit.Timeout):
		t.Fatalf("timeout: no %s", what)
		panic("unreachable")
	}
}

// post posts one request and returns the channel of its completion.
func (v *endpoint) post(wr *verbs.WorkRequest) <-chan verbs.WorkCompletion {
	v.t.Helper()
	c := make(chan verbs.WorkCompletion, 2)
	wr.Signaled, wr.Done = true, func(wc *verbs.WorkCompletion) { c <- *wc }
	if _, err := v.qp.PostSend(wr); err != nil {
		v.t.Fatalf("post %v: %v", wr.Opcode, err)
	}
	return c
}

// postWrite posts an RDMA Write of n bytes.
func (v *endpoint) postWrite(n int) <-chan verbs.WorkCompletion {
	v.t.Helper()
	return v.post(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1, SGList: []verbs.SGE{{Buf: make([]byte, n)}}})
}

func (v *endpoint) allocMR(pd verbs.PD, depth int) verbs.MR {
	v.t.Helper()
	m, err := pd.AllocMR(depth)
	kit.Must(v.t, err)
	v.t.Cleanup(func() { m.Dereg() })
	return m
}

func (v *endpoint) register(access verbs.Access, key uint8, segs ...[]byte) (verbs.MR, uint32) {
	v.t.Helper()
	m := v.allocMR(v.pd, maxFRPages)
	wc := v.run(&verbs.WorkRequest{Opcode: verbs.OpFastReg, MR: m, NewKey: key, Access: access, IOVA: winIOVA,
		Segs: segs})
	if wc.Status != verbs.StatusSuccess {
		v.t.Fatalf("FastReg: got %v, want success", wc.Status)
	}
	return m, uint32(m.RKey().WithKey(key))
}

// windows registers the window for writing, for reading, and in another PD.
func (v *endpoint) windows() {
	v.t.Helper()
	v.mem = make([]byte, guard+winLen+guard)
	for i := range v.mem {
		v.mem[i] = byte(i*7 + i>>8)
	}
	v.clean = bytes.Clone(v.mem)
	win := v.mem[guard:][:winLen]
	v.wmr, v.wkey = v.register(verbs.AccessLocalWrite|verbs.AccessRemoteWrite, 0x10, win[:700], win[700:701], win[701:])
	_, v.rkey = v.register(verbs.AccessRemoteRead, 0x20, win[:1], win[1:])
	pd, err := v.id.Device().AllocPD()
	kit.Must(v.t, err)
	v.t.Cleanup(func() { pd.Dealloc() })
	v.otherPD = allow(v.allocMR(pd, 1), v.qp, win)
	v.otherQP = allow(v.allocMR(v.pd, 1), &qp{}, win)
}

// allow registers mem on q with all rights and returns the STag.
func allow(m verbs.MR, q *qp, mem []byte) uint32 {
	stag := uint32(m.RKey())
	m.(*mr).register(q, stag, verbs.AccessRemoteRead|verbs.AccessRemoteWrite, winIOVA, [][]byte{mem})
	return stag
}

// cause waits for OnDisconnect and returns its argument.
func (v *endpoint) cause() error {
	v.t.Helper()
	return next(v.t, "call of OnDisconnect", v.disconnected)
}

func (v *endpoint) received() verbs.WorkCompletion {
	v.t.Helper()
	return next(v.t, "completion of a Receive", v.recvs)
}

// terminate checks that the connection ended with a Terminate of this side, and returns its code.
func (v *endpoint) terminate() termCode {
	v.t.Helper()
	var te *verbs.TerminateError
	if err := v.cause(); !errors.As(err, &te) || !te.Local {
		v.t.Errorf("cause: got %v, want a Terminate of this side", err)
		return termCode{0xf, 0xf, 0xf}
	}
	return termCode{te.Layer, te.EType, te.Code}
}

// connectRaw connects a rawPeer to a new endpoint with windows.
func connectRaw(t testing.TB, cfg Config) (*rawPeer, *endpoint) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	l, err := New(cfg).Listen(ctx, loopback)
	kit.Must(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	kit.Must(t, err)
	req := mpaFrame{enhanced: true, rev: mpaRev2, ird: 4, ord: 4, crc: cfg.CRC}
	_, err = c.Write(req.append(nil))
	kit.Must(t, err)
	r, err := l.Accept(ctx)
	kit.Must(t, err)
	v := newEndpoint(t, r)
	kit.Must(t, r.Accept(ctx, endpointParam))
	if rep, err := readMPAFrame(c, true); err != nil || rep.crc != cfg.CRC || rep.reject {
		t.Fatalf("MPA reply: got %+v, error %v; want one that accepts the connection", rep, err)
	}
	t.Cleanup(func() { c.Close() }) // before the endpoint waits for the end of the stream
	v.windows()
	return &rawPeer{t: t, c: c.(*net.TCPConn), crc: cfg.CRC}, v
}
