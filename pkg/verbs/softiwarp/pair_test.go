package softiwarp

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A pair is two connected endpoints whose completions go to channels. Tests and benchmarks of
// established connections use it.
type pair struct {
	t    testing.TB
	a, b *endpoint
	// statuses of the completions of each side
	aSent, aRecv, bSent, bRecv chan verbs.Status
}

const pairDepth = 64

// newPair connects the ends of a pair through the listener at addr (acceptAll).
func newPair(t testing.TB, cfg Config, addr netip.AddrPort, endpoints chan *endpoint) *pair {
	t.Helper()
	d := &pair{t: t}
	for _, c := range []*chan verbs.Status{&d.aSent, &d.aRecv, &d.bSent, &d.bRecv} {
		*c = make(chan verbs.Status, pairDepth)
	}
	var err error
	d.a, err = connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
	kit.Must(t, err)
	d.b = <-endpoints
	// Consume the small Receives of both endpoints. The first message also allows b to send.
	for range numRecvs {
		for _, ends := range [][2]*endpoint{{d.a, d.b}, {d.b, d.a}} {
			st := ends[0].run(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sges(recvSize)}).Status
			if st != verbs.StatusSuccess {
				t.Fatal(st)
			}
			ends[1].received()
		}
	}
	return d
}

// handler returns a completion handler that sends the status to c.
func handler(c chan verbs.Status) func(*verbs.WorkCompletion) {
	return func(wc *verbs.WorkCompletion) { c <- wc.Status }
}

func (d *pair) want(c chan verbs.Status) {
	if st := <-c; st != verbs.StatusSuccess {
		d.t.Fatalf("completion: got %v, want success", st)
	}
}

func (d *pair) post(v *endpoint, wr *verbs.WorkRequest) {
	_, err := v.qp.PostSend(wr)
	kit.Must(d.t, err)
}

func (d *pair) recv(v *endpoint, rr *verbs.RecvRequest) {
	_, err := v.qp.PostRecv(rr)
	kit.Must(d.t, err)
}

// An rpc is one exchange like an NFS call, with requests that are made once. After run nothing is
// pending.
type rpc struct {
	d          *pair
	recvA      verbs.RecvRequest
	recvB      verbs.RecvRequest
	call       [3]verbs.WorkRequest // FastReg, FastReg, Send
	serve      [3]verbs.WorkRequest // RDMA Read, RDMA Write, Send With Invalidate
	inv        verbs.WorkRequest
	key        uint8
	src, sink  verbs.MR
	data, back []byte
}

func newRPC(d *pair, size int) *rpc {
	r := &rpc{d: d, data: make([]byte, size), back: make([]byte, size)}
	pages := size/pageSize + 1
	r.src, r.sink = d.a.allocMR(d.a.pd, pages), d.a.allocMR(d.a.pd, pages)
	for i := range r.data {
		r.data[i] = byte(i * 3)
	}
	r.recvA = verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 4096)}, Done: handler(d.aRecv)}
	r.recvB = verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 4096)}, Done: handler(d.bRecv)}
	msg, tmp := []verbs.SGE{{Buf: make([]byte, 128)}, {Buf: make([]byte, 900)}}, []verbs.SGE{{Buf: make([]byte, size)}}
	r.call[0] = verbs.WorkRequest{Next: &r.call[1], Opcode: verbs.OpFastReg, MR: r.src,
		Access: verbs.AccessRemoteRead, IOVA: 1 << 32, Segs: [][]byte{r.data[:size/3],
			r.data[size/3:]}, Done: handler(d.aSent)}
	r.call[1] = verbs.WorkRequest{Next: &r.call[2], Opcode: verbs.OpFastReg, MR: r.sink,
		Access: verbs.AccessRemoteWrite, IOVA: 2 << 32, Segs: [][]byte{r.back[:size/2],
			r.back[size/2:]}, Done: handler(d.aSent)}
	r.call[2] = verbs.WorkRequest{Opcode: verbs.OpSend, SGList: msg, Done: handler(d.aSent)}
	r.serve[0] = verbs.WorkRequest{Opcode: verbs.OpRDMARead, Signaled: true, SGList: tmp, RemoteAddr: 1 << 32,
		Done: handler(d.bSent)}
	r.serve[1] = verbs.WorkRequest{Next: &r.serve[2], Opcode: verbs.OpRDMAWrite, SGList: tmp, RemoteAddr: 2 << 32,
		Done: handler(d.bSent)}
	r.serve[2] = verbs.WorkRequest{Opcode: verbs.OpSendWithInv, SGList: msg, Done: handler(d.bSent)}
	r.inv = verbs.WorkRequest{Opcode: verbs.OpLocalInv, Signaled: true, Done: handler(d.aSent)}
	return r
}

func (r *rpc) run() {
	d := r.d
	r.key++
	src, sink := r.src.RKey().WithKey(r.key), r.sink.RKey().WithKey(r.key)
	r.call[0].NewKey, r.call[1].NewKey = r.key, r.key
	r.serve[0].RKey, r.serve[1].RKey, r.serve[2].InvalidateRKey, r.inv.InvalidateRKey = src, sink, sink, src
	d.recv(d.a, &r.recvA)
	d.recv(d.b, &r.recvB)
	d.post(d.a, &r.call[0])
	d.want(d.bRecv)
	d.post(d.b, &r.serve[0])
	d.want(d.bSent)
	d.post(d.b, &r.serve[1])
	d.want(d.aRecv)
	d.post(d.a, &r.inv)
	d.want(d.aSent)
}

// TestExchangeDoesNotAllocate checks that Send, Receive, RDMA Write, RDMA Read, FastReg, LocalInv
// and Send With Invalidate allocate nothing on either side, on any goroutine.
func TestExchangeDoesNotAllocate(t *testing.T) {
	for _, c := range configs[:2] {
		t.Run(c.name, func(t *testing.T) {
			addr, endpoints := acceptAll(t, c.cfg)
			r := newRPC(newPair(t, c.cfg, addr, endpoints), 300000)
			for range 5 {
				r.run()
			}
			if !bytes.Equal(r.data, r.back) {
				t.Fatal("the returned data differs from the sent data")
			}
			if n := testing.AllocsPerRun(100, r.run); n != 0 {
				t.Errorf("allocations per exchange: got %v, want 0", n)
			}
		})
	}
}

// sges returns an SGE list of one buffer of n bytes.
func sges(n int) []verbs.SGE { return []verbs.SGE{{Buf: make([]byte, n)}} }
