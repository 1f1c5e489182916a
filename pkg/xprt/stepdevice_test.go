package xprt

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A stepDevice is an RDMA device whose events happen one at a time, when a test says so. It is also
// the provider, and all its connections use it. Between two events no goroutine of the transport
// runs. During an event a completion handler and the calls that it woke may post at the same time.
//
// The device checks the transport: it records in faults each request that a real device would
// refuse.
type stepDevice struct {
	remoteInv bool
	yield     bool // a post first lets other goroutines run
	withdraw  bool // takes chains back that are not executed
	maxMR     int
	attrs     func(*verbs.DeviceAttrs)
	granted   chan struct{} // one value for each attempt to connect
	refuse    postHook      // called before each post
	server    *stepServer   // answers calls at once; nil if the test makes all events happen

	mu        sync.Mutex // guards the fields below, the MRs and the queues
	dialing   bool       // a connect waits for a value
	readDepth uint16     // of the last connection
	qps       []*stepQP
	mrs       map[uint32]*stepMR
	nextIndex uint32
	faults    []string

	// Protection domains and local MRs.
	scarce                     bool // only resources can be allocated
	resources, allocated, held int
}

// fault records a request that a real device would refuse. The caller holds mu.
func (d *stepDevice) fault(format string, args ...any) {
	d.faults = append(d.faults, fmt.Sprintf(format, args...))
}

// A stepMR is an MR for fast registration.
type stepMR struct {
	d     *stepDevice
	index uint32
	valid bool
	key   verbs.RKey // of the last registration
	segs  [][]byte   // of the last registration
}

func (m *stepMR) LKey() uint32     { return 0 }
func (m *stepMR) RKey() verbs.RKey { return verbs.RKey(m.index << 8) }
func (m *stepMR) Dereg() error {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if m.d.mrs[m.index] != m {
		m.d.fault("MR %d is destroyed twice", m.index)
	}
	delete(m.d.mrs, m.index)
	m.valid = false
	return nil
}

// reaches reports whether the peer can access memory of buf.
func (m *stepMR) reaches(buf []byte) bool {
	return m.valid && slices.ContainsFunc(m.segs, func(seg []byte) bool {
		return &seg[0] == &buf[0] // the transport registers whole buffers
	})
}

type stepLocalMR struct{ d *stepDevice }

func (stepLocalMR) LKey() uint32     { return 1 }
func (stepLocalMR) RKey() verbs.RKey { return 0 }
func (m stepLocalMR) Dereg() error   { return m.d.release() }

func (d *stepDevice) Name() string { return "step" }

func (d *stepDevice) Listen(context.Context, netip.AddrPort) (verbs.Listener, error) {
	return nil, errors.New("step devices only connect")
}

// Resolve waits until the test permits a connection.
func (d *stepDevice) Resolve(ctx context.Context, raddr netip.AddrPort) (verbs.ActiveID, error) {
	if d.server != nil {
		if err := d.server.dial(ctx, raddr); err != nil {
			return nil, err
		}
		return &stepID{d: d, raddr: raddr}, nil
	}
	d.setDialing(true)
	defer d.setDialing(false)
	select {
	case <-d.granted:
		return &stepID{d: d, raddr: raddr}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *stepDevice) setDialing(yes bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dialing = yes
}

func (d *stepDevice) Attrs() verbs.DeviceAttrs {
	a := verbs.DeviceAttrs{Name: "step0", Transport: verbs.TransportIB, PageSize: 4096, MaxFastRegPageListLen: 256,
		MaxQPWR: 1024, MaxCQE: 2048, MaxSendSGE: 4, MaxRecvSGE: 1, MaxSGERd: 1, MaxQPRdAtom: 16, MaxQPInitRdAtom: 16,
		MaxMR: 1024, Caps: verbs.CapFastReg | verbs.CapChosenIOVA | verbs.CapRegisterAny | verbs.CapGaps}
	if d.remoteInv {
		a.Caps |= verbs.CapRemoteInv
	}
	if d.attrs != nil {
		d.attrs(&a)
	}
	return a
}

func (d *stepDevice) AllocPD() (verbs.PD, error) {
	if err := d.hold(); err != nil {
		return nil, err
	}
	return stepPD{d}, nil
}

// hold counts a resource that is allocated, unless the device has no more.
func (d *stepDevice) hold() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.scarce {
		if d.resources == 0 {
			return errors.New("no resource is left")
		}
		d.resources--
	}
	d.allocated++
	d.held++
	return nil
}

func (d *stepDevice) release() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held--
	return nil
}

func (d *stepDevice) CreateCQ(int) (verbs.CQ, error) { return stepCQ{}, nil }

type stepCQ struct{}

func (stepCQ) Close() error { return nil }

type stepPD struct{ d *stepDevice }

func (p stepPD) AllocMR(int) (verbs.MR, error) {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if len(p.d.mrs) >= p.d.maxMR {
		return nil, errors.New("the device has no more MRs")
	}
	p.d.nextIndex++
	m := &stepMR{d: p.d, index: p.d.nextIndex}
	p.d.mrs[m.index] = m
	return m, nil
}

func (p stepPD) RegMR([]byte) (verbs.MR, error) {
	if err := p.d.hold(); err != nil {
		return nil, err
	}
	return stepLocalMR(p), nil
}

func (p stepPD) Dealloc() error {
	p.d.mu.Lock()
	if len(p.d.mrs) > 0 {
		p.d.fault("the PD is released with %d MRs", len(p.d.mrs))
	}
	p.d.mu.Unlock()
	return p.d.release()
}

type stepID struct {
	d     *stepDevice
	raddr netip.AddrPort
	qp    *stepQP
}

func (i *stepID) Device() verbs.Device       { return i.d }
func (i *stepID) LocalAddr() netip.AddrPort  { return i.raddr }
func (i *stepID) RemoteAddr() netip.AddrPort { return i.raddr }
func (i *stepID) Connect(_ context.Context, p verbs.ConnParam) error {
	i.d.readDepth = p.ResponderResources
	return nil
}
func (i *stepID) Peer() verbs.ConnParam {
	return verbs.ConnParam{PrivateData: rpcrdma.Private{RemoteInv: i.d.remoteInv, SendSize: MaxInlineBytes,
		RecvSize: MaxInlineBytes}.Append(nil)}
}

func (i *stepID) CreateQP(_ verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	i.d.mu.Lock()
	defer i.d.mu.Unlock()
	i.qp = &stepQP{d: i.d, attr: attr}
	i.d.qps = append(i.d.qps, i.qp)
	return i.qp, nil
}

func (i *stepID) Close() error {
	i.d.mu.Lock()
	defer i.d.mu.Unlock()
	if i.qp != nil && len(i.qp.sq)+len(i.qp.rq) > 0 {
		i.d.fault("the QP is closed before it is drained")
	}
	return nil
}

// A stepRequest is a request in the send queue.
type stepRequest struct {
	verbs.WorkRequest
	posted    *verbs.WorkRequest
	withdrawn bool
}

// A stepQP is the queue pair of one connection. The peer sees the requests in the order of the
// posts: executed is the number of requests in sq that the device has executed.
type stepQP struct {
	d        *stepDevice
	attr     verbs.QPInitAttr
	sq       []stepRequest
	executed int
	rq       []*verbs.RecvRequest
	err      bool // in the error state: requests that were not executed are flushed
	reported bool // OnDisconnect was called
	flushed  bool // a Receive was flushed
	sent     map[uint32]*rpcrdma.Header
}

func (q *stepQP) Stats() verbs.QPStats { return verbs.QPStats{} }

func (q *stepQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	if q.d.yield {
		runtime.Gosched()
	}
	n := 0
	for wr := first; wr != nil; wr = wr.Next {
		n++
	}
	var refused error
	if q.d.refuse != nil {
		if keep, err := q.d.refuse(first, n); err != nil {
			n, refused = keep, err
		}
	}
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if q.err {
		return first, verbs.ErrQPState
	}
	for wr := first; wr != nil; wr = wr.Next {
		if n--; n < 0 {
			return wr, refused
		}
		if len(q.sq) == q.attr.MaxSendWR {
			q.d.fault("the send queue overflows")
			return wr, errors.New("the send queue is full")
		}
		q.sq = append(q.sq, stepRequest{WorkRequest: *wr, posted: wr})
	}
	if q.d.server != nil {
		go q.d.server.serve(q)
	}
	return nil, nil
}

// Withdraw takes back a chain unless its Send is executed.
func (q *stepQP) Withdraw(first *verbs.WorkRequest) bool {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	last, n := first, 1
	for ; last.Next != nil; last = last.Next {
		n++
	}
	at := slices.IndexFunc(q.sq, func(r stepRequest) bool { return r.posted == last && !r.withdrawn })
	if !q.d.withdraw || q.err || at < q.executed {
		return false
	}
	for i := max(at+1-n, 0); i <= at; i++ {
		wr := &q.sq[i]
		wr.withdrawn, wr.SGList = true, nil
		if wr.Opcode == verbs.OpFastReg && i < q.executed {
			wr.MR.(*stepMR).valid = false
		}
	}
	return true
}

func (q *stepQP) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	q.d.mu.Lock()
	for ; first != nil; first = first.Next {
		q.rq = append(q.rq, first)
	}
	flush := q.flushed
	q.d.mu.Unlock()
	if flush {
		q.flushReceives()
	}
	return nil, nil
}

// execute executes requests until n of the queue are executed. The caller holds d.mu.
func (q *stepQP) execute(n int) {
	for ; q.executed < n; q.executed++ {
		wr := &q.sq[q.executed]
		switch op := wr.Opcode; {
		case op == verbs.OpFastReg:
			m := wr.MR.(*stepMR)
			key := m.RKey().WithKey(wr.NewKey)
			if m.valid || key == m.key || q.d.mrs[m.index] != m {
				q.d.fault("FastReg of MR %d: valid %v, key %v after %v", m.index, m.valid, key, m.key)
			}
			m.valid, m.key, m.segs = !wr.withdrawn, key, wr.Segs
		case op == verbs.OpLocalInv:
			m := q.d.mrs[uint32(wr.InvalidateRKey)>>8]
			if m == nil || m.key != wr.InvalidateRKey {
				q.d.fault("LOCAL_INV of unknown key %#x", wr.InvalidateRKey)
				break
			}
			m.valid = false
		case op == verbs.OpSend && !wr.withdrawn:
			var msg []byte
			for _, sge := range wr.SGList {
				msg = append(msg, sge.Buf...)
			}
			h := &rpcrdma.Header{}
			n, err := h.Decode(msg)
			if err != nil {
				q.d.fault("Send: %v", err)
				break
			}
			if q.d.server != nil {
				wr.OnWrite()
				q.d.server.arrived = append(q.d.server.arrived, newStepCall(h, msg[n:]))
			}
			if q.sent == nil {
				q.sent = make(map[uint32]*rpcrdma.Header)
			}
			q.sent[h.XID] = h
		}
	}
}

// complete delivers the next completion of the send queue. Successful unsignaled requests have
// none. It reports false if the queue has no completion to deliver.
func (q *stepQP) complete() bool {
	wr, status, ok := q.next()
	if ok {
		wr.Done(&verbs.WorkCompletion{Status: status, Opcode: wr.Opcode, QP: q})
	}
	return ok
}

// next takes the next request that has a completion from the send queue.
func (q *stepQP) next() (wr stepRequest, status verbs.Status, ok bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	for i := range q.sq {
		wr, status = q.sq[i], verbs.StatusSuccess
		if q.err && i >= q.executed {
			status = verbs.StatusWRFlushErr
		}
		if !wr.Signaled && status == verbs.StatusSuccess {
			continue
		}
		if status == verbs.StatusSuccess {
			q.execute(i + 1)
		}
		q.sq = q.sq[i+1:]
		q.executed = max(q.executed-i-1, 0)
		return wr, status, true
	}
	return wr, status, false
}

// completes reports whether complete has a completion to deliver.
func (q *stepQP) completes() bool {
	return slices.ContainsFunc(q.sq, func(wr stepRequest) bool { return wr.Signaled }) ||
		q.err && len(q.sq) > q.executed
}

// receive delivers a message of the peer.
func (q *stepQP) receive(msg []byte, inv verbs.RKey) {
	q.d.mu.Lock()
	r := q.rq[0]
	q.rq = q.rq[1:]
	n := copy(r.SGE.Buf, msg)
	wc := verbs.WorkCompletion{Opcode: verbs.OpRecv, ByteLen: uint32(n), QP: q}
	if inv != 0 {
		wc.WithInv, wc.InvalidatedRKey = true, inv
		if mr := q.d.mrs[uint32(inv)>>8]; mr != nil {
			mr.valid = false
		}
	}
	q.d.mu.Unlock()
	r.Done(&wc)
}

// write is what the server does with the chunks of a call: it writes the XID to the write chunks.
// It returns the key that the server invalidates, or 0. The caller holds mu, or no goroutine runs.
func (d *stepDevice) write(call *rpcrdma.Header) (inv verbs.RKey) {
	for _, chunk := range append(call.Writes[:len(call.Writes):len(call.Writes)], call.Reply) {
		for _, seg := range chunk {
			if mr := d.mrOf(seg); mr != nil {
				fillXID(mr.segs, call.XID)
				inv = mr.key
			}
		}
	}
	for _, read := range call.Reads {
		if mr := d.mrOf(read.Segment); mr != nil {
			inv = mr.key
		}
	}
	if !d.remoteInv {
		return 0
	}
	return inv
}

// mrOf returns the MR that seg refers to, or nil if its key is not valid.
func (d *stepDevice) mrOf(seg rpcrdma.Segment) *stepMR {
	mr := d.mrs[seg.Handle>>8]
	if mr == nil || uint32(mr.key) != seg.Handle || !mr.valid {
		return nil
	}
	return mr
}

// fillXID writes the XID to each word of the memory, as a server whose data differs for each call.
func fillXID(segs [][]byte, xid uint32) {
	for _, seg := range segs {
		for i := 0; i+4 <= len(seg); i += 4 {
			binary.BigEndian.PutUint32(seg[i:], xid)
		}
	}
}

// fail moves the QP to the error state. With executed, the device has executed all requests.
func (q *stepQP) fail(executed bool) {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	if executed {
		q.execute(len(q.sq))
	}
	q.err = true
}

// report tells the transport that the connection is lost.
func (q *stepQP) report() {
	q.reported = true
	q.attr.OnDisconnect(io.EOF)
}

func (q *stepQP) flushReceives() {
	q.d.mu.Lock()
	q.flushed = true
	receives := q.rq
	q.rq = nil
	q.d.mu.Unlock()
	for _, r := range receives {
		r.Done(&verbs.WorkCompletion{Status: verbs.StatusWRFlushErr, QP: q})
	}
}

func (q *stepQP) Drain() {
	if q.d.server != nil {
		defer q.d.server.drain()()
	}
	q.fail(false)
	for q.complete() {
	}
	q.d.mu.Lock()
	q.sq, q.executed = nil, 0
	q.d.mu.Unlock()
	q.flushReceives()
}

// String describes the state of the queue pair.
func (q *stepQP) String() string {
	var b strings.Builder
	for i, wr := range q.sq {
		fmt.Fprintf(&b, "%v", wr.Opcode)
		if wr.Signaled {
			b.WriteByte('!')
		}
		if i < q.executed {
			b.WriteByte('.')
		}
		if wr.withdrawn {
			b.WriteByte('-')
		}
		b.WriteByte(' ')
	}
	fmt.Fprintf(&b, "err=%v,%v,%v", q.err, q.reported, q.flushed)
	return b.String()
}
