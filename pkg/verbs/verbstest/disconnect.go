package verbstest

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var disconnectTests = []conformanceTest{
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
	c := newCompletions()
	b := p.active.Buffer(8)
	for range 10 {
		p.active.recv(c, b)
	}
	p.active.QP.Drain()
	p.active.QP.Drain()
	if l := c.all(); len(l) != 10 || l[0].Status != verbs.StatusWRFlushErr {
		t.Errorf("Receives after Drain: got %s, want 10 flushed", summary(l))
	}
	if len(p.active.Disconnects) != 0 {
		t.Error("Drain called OnDisconnect")
	}
}

// testDrainFlushes checks that every handler has returned when Drain returns.
func testDrainFlushes(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	var returned atomic.Int32
	slow := func(*verbs.WorkCompletion) {
		for range 100 {
			runtime.Gosched()
		}
		returned.Add(1)
	}
	b := p.passive.Buffer(8)
	for range 20 {
		if _, err := p.passive.QP.PostRecv(&verbs.RecvRequest{SGE: b, Done: slow}); err != nil {
			t.Fatal(err)
		}
	}
	var wrs []*verbs.WorkRequest
	for range 20 {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, Done: slow})
	}
	if _, err := p.passive.QP.PostSend(Chain(wrs...)); err != nil {
		t.Fatal(err)
	}
	p.passive.QP.Drain()
	if n := returned.Load(); n != 40 {
		t.Errorf("handlers that returned before Drain: got %d, want 40", n)
	}
	p.active.WaitDisconnect()
	if len(p.passive.Disconnects) != 0 {
		t.Error("Drain called the OnDisconnect of the draining side")
	}
}

func testPeerCloses(t *testing.T, s *suite) {
	for _, who := range []string{"active", "passive"} {
		p := s.pair(t, options{})
		closing, staying := p.active, p.passive
		if who == "passive" {
			p.sendFirst()
			closing, staying = p.passive, p.active
		}
		c := newCompletions()
		b := staying.Buffer(8)
		for range 5 {
			staying.recv(c, b)
		}
		kit.Must(t, closing.ID.Close())
		cause := staying.WaitDisconnect()
		if staying.Dev.Attrs().Transport == verbs.TransportIWARP && !errors.Is(cause, io.EOF) {
			t.Errorf("disconnect cause after the peer's Close: got %v, want io.EOF", cause)
		}
		for _, wc := range c.wait(t, 5) {
			if wc.Status != verbs.StatusWRFlushErr {
				t.Errorf("Receive after the peer's Close: got %v, want a flush", wc.Status)
			}
		}
		staying.QP.Drain()
		if len(staying.Disconnects) != 0 || len(closing.Disconnects) != 0 {
			t.Error("OnDisconnect was called twice or for the local Close")
		}
	}
}

func testCloseInOnDisconnect(t *testing.T, s *suite) {
	prov, l := s.listen(t)
	id, err := prov.Resolve(Context(t), l.Addr())
	kit.Must(t, err)
	closed := make(chan error, 1)
	_, err = id.CreateQP(mustPD(t, id.Device()), verbs.QPInitAttr{
		SendCQ: mustCQ(t, id.Device(), 4), RecvCQ: mustCQ(t, id.Device(), 4), MaxSendWR: 4, MaxRecvWR: 4,
		OnDisconnect: func(error) { closed <- id.Close() },
	})
	kit.Must(t, err)
	t.Cleanup(func() { id.Close() })
	peer := connect(t, id, l, options{activeParam: depthOne, passiveParam: depthOne})
	peer.ID.Close()
	kit.Must(t, next(t, "return of Close from OnDisconnect", closed))
}

func mustPD(t testing.TB, d verbs.Device) verbs.PD {
	t.Helper()
	pd, err := d.AllocPD()
	kit.Must(t, err)
	t.Cleanup(func() { pd.Dealloc() })
	return pd
}

func mustCQ(t testing.TB, d verbs.Device, n int) verbs.CQ {
	t.Helper()
	cq, err := d.CreateCQ(n)
	kit.Must(t, err)
	t.Cleanup(func() { cq.Close() })
	return cq
}

func testCloseConcurrently(t *testing.T, s *suite) {
	p := s.pair(t, options{}).sendFirst()
	var wg sync.WaitGroup
	for _, e := range []*Endpoint{p.active, p.passive, p.active, p.passive} {
		wg.Add(2)
		go func() { defer wg.Done(); e.QP.Drain() }()
		go func() { defer wg.Done(); e.ID.Close() }()
	}
	wg.Wait()
}

// testFlushOrder checks that requests complete in the order of their posts, even if they are
// flushed.
func testFlushOrder(t *testing.T, s *suite) {
	const n = 40
	p := s.pair(t, options{})
	order := make(chan int, n)
	var wrs []*verbs.WorkRequest
	src := p.active.Buffer(100000)
	for i := range n {
		wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, Signaled: true, SGList: []verbs.SGE{src},
			RKey: 1, Done: func(*verbs.WorkCompletion) { order <- i }})
	}
	// The peer refuses the first Write because its key is not valid.
	if _, err := p.active.QP.PostSend(Chain(wrs...)); err != nil {
		t.Fatal(err)
	}
	for want := range n {
		if got := next(t, "completion", order); got != want {
			t.Fatalf("completion: got request %d, want %d", got, want)
		}
	}
}

// A requestLog counts the completions of every posted request.
type requestLog struct {
	t    testing.TB
	mu   sync.Mutex
	done []int // completions of each request
}

// add adds a request and returns its number and its completion handler.
func (l *requestLog) add() (id int, done func(*verbs.WorkCompletion)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id = len(l.done)
	l.done = append(l.done, 0)
	return id, func(*verbs.WorkCompletion) { l.complete(id) }
}

// complete counts a completion of request id, or the error with which its post failed.
func (l *requestLog) complete(id int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done[id]++
}

func (l *requestLog) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.done)
}

func (l *requestLog) check(side string) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.done {
		if n != 1 {
			l.t.Fatalf("%s side: request %d of %d: got %d completions, want 1", side, id, len(l.done), n)
		}
	}
}

// stormRounds is the number of connections that the storm ends.
const stormRounds = 8

// testDisconnectStorm ends connections under full load in both directions, in different ways. Each
// request completes exactly once.
func testDisconnectStorm(t *testing.T, s *suite) {
	prov, l := s.listen(t)
	for round := range stormRounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) { storm(t, prov, l, round) })
	}
}

// A load posts requests on one endpoint until its queue pair has ended.
type load struct {
	e           *Endpoint
	peer        window // memory of the peer
	log         requestLog
	local, sink verbs.SGE
	in          verbs.SGE
}

func storm(t *testing.T, prov verbs.Provider, l verbs.Listener, round int) {
	p := connectPair(t, prov, l, options{sendDepth: 32, recvDepth: 32})
	p.sendFirst()
	ends := []*Endpoint{p.active, p.passive}
	var loads [2]load
	for i, e := range ends {
		o := p.other(e)
		peer := o.fastReg(o.MR(depth), byte(round), remoteWrite|verbs.AccessRemoteRead, 0x100, o.Buffer(100000).Buf)
		loads[i] = load{e: e, peer: peer, log: requestLog{t: t}, local: e.Buffer(100000), sink: e.Buffer(100000),
			in: e.Buffer(4096)}
	}
	var wg sync.WaitGroup
	for i := range loads {
		wg.Go(loads[i].postReceives)
		wg.Go(func() { loads[i].postChains(rand.New(rand.NewPCG(uint64(round), uint64(i)))) })
	}
	// A message without a Receive may also end the connection.
	kit.Eventually(t, "requests at both ends", func() bool {
		return loads[0].log.len() > 30*round && loads[1].log.len() > 30*round || p.ended()
	})
	p.end(round)
	p.active.QP.Drain()
	p.passive.QP.Drain()
	wg.Wait()
	loads[0].log.check("active")
	loads[1].log.check("passive")
	for _, e := range ends {
		st := e.QP.Stats()
		if st.SendCompletions > st.PostedSendWRs || st.RecvCompletions != st.PostedRecvWRs {
			t.Errorf("stats: completions do not match posts: %+v", st)
		}
	}
}

// end ends the connection in one of four ways.
func (p *pair) end(way int) {
	switch way % 4 {
	case 0:
		p.active.ID.Close()
	case 1:
		p.passive.ID.Close()
	case 2:
		go p.active.QP.Drain()
		p.passive.QP.Drain()
	case 3: // an access that the peer refuses
		wr := badWrite(p.active)
		wr.Done = func(*verbs.WorkCompletion) {}
		for {
			if _, err := p.active.QP.PostSend(wr); !errors.Is(err, verbs.ErrQueueFull) {
				break
			}
			runtime.Gosched()
		}
		kit.Eventually(p.active.T, "end of the connection", p.ended)
	}
}

// ended reports whether an end of the connection has ended.
func (p *pair) ended() bool { return len(p.active.Disconnects)+len(p.passive.Disconnects) > 0 }

func (l *load) postReceives() {
	for {
		id, done := l.log.add()
		_, err := l.e.QP.PostRecv(&verbs.RecvRequest{SGE: l.in, Done: done})
		if err == nil {
			continue
		}
		l.log.complete(id)
		if errors.Is(err, verbs.ErrQPState) {
			return
		}
		runtime.Gosched()
	}
}

// postChains posts chains of a Write, a Read and sometimes a Send.
func (l *load) postChains(r *rand.Rand) {
	for n := 0; ; n++ {
		wrs := []*verbs.WorkRequest{
			{Opcode: verbs.OpRDMAWrite, RKey: l.peer.rkey, RemoteAddr: l.peer.iova,
				SGList: []verbs.SGE{{Buf: l.local.Buf[:r.IntN(100000)], LKey: l.local.LKey}}},
			{Opcode: verbs.OpRDMARead, RKey: l.peer.rkey, RemoteAddr: l.peer.iova,
				SGList: []verbs.SGE{{Buf: l.sink.Buf[:r.IntN(100000)], LKey: l.sink.LKey}}},
		}
		if n%16 == 0 {
			wrs = append(wrs, &verbs.WorkRequest{Opcode: verbs.OpSend,
				SGList: []verbs.SGE{{Buf: l.local.Buf[:r.IntN(4000)], LKey: l.local.LKey}}})
		}
		ids := make([]int, len(wrs))
		for i, wr := range wrs {
			wr.Signaled = true
			ids[i], wr.Done = l.log.add()
		}
		bad, err := l.e.QP.PostSend(Chain(wrs...))
		if err == nil {
			continue
		}
		for i := slices.Index(wrs, bad); i >= 0 && i < len(wrs); i++ {
			l.log.complete(ids[i]) // bad and later requests were not posted
		}
		if errors.Is(err, verbs.ErrQPState) {
			return
		}
		runtime.Gosched()
	}
}
