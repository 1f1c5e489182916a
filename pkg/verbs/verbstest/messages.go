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

// messageSizes contains all residues modulo 4 and the sizes around segment limits.
var messageSizes = []int{0, 1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 1023, 1436, 4095, 4096, 4097, 16383, 65436,
	65437, 65535, 65536, 200001}

func testSendSizes(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	for _, from := range []*Endpoint{p.active, p.passive} {
		to := p.other(from)
		for i, n := range messageSizes {
			in := newCompletions()
			src, dst := from.Buffer(n), to.Buffer(n+8)
			pattern(src.Buf, byte(i))
			pattern(dst.Buf, 0xaa)
			want := append(append([]byte(nil), src.Buf...), dst.Buf[n:]...)
			to.recv(in, dst)
			from.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{src}})
			wc := in.wait(t, 1)[0]
			if wc.Status != verbs.StatusSuccess || int(wc.ByteLen) != n || wc.Opcode != verbs.OpRecv ||
				wc.QP != to.QP || wc.WithInv {
				t.Fatalf("Receive of %d bytes: got %+v", n, wc)
			}
			if !bytes.Equal(dst.Buf, want) {
				t.Fatalf("message of %d bytes: its content or the memory after it is wrong", n)
			}
		}
	}
}

func testSendGathers(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	in := newCompletions()
	dst := p.passive.Buffer(200000)
	p.passive.recv(in, dst)
	var sges []verbs.SGE
	var want []byte
	for i, n := range []int{3, 0, 100001, 77} {
		b := p.active.Buffer(n)
		pattern(b.Buf, byte(i))
		sges = append(sges, b)
		want = append(want, b.Buf...)
	}
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: sges})
	wc := in.wait(t, 1)[0]
	if !bytes.Equal(dst.Buf[:wc.ByteLen], want) {
		t.Fatalf("gathered message: got %d bytes, want %d bytes with the gathered data", wc.ByteLen, len(want))
	}
}

// testSendOrder checks that messages arrive in the order of their posts while Receives are
// reposted.
func testSendOrder(t *testing.T, s *suite) {
	const chains, perChain = 40, 5
	p := s.pair(t, options{})
	seen := make(chan uint32, chains*perChain)
	repost := func(b verbs.SGE) {
		var rr verbs.RecvRequest
		rr = verbs.RecvRequest{SGE: b, Done: func(wc *verbs.WorkCompletion) {
			if wc.Status != verbs.StatusSuccess {
				return
			}
			got := binary.BigEndian.Uint32(b.Buf)
			if _, err := p.passive.QP.PostRecv(&rr); err != nil {
				t.Errorf("repost Receive: %v", err)
			}
			seen <- got // the connection may end after the last message
		}}
		if _, err := p.passive.QP.PostRecv(&rr); err != nil {
			t.Fatal(err)
		}
	}
	for range defaultDepth {
		repost(p.passive.Buffer(4))
	}
	bufs := make([]verbs.SGE, perChain)
	for i := range bufs {
		bufs[i] = p.active.Buffer(4)
	}
	for c := range chains {
		var wrs []*verbs.WorkRequest
		for i, b := range bufs {
			binary.BigEndian.PutUint32(b.Buf, uint32(c*perChain+i))
			wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{b}})
		}
		p.active.must(wrs...)
		for i := range perChain { // limits the messages in flight to the peer's Receives
			if got := <-seen; got != uint32(c*perChain+i) {
				t.Fatalf("message: got %d, want %d", got, c*perChain+i)
			}
		}
	}
}

// testParallelPosters checks that chains of several posters do not mix.
func testParallelPosters(t *testing.T, s *suite) {
	const posters, chains, perChain = 4, 40, 4
	const total = posters * chains * perChain
	p := s.pair(t, options{sendDepth: total, recvDepth: total})
	in := newCompletions()
	dst := p.passive.Buffer(total * 8)
	for i := range total {
		p.passive.recv(in, verbs.SGE{Buf: dst.Buf[i*8 : i*8+8], LKey: dst.LKey})
	}
	var wg sync.WaitGroup
	out := newCompletions()
	for poster := range posters {
		src := p.active.Buffer(chains * perChain * 8)
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
				if _, err := p.active.QP.PostSend(Chain(wrs...)); err != nil {
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
				t.Fatalf("message %d: got %d of poster %d, want %d of poster %d", i+j, seq, got,
					next[poster], poster)
			}
			next[poster]++
		}
	}
	if st := p.active.QP.Stats(); st.PostedChains != posters*chains || st.PostedSendWRs != total {
		t.Errorf("stats: got %d chains and %d requests, want %d and %d", st.PostedChains, st.PostedSendWRs,
			posters*chains, total)
	}
}

// testUnsignaled checks that a successful unsignaled request has no completion and frees its slot.
func testUnsignaled(t *testing.T, s *suite) {
	const rounds = 20
	p := s.pair(t, options{sendDepth: 8, recvDepth: 8 * rounds})
	in, unsignaled, signaled := newCompletions(), newCompletions(), newCompletions()
	src, dst := p.active.Buffer(16), p.passive.Buffer(16)
	for range rounds * 8 {
		p.passive.recv(in, dst)
	}
	for r := range rounds {
		var wrs []*verbs.WorkRequest
		for i := range 8 {
			wr := &verbs.WorkRequest{Opcode: verbs.OpSend, Done: unsignaled.done, SGList: []verbs.SGE{src}}
			if i == 7 {
				wr.Signaled, wr.Done = true, signaled.done
			}
			wrs = append(wrs, wr)
		}
		if _, err := p.active.QP.PostSend(Chain(wrs...)); err != nil {
			t.Fatalf("round %d: %v", r, err)
		}
		signaled.wait(t, r+1)
	}
	in.wait(t, rounds*8)
	if n := len(unsignaled.all()); n != 0 {
		t.Errorf("completions of successful unsignaled requests: got %d, want 0", n)
	}
}

func testQueueFull(t *testing.T, s *suite) {
	p := s.pair(t, options{sendDepth: 4, recvDepth: 4, blocking: true})
	// A handler that blocks stops the dispatcher, so that no completion frees a slot.
	release, blocked := make(chan struct{}), make(chan struct{})
	sb := p.passive.Buffer(4)
	for i := range 5 {
		bad, err := p.passive.QP.PostRecv(&verbs.RecvRequest{SGE: sb, Done: func(*verbs.WorkCompletion) {}})
		if i < 4 && err != nil {
			t.Fatalf("Receive %d: %v", i, err)
		}
		if i == 4 && (!errors.Is(err, verbs.ErrQueueFull) || bad == nil) {
			t.Fatalf("fifth Receive on a queue of 4: got %v, want ErrQueueFull", err)
		}
	}
	src := p.active.Buffer(4)
	out := newCompletions()
	first := &verbs.WorkRequest{Opcode: verbs.OpSend, Signaled: true, SGList: []verbs.SGE{src},
		Done: func(*verbs.WorkCompletion) {
			close(blocked)
			<-release
		}}
	if _, err := p.active.QP.PostSend(first); err != nil {
		t.Fatal(err)
	}
	<-blocked
	var wrs []*verbs.WorkRequest
	for range 6 {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, Done: out.done})
	}
	bad, err := p.active.QP.PostSend(Chain(wrs...))
	if !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("chain of 6 on a queue of 4: got %v, want ErrQueueFull", err)
	}
	posted := 0
	for bad != nil && posted < len(wrs) && wrs[posted] != bad {
		posted++
	}
	if posted != 4 { // the completed Send has freed its slot
		t.Errorf("posted requests of the chain: got %d, want 4", posted)
	}
	close(release)
	out.wait(t, posted)
	// The queue accepts requests again.
	p.active.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{src}})
}

func testPostErrors(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	nop := func(*verbs.WorkCompletion) {}
	wr := &verbs.WorkRequest{Opcode: verbs.OpSend, Done: nop}
	if bad, err := p.active.QP.PostSend(wr); !errors.Is(err, verbs.ErrQPState) || bad != wr {
		t.Errorf("post before Connect: got %v, want ErrQPState", err)
	}

	p = s.pair(t, options{})
	good := &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Done: nop}
	sges := make([]verbs.SGE, defaultSGE+1)
	for name, bad := range map[string]*verbs.WorkRequest{
		"no handler":         {Opcode: verbs.OpSend},
		"no opcode":          {Done: nop},
		"receive":            {Opcode: verbs.OpRecv, Done: nop},
		"too many SGEs":      {Opcode: verbs.OpSend, Done: nop, SGList: sges},
		"Read into two SGEs": {Opcode: verbs.OpRDMARead, Done: nop, SGList: sges[:2]},
	} {
		good.Next = bad
		if at, err := p.active.QP.PostSend(good); !errors.Is(err, verbs.ErrInvalid) || at != bad {
			t.Errorf("%s: got %v, want ErrInvalid at the second request", name, err)
		}
	}
	_, err := p.active.QP.PostRecv(&verbs.RecvRequest{})
	failsWith(t, "Receive without handler", err, verbs.ErrInvalid)
	p.active.QP.Drain()
	_, err = p.active.QP.PostSend(wr)
	failsWith(t, "post after Drain", err, verbs.ErrQPState)
	_, err = p.active.QP.PostRecv(&verbs.RecvRequest{Done: nop})
	failsWith(t, "post Receive after Drain", err, verbs.ErrQPState)
}

func testReceiveTooSmall(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	in := newCompletions()
	dst := p.passive.Buffer(64)
	pattern(dst.Buf, 1)
	guard := append([]byte(nil), dst.Buf...)
	p.passive.recv(in, verbs.SGE{Buf: dst.Buf[:32], LKey: dst.LKey})
	p.active.post(newCompletions(), &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.active.Buffer(33)}})
	// Some kernel devices report another error of the queue pair.
	reported := p.passive.Dev.Attrs().Caps.Has(verbs.CapTerminates)
	if st := in.wait(t, 1)[0].Status; st != verbs.StatusLocLenErr && (reported || st == verbs.StatusSuccess) {
		t.Errorf("Receive of 32 bytes for a message of 33: got %v, want %v", st, verbs.StatusLocLenErr)
	}
	p.passive.WaitDisconnect()
	p.active.WaitDisconnect()
	if !bytes.Equal(dst.Buf[32:], guard[32:]) {
		t.Error("memory after the Receive was written")
	}
}

func testNoReceive(t *testing.T, s *suite) {
	p := s.pair(t, options{})
	p.active.post(newCompletions(), &verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{p.active.Buffer(4)}})
	// an InfiniBand sender retries instead
	if p.active.ID.Device().Attrs().Transport == verbs.TransportIWARP {
		p.active.WaitDisconnect()
		p.passive.WaitDisconnect()
	}
}

// summary returns the number of completions per status, for failure messages.
func summary(l []verbs.WorkCompletion) string {
	count := make(map[verbs.Status]int)
	for _, wc := range l {
		count[wc.Status]++
	}
	return fmt.Sprint(count)
}
