package softiwarp

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
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

// An unconnectedPair is a pair that listens. The method connect makes the connection.
type unconnectedPair struct {
	*pair
	p    verbs.Provider
	l    verbs.Listener
	port uint16
}

func newUnconnectedPair(t testing.TB, cfg Config) *unconnectedPair {
	t.Helper()
	p := New(cfg)
	l, err := p.Listen(testContext(t), loopback)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return &unconnectedPair{pair: &pair{t: t}, p: p, l: l, port: l.Addr().Port()}
}

func newPair(t testing.TB, cfg Config) *pair {
	t.Helper()
	d := newUnconnectedPair(t, cfg)
	d.connect()
	return d.pair
}

func (d *unconnectedPair) connect() {
	t := d.t
	t.Helper()
	ctx := testContext(t)
	id, err := d.p.Resolve(ctx, d.l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	d.a = newEndpoint(t, id)
	for _, c := range []*chan verbs.Status{&d.aSent, &d.aRecv, &d.bSent, &d.bRecv} {
		*c = make(chan verbs.Status, pairDepth)
	}
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(ctx, endpointParam) }()
	r, err := d.l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	d.b = newEndpoint(t, r)
	if err := r.Accept(ctx, endpointParam); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	// Consume the small Receives of both endpoints. The first message also allows b to send.
	for range numRecvs {
		if st := d.a.run(&verbs.WorkRequest{Opcode: verbs.OpSend,
			SGList: sges(recvSize)}).Status; st != verbs.StatusSuccess {
			t.Fatal(st)
		}
		d.b.received()
		if st := d.b.run(&verbs.WorkRequest{Opcode: verbs.OpSend,
			SGList: sges(recvSize)}).Status; st != verbs.StatusSuccess {
			t.Fatal(st)
		}
		d.a.received()
	}
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
	if _, err := v.qp.PostSend(wr); err != nil {
		d.t.Fatal(err)
	}
}

func (d *pair) recv(v *endpoint, rr *verbs.RecvRequest) {
	if _, err := v.qp.PostRecv(rr); err != nil {
		d.t.Fatal(err)
	}
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
	for _, c := range configs {
		t.Run(c.name, func(t *testing.T) {
			r := newRPC(newPair(t, c.cfg), 300000)
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

// benchConfigs are the configurations for which the benchmarks run.
var benchConfigs = []struct {
	name string
	cfg  Config
}{{"CRC=off", Config{}}, {"CRC=on", Config{CRC: true}}, {"FPDU=1448", Config{MaxFPDU: 1448}}}

// BenchmarkPingPong measures a Send of 64 bytes in each direction.
func BenchmarkPingPong(b *testing.B) {
	for _, c := range benchConfigs {
		b.Run(c.name, func(b *testing.B) {
			d := newPair(b, c.cfg)
			msg := []verbs.SGE{{Buf: make([]byte, 64)}}
			ra := verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 64)}, Done: handler(d.aRecv)}
			rb := verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 64)}, Done: handler(d.bRecv)}
			wa := verbs.WorkRequest{Opcode: verbs.OpSend, SGList: msg, Done: handler(d.aSent)}
			wb := verbs.WorkRequest{Opcode: verbs.OpSend, SGList: msg, Done: handler(d.bSent)}
			b.ReportAllocs()
			for b.Loop() {
				d.recv(d.a, &ra)
				d.recv(d.b, &rb)
				d.post(d.a, &wa)
				d.want(d.bRecv)
				d.post(d.b, &wb)
				d.want(d.aRecv)
			}
		})
	}
}

const megabyte = 1 << 20

// BenchmarkWrite1M measures a Send, and an RDMA Write of 1 MiB followed by a Send in return.
func BenchmarkWrite1M(b *testing.B) {
	for _, c := range benchConfigs {
		b.Run(c.name, func(b *testing.B) {
			d := newPair(b, c.cfg)
			_, key := d.a.register(verbs.AccessRemoteWrite, 1, make([]byte, megabyte))
			ra := verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 64)}, Done: handler(d.aRecv)}
			rb := verbs.RecvRequest{SGE: verbs.SGE{Buf: make([]byte, 64)}, Done: handler(d.bRecv)}
			reply := verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sges(64), Done: handler(d.bSent)}
			write := verbs.WorkRequest{Next: &reply, Opcode: verbs.OpRDMAWrite, SGList: sges(megabyte),
				RKey: verbs.RKey(key), RemoteAddr: winIOVA, Done: handler(d.bSent)}
			call := verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sges(64), Done: handler(d.aSent)}
			b.SetBytes(megabyte)
			b.ReportAllocs()
			for b.Loop() {
				d.recv(d.a, &ra)
				d.recv(d.b, &rb)
				d.post(d.a, &call)
				d.want(d.bRecv)
				d.post(d.b, &write)
				d.want(d.aRecv)
			}
		})
	}
}

// sges returns an SGE list of one buffer of n bytes.
func sges(n int) []verbs.SGE { return []verbs.SGE{{Buf: make([]byte, n)}} }

// BenchmarkRead1M measures an RDMA Read of 1 MiB.
func BenchmarkRead1M(b *testing.B) {
	for _, c := range benchConfigs {
		b.Run(c.name, func(b *testing.B) {
			d := newPair(b, c.cfg)
			_, key := d.a.register(verbs.AccessRemoteRead, 1, make([]byte, megabyte))
			read := verbs.WorkRequest{Opcode: verbs.OpRDMARead, Signaled: true, SGList: sges(megabyte),
				RKey: verbs.RKey(key), RemoteAddr: winIOVA, Done: handler(d.bSent)}
			b.SetBytes(megabyte)
			b.ReportAllocs()
			for b.Loop() {
				d.post(d.b, &read)
				d.want(d.bSent)
			}
		})
	}
}

// BenchmarkTCP measures the same amounts of data over a TCP connection between two goroutines, for
// comparison.
func BenchmarkTCP(b *testing.B) {
	for _, c := range []struct {
		name        string
		call, reply int
	}{{"PingPong", 64, 64}, {"Write1M", 64, megabyte + 64}, {"Read1M", 48, megabyte}} {
		b.Run(c.name, func(b *testing.B) {
			l, err := net.Listen("tcp", loopback.String())
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				s, err := l.Accept()
				if err != nil {
					return
				}
				defer s.Close()
				in, out := make([]byte, c.call), make([]byte, c.reply)
				for {
					if _, err := io.ReadFull(s, in); err != nil {
						return
					}
					if _, err := s.Write(out); err != nil {
						return
					}
				}
			}()
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				b.Fatal(err)
			}
			out, in := make([]byte, c.call), make([]byte, c.reply)
			if c.reply >= megabyte {
				b.SetBytes(megabyte)
			}
			for b.Loop() {
				if _, err := conn.Write(out); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(conn, in); err != nil {
					b.Fatal(err)
				}
			}
			conn.Close()
			<-ended
		})
	}
}
