package verbstest

import (
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

var endingTests = []conformanceTest{
	{"DrainUnconnected", 0, testDrainUnconnected},
	{"DrainFlushes", 0, testDrainFlushes},
	{"PeerCloses", 0, testPeerCloses},
	{"CloseInOnDisconnect", 0, testCloseInOnDisconnect},
	{"CloseConcurrently", 0, testCloseConcurrently},
	{"FlushOrder", 0, testFlushOrder},
	{"DisconnectStorm", verbs.CapFastReg, testDisconnectStorm},
}

func testDrainUnconnected(t *testing.T, s *suite) {
	p := s.pair(t, options{noConnect: true})
	c := newComps()
	b := p.active.buffer(8)
	for range 10 {
		p.active.recv(c, b)
	}
	p.active.qp.Drain()
	p.active.qp.Drain()
	if l := c.all(); len(l) != 10 || l[0].Status != verbs.StatusWRFlushErr {
		t.Errorf("Receives after Drain: %s, want 10 flushed", summary(l))
	}
	if len(p.active.gone) != 0 {
		t.Error("Drain called OnDisconnect")
	}
}

// testDrainFlushes: when Drain returns every handler has returned.
func testDrainFlushes(t *testing.T, s *suite) {
	p := s.pair(t, options{}).open()
	var returned atomic.Int32
	slow := func(*verbs.WorkCompletion) {
		time.Sleep(time.Millisecond)
		returned.Add(1)
	}
	b := p.passive.buffer(8)
	for range 20 {
		if _, err := p.passive.qp.PostRecv(&verbs.RecvRequest{SGE: b, Done: slow}); err != nil {
			t.Fatal(err)
		}
	}
	var wrs []*verbs.WorkRequest
	for range 20 {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, Done: slow})
	}
	if _, err := p.passive.qp.PostSend(chain(wrs...)); err != nil {
		t.Fatal(err)
	}
	p.passive.qp.Drain()
	if n := returned.Load(); n != 40 {
		t.Errorf("%d handlers had returned when Drain did, want 40", n)
	}
	p.active.goneWithin()
	if len(p.passive.gone) != 0 {
		t.Error("Drain called OnDisconnect at its own end")
	}
}

func testPeerCloses(t *testing.T, s *suite) {
	for _, who := range []string{"active", "passive"} {
		p := s.pair(t, options{})
		closing, staying := p.active, p.passive
		if who == "passive" {
			p.open()
			closing, staying = p.passive, p.active
		}
		c := newComps()
		b := staying.buffer(8)
		for range 5 {
			staying.recv(c, b)
		}
		if err := closing.id.Close(); err != nil {
			t.Error(err)
		}
		if cause := staying.goneWithin(); staying.dev.Attrs().Transport == verbs.TransportIWARP && cause != io.EOF {
			t.Errorf("the peer closed in order: cause %v, want io.EOF", cause)
		}
		for _, wc := range c.wait(t, 5) {
			if wc.Status != verbs.StatusWRFlushErr {
				t.Errorf("Receive after the peer closed: %v", wc.Status)
			}
		}
		staying.qp.Drain()
		time.Sleep(5 * time.Millisecond) // a second call would come about now
		if len(staying.gone) != 0 || len(closing.gone) != 0 {
			t.Error("OnDisconnect was called again, or for Close")
		}
	}
}

func testCloseInOnDisconnect(t *testing.T, s *suite) {
	prov := s.newProvider(t)
	l := listen(t, prov, s.laddr)
	id, err := prov.Resolve(within(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	_, err = id.CreateQP(mustPD(t, id.Device()), verbs.QPInitAttr{
		SendCQ: mustCQ(t, id.Device(), 4), RecvCQ: mustCQ(t, id.Device(), 4), MaxSendWR: 4, MaxRecvWR: 4,
		OnDisconnect: func(error) { closed <- id.Close() },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { id.Close() })
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(within(t), someDepths) }()
	req, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	var o options
	o.defaults()
	newEndpoint(t, req, &o)
	if err := req.Accept(within(t), someDepths); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	req.Close()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("Close from OnDisconnect did not return")
	}
}

func mustPD(t *testing.T, d verbs.Device) verbs.PD {
	t.Helper()
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pd.Dealloc() })
	return pd
}

func mustCQ(t *testing.T, d verbs.Device, n int) verbs.CQ {
	t.Helper()
	cq, err := d.CreateCQ(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cq.Close() })
	return cq
}

func testCloseConcurrently(t *testing.T, s *suite) {
	p := s.pair(t, options{}).open()
	var wg sync.WaitGroup
	for _, e := range []*endpoint{p.active, p.passive, p.active, p.passive} {
		wg.Add(2)
		go func() { defer wg.Done(); e.qp.Drain() }()
		go func() { defer wg.Done(); e.id.Close() }()
	}
	wg.Wait()
}

// testFlushOrder: requests complete in the order posted, also when they are flushed.
func testFlushOrder(t *testing.T, s *suite) {
	const n = 40
	p := s.pair(t, options{})
	order := make(chan int, n)
	var wrs []*verbs.WorkRequest
	src := p.active.buffer(100000)
	for i := range n {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, SGList: []verbs.SGE{src},
			RKey: 1, Done: func(*verbs.WorkCompletion) { order <- i }})
	}
	// to nowhere: the first is refused
	if _, err := p.active.qp.PostSend(chain(wrs...)); err != nil {
		t.Fatal(err)
	}
	for want := range n {
		select {
		case got := <-order:
			if got != want {
				t.Fatalf("request %d completed where %d was due", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("request %d did not complete", want)
		}
	}
}

// A ledger proves that every request posted completes exactly once.
type ledger struct {
	t      testing.TB
	mu     sync.Mutex
	posted int
	done   map[int]int // completions of each request
}

func (l *ledger) handler(op verbs.Opcode) (func(*verbs.WorkCompletion), func(accepted bool)) {
	l.mu.Lock()
	id := l.posted
	l.posted++
	l.done[id] = 0
	l.mu.Unlock()
	return func(*verbs.WorkCompletion) {
			l.mu.Lock()
			l.done[id]++
			l.mu.Unlock()
		}, func(accepted bool) {
			if !accepted {
				l.mu.Lock()
				l.done[id]++ // stands for the error that the poster got instead
				l.mu.Unlock()
			}
		}
}

func (l *ledger) check(what string) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.done {
		if n != 1 {
			l.t.Fatalf("%s: request %d of %d completed %d times", what, id, l.posted, n)
		}
	}
}

// stormRounds is how many connections the storm ends.
const stormRounds = 20

// testDisconnectStorm: connections under full load in both directions are ended at random moments,
// in different ways.
func testDisconnectStorm(t *testing.T, s *suite) {
	prov := s.newProvider(t)
	l := listen(t, prov, s.laddr)
	for round := range stormRounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) { storm(t, prov, l, round) })
	}
}

func storm(t *testing.T, prov verbs.Provider, l verbs.Listener, round int) {
	p := connectPair(t, prov, l, options{sendDepth: 32, recvDepth: 32})
	p.open()
	var books [2]ledger
	var windows [2]window
	for i, e := range []*endpoint{p.active, p.passive} {
		o := p.other(e)
		windows[i] = o.fastReg(o.mr(depth), byte(round), forWriting|verbs.AccessRemoteRead, 0x100, o.buffer(100000).Buf)
	}
	var wg sync.WaitGroup
	for i, e := range []*endpoint{p.active, p.passive} {
		books[i] = ledger{t: t, done: make(map[int]int)}
		book := &books[i]
		w := windows[i]
		local, sink, in := e.buffer(100000), e.buffer(100000), e.buffer(4096)
		wg.Add(2)
		go func() { // Receives
			defer wg.Done()
			for {
				h, settle := book.handler(verbs.OpRecv)
				_, err := e.qp.PostRecv(&verbs.RecvRequest{SGE: in, Done: h})
				settle(err == nil)
				if err == verbs.ErrQPState {
					return
				} else if err != nil {
					time.Sleep(20 * time.Microsecond)
				}
			}
		}()
		go func() { // chains of Write, Read, and now and then a Send
			defer wg.Done()
			r := rand.New(rand.NewPCG(uint64(round), uint64(i)))
			for n := 0; ; n++ {
				wrs := []*verbs.WorkRequest{
					{Opcode: verbs.OpRDMAWrite, RKey: w.rkey, RemoteAddr: w.iova,
						SGList: []verbs.SGE{{Buf: local.Buf[:r.IntN(100000)], LKey: local.LKey}}},
					{Opcode: verbs.OpRDMARead, RKey: w.rkey, RemoteAddr: w.iova,
						SGList: []verbs.SGE{{Buf: sink.Buf[:r.IntN(100000)], LKey: sink.LKey}}},
				}
				if n%16 == 0 {
					wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend,
						SGList: []verbs.SGE{{Buf: local.Buf[:r.IntN(4000)], LKey: local.LKey}}})
				}
				var settles []func(bool)
				for _, wr := range wrs {
					var settle func(bool)
					wr.Signaled = true
					wr.Done, settle = book.handler(wr.Opcode)
					settles = append(settles, settle)
				}
				bad, err := e.qp.PostSend(chain(wrs...))
				ok := true
				for i, settle := range settles {
					ok = ok && (err == nil || wrs[i] != bad)
					settle(ok)
				}
				if err == verbs.ErrQPState {
					return
				} else if err != nil {
					time.Sleep(20 * time.Microsecond)
				}
			}
		}()
	}
	time.Sleep(time.Duration(rand.IntN(8000)) * time.Microsecond)
	switch round % 4 {
	case 0:
		p.active.id.Close()
	case 1:
		p.passive.id.Close()
	case 2:
		go p.active.qp.Drain()
		p.passive.qp.Drain()
	case 3: // an access that is refused
		p.active.qp.PostSend(&verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1,
			SGList: []verbs.SGE{p.active.buffer(8)}, Done: func(*verbs.WorkCompletion) {}})
	}
	// Whatever it was, both ends get to know. (With a full queue the refused access was not
	// posted.)
	if round%4 == 3 {
		time.Sleep(20 * time.Millisecond)
	}
	p.active.qp.Drain()
	p.passive.qp.Drain()
	wg.Wait()
	books[0].check("active")
	books[1].check("passive")
	for _, e := range []*endpoint{p.active, p.passive} {
		st := e.qp.Stats()
		if st.SendCompletions > st.PostedSendWRs || st.RecvCompletions != st.PostedRecvWRs {
			t.Errorf("stats do not add up: %+v", st)
		}
	}
}
