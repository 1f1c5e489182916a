package verbstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var messageTests = []conformanceTest{
	{"SendRecvSizes", 0, testSendSizes},
	{"SendGathers", 0, testSendGathers},
	{"SendOrder", 0, testSendOrder},
	{"ParallelPosters", 0, testParallelPosters},
	{"Unsignaled", 0, testUnsignaled},
	{"QueueFull", 0, testQueueFull},
	{"PostErrors", 0, testPostErrors},
	{"ReceiveTooSmall", 0, testReceiveTooSmall},
	{"NoReceive", 0, testNoReceive},
}

// messageSizes cover all residues mod 4 and the edges of segments.
var messageSizes = []int{0, 1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 1023, 1436, 4095, 4096, 4097, 16383, 65436,
	65437, 65535, 65536, 200001}

func testSendSizes(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	for _, from := range []*endpoint{p.active, p.passive} {
		to := p.other(from)
		for i, n := range messageSizes {
			in := newComps()
			src, dst := from.buffer(n), to.buffer(n+8)
			pattern(src.Buf, byte(i))
			pattern(dst.Buf, 0xaa)
			want := append(append([]byte(nil), src.Buf...), dst.Buf[n:]...)
			to.recv(in, dst)
			from.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{src}})
			wc := in.wait(t, 1)[0]
			if wc.Status != verbs.StatusSuccess || int(wc.ByteLen) != n || wc.Opcode != verbs.OpRecv ||
				wc.QP != to.qp || wc.WithInv {
				t.Fatalf("Receive of %d octets: %+v", n, wc)
			}
			if !bytes.Equal(dst.Buf, want) {
				t.Fatalf("message of %d octets arrived changed, or the memory behind it did", n)
			}
		}
	}
}

func testSendGathers(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	in := newComps()
	dst := p.passive.buffer(200000)
	p.passive.recv(in, dst)
	var sges []verbs.SGE
	var want []byte
	for i, n := range []int{3, 0, 100001, 77} {
		b := p.active.buffer(n)
		pattern(b.Buf, byte(i))
		sges = append(sges, b)
		want = append(want, b.Buf...)
	}
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sges})
	wc := in.wait(t, 1)[0]
	if !bytes.Equal(dst.Buf[:wc.ByteLen], want) {
		t.Fatalf("gathered message of %d octets arrived as %d others", len(want), wc.ByteLen)
	}
}

// testSendOrder: messages arrive in the order posted, chain after chain, while Receives are posted
// as they complete.
func testSendOrder(t *testing.T, s *suite) {
	const chains, perChain = 200, 5
	p := s.pair(t, options{})
	seen := make(chan uint32, chains*perChain)
	repost := func(b verbs.SGE) {
		var rr verbs.RecvRequest
		rr = verbs.RecvRequest{SGE: b, Done: func(wc *verbs.WorkCompletion) {
			if wc.Status != verbs.StatusSuccess {
				return
			}
			seen <- binary.BigEndian.Uint32(b.Buf)
			if _, err := p.passive.qp.PostRecv(&rr); err != nil {
				t.Errorf("post Receive again: %v", err)
			}
		}}
		if _, err := p.passive.qp.PostRecv(&rr); err != nil {
			t.Fatal(err)
		}
	}
	for range defaultDepth {
		repost(p.passive.buffer(4))
	}
	bufs := make([]verbs.SGE, perChain)
	for i := range bufs {
		bufs[i] = p.active.buffer(4)
	}
	for c := range chains {
		var wrs []*verbs.WorkRequest
		for i, b := range bufs {
			binary.BigEndian.PutUint32(b.Buf, uint32(c*perChain+i))
			wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{b}})
		}
		p.active.must(wrs...)
		for i := range perChain { // also keeps within the peer's Receives
			if got := <-seen; got != uint32(c*perChain+i) {
				t.Fatalf("message %d arrived where %d was due", got, c*perChain+i)
			}
		}
	}
}

// testParallelPosters: chains of several posters are never mixed.
func testParallelPosters(t *testing.T, s *suite) {
	const posters, chains, perChain = 4, 40, 4
	const total = posters * chains * perChain
	p := s.pair(t, options{sendDepth: total, recvDepth: total})
	in := newComps()
	dst := p.passive.buffer(total * 8)
	for i := range total {
		p.passive.recv(in, verbs.SGE{Buf: dst.Buf[i*8 : i*8+8], LKey: dst.LKey})
	}
	var wg sync.WaitGroup
	out := newComps()
	for poster := range posters {
		src := p.active.buffer(chains * perChain * 8)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for c := range chains {
				var wrs []*verbs.WorkRequest
				for i := range perChain {
					b := src.Buf[(c*perChain+i)*8:][:8]
					binary.BigEndian.PutUint32(b, uint32(poster))
					binary.BigEndian.PutUint32(b[4:], uint32(c*perChain+i))
					wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true, Done: out.done,
						SGList: []verbs.SGE{{Buf: b, LKey: src.LKey}}})
				}
				if _, err := p.active.qp.PostSend(chain(wrs...)); err != nil {
					t.Errorf("post: %v", err)
				}
			}
		}()
	}
	wg.Wait()
	in.wait(t, total)
	out.wait(t, total)
	var next [posters]uint32
	for i := 0; i < total; i += perChain {
		poster := binary.BigEndian.Uint32(dst.Buf[i*8:])
		for j := range perChain {
			b := dst.Buf[(i+j)*8:]
			if got, seq := binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]); got != poster ||
				seq != next[poster] {
				t.Fatalf("message %d is %d of poster %d, want %d of poster %d: a chain was broken up", i+j, seq, got,
					next[poster], poster)
			}
			next[poster]++
		}
	}
	if st := p.active.qp.Stats(); st.PostedChains != posters*chains || st.PostedSendWRs != total {
		t.Errorf("stats count %d chains and %d requests, want %d and %d", st.PostedChains, st.PostedSendWRs,
			posters*chains, total)
	}
}

// testUnsignaled: a success that nobody asked to hear of makes no completion, and frees its slot.
func testUnsignaled(t *testing.T, s *suite) {
	const rounds = 20
	p := s.pair(t, options{sendDepth: 8, recvDepth: 8 * rounds})
	in, quiet, loud := newComps(), newComps(), newComps()
	src, dst := p.active.buffer(16), p.passive.buffer(16)
	for range rounds * 8 {
		p.passive.recv(in, dst)
	}
	for r := range rounds {
		var wrs []*verbs.WorkRequest
		for i := range 8 {
			wr := &verbs.WorkRequest{Opcode: verbs.OpSend, Done: quiet.done, SGList: []verbs.SGE{src}}
			if i == 7 {
				wr.Signaled, wr.Done = true, loud.done
			}
			wrs = append(wrs, wr)
		}
		if _, err := p.active.qp.PostSend(chain(wrs...)); err != nil {
			t.Fatalf("round %d: %v", r, err)
		}
		loud.wait(t, r+1)
	}
	in.wait(t, rounds*8)
	if n := len(quiet.all()); n != 0 {
		t.Errorf("%d completions of unsignaled requests that succeeded", n)
	}
}

func testQueueFull(t *testing.T, s *suite) {
	p := s.pair(t, options{sendDepth: 4, recvDepth: 4})
	// A handler that does not return holds the dispatcher, so that no completion frees a slot.
	hold, held := make(chan struct{}), make(chan struct{})
	sb := p.passive.buffer(4)
	for i := range 5 {
		bad, err := p.passive.qp.PostRecv(&verbs.RecvRequest{SGE: sb, Done: func(*verbs.WorkCompletion) {}})
		if i < 4 && err != nil {
			t.Fatalf("Receive %d: %v", i, err)
		}
		if i == 4 && (!errors.Is(err, verbs.ErrQueueFull) || bad == nil) {
			t.Fatalf("Receive 4 of a queue of 4: %v", err)
		}
	}
	src := p.active.buffer(4)
	out := newComps()
	first := &verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true, SGList: []verbs.SGE{src},
		Done: func(*verbs.WorkCompletion) {
			close(held)
			<-hold
		}}
	if _, err := p.active.qp.PostSend(first); err != nil {
		t.Fatal(err)
	}
	<-held
	var wrs []*verbs.WorkRequest
	for range 6 {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, Done: out.done})
	}
	bad, err := p.active.qp.PostSend(chain(wrs...))
	if !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("chain of 6 on a queue of 4: %v, want ErrQueueFull", err)
	}
	posted := 0
	for bad != nil && posted < len(wrs) && wrs[posted] != bad {
		posted++
	}
	if posted != 4 { // the held one left its slot when its completion was taken
		t.Errorf("%d of the chain were posted, want 4", posted)
	}
	close(hold)
	out.wait(t, posted)
	// The queue works again.
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{src}})
}

func testPostErrors(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	nop := func(*verbs.WorkCompletion) {}
	wr := &verbs.WorkRequest{Opcode: verbs.OpSend, Done: nop}
	if bad, err := p.active.qp.PostSend(wr); !errors.Is(err, verbs.ErrQPState) || bad != wr {
		t.Errorf("post before the connection: %v, want ErrQPState", err)
	}

	p = s.pair(t, options{})
	good := &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Done: nop}
	sges := make([]verbs.SGE, defaultSGE+1)
	for name, bad := range map[string]*verbs.WorkRequest{
		"no handler":    {Opcode: verbs.OpSend},
		"no opcode":     {Done: nop},
		"receive":       {Opcode: verbs.OpRecv, Done: nop},
		"too many SGEs": {Opcode: verbs.OpSend, Done: nop, SGList: sges},
		"Read into two": {Opcode: verbs.OpRDMARead, Done: nop, SGList: sges[:2]},
	} {
		good.Next = bad
		if at, err := p.active.qp.PostSend(good); !errors.Is(err, verbs.ErrInvalid) || at != bad {
			t.Errorf("%s: %v, want ErrInvalid at the second request", name, err)
		}
	}
	if _, err := p.active.qp.PostRecv(&verbs.RecvRequest{}); !errors.Is(err, verbs.ErrInvalid) {
		t.Errorf("Receive without handler: %v, want ErrInvalid", err)
	}
	p.active.qp.Drain()
	if _, err := p.active.qp.PostSend(wr); !errors.Is(err, verbs.ErrQPState) {
		t.Errorf("post after Drain: %v, want ErrQPState", err)
	}
	if _, err := p.active.qp.PostRecv(&verbs.RecvRequest{Done: nop}); !errors.Is(err, verbs.ErrQPState) {
		t.Errorf("post Receive after Drain: %v, want ErrQPState", err)
	}
}

func testReceiveTooSmall(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	in := newComps()
	dst := p.passive.buffer(64)
	pattern(dst.Buf, 1)
	guard := append([]byte(nil), dst.Buf...)
	p.passive.recv(in, verbs.SGE{Buf: dst.Buf[:32], LKey: dst.LKey})
	p.active.post(newComps(), &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.active.buffer(33)}})
	// Of kernel devices not all tell this error from others of the queue pair.
	tells := p.passive.dev.Attrs().Caps.Has(verbs.CapTerminates)
	if st := in.wait(t, 1)[0].Status; st != verbs.StatusLocLenErr && (tells || st == verbs.StatusSuccess) {
		t.Errorf("Receive of 32 octets for a message of 33: %v, want %v", st, verbs.StatusLocLenErr)
	}
	p.passive.goneWithin()
	p.active.goneWithin()
	if !bytes.Equal(dst.Buf[32:], guard[32:]) {
		t.Error("memory behind the Receive was written")
	}
}

func testNoReceive(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	p.active.post(newComps(), &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.active.buffer(4)}})
	if p.active.id.Device().Attrs().Transport == verbs.TransportIWARP { // InfiniBand retries
		p.active.goneWithin()
		p.passive.goneWithin()
	}
}

// String makes completion lists readable in failures.
func summary(l []verbs.WorkCompletion) string {
	count := make(map[verbs.Status]int)
	for _, wc := range l {
		count[wc.Status]++
	}
	return fmt.Sprint(count)
}
