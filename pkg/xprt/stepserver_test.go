package xprt

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A stepServer is the server of a stepDevice that answers each call at once. A test may change the
// fields with bubble.set. In a bubble all its delays are exact.
type stepServer struct {
	// credits are what each reply grants.
	credits uint32
	// handle may delay a call, change its reply, and decide what happens to it.
	handle func(c *stepCall) outcome
	// connect may delay or refuse a connection.
	connect func(ctx context.Context, to netip.AddrPort) error
	// holds reports whether the completion of a request is late.
	holds func(op verbs.Opcode) bool
	// stalled stops the execution of requests.
	stalled bool
	// drained is called before a queue pair is drained.
	drained func()

	mu      sync.Mutex // guards the fields; held while a completion handler runs
	arrived []*stepCall
	calls   []*stepCall // that arrived so far, without NULL
	dials   []stepDial
	losses  []time.Time // of connections that ended with disconnected, and of failed dials
}

// A stepDial is an attempt to connect.
type stepDial struct {
	at time.Time
	to netip.AddrPort
}

// An outcome says what happens to a call at the server.
type outcome int

const (
	answered     outcome = iota
	dropped              // no reply
	disconnected         // the connection is lost
)

// answerAfter is a server that answers a call when c is closed or sends a value.
func answerAfter(c <-chan struct{}) func(*stepCall) outcome {
	return func(*stepCall) outcome {
		<-c
		return answered
	}
}

// A stepCall is a call at the server.
type stepCall struct {
	rpcrdma.Header
	sunrpc.CallHeader        // not of a long call
	body              []byte // RPC message in the Send
	at                time.Time
	qp                *stepQP

	// Parts of the reply.
	reply rpcrdma.Header
	rpc   []byte
	inv   verbs.RKey // key that the server invalidates, in addition to those of the device
}

// newStepCall returns a call with an accepted reply that uses all of the offered write chunks.
func newStepCall(h *rpcrdma.Header, body []byte) *stepCall {
	c := &stepCall{Header: *h, body: body, at: time.Now()}
	c.CallHeader, _, _ = sunrpc.ParseCall(body)
	c.reply = rpcrdma.Header{XID: h.XID, Vers: rpcrdma.Version, Proc: rpcrdma.ProcMsg}
	for _, w := range h.Writes {
		c.reply.Writes = append(c.reply.Writes, slices.Clone(w))
	}
	c.rpc = sunrpc.AppendAcceptedReply(nil, h.XID, sunrpc.Success)
	return c
}

func (s *stepServer) dial(ctx context.Context, to netip.AddrPort) error {
	s.mu.Lock()
	inOrder()
	s.dials = append(s.dials, stepDial{time.Now(), to})
	connect := s.connect
	s.mu.Unlock()
	if connect == nil {
		return nil
	}
	err := connect(ctx, to)
	if err != nil {
		s.lost()
	}
	return err
}

func (s *stepServer) lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	inOrder()
	s.losses = append(s.losses, time.Now())
}

// drain calls drained, and keeps other completion handlers away until the returned function is
// called.
func (s *stepServer) drain() (done func()) {
	s.mu.Lock()
	drained := s.drained
	s.mu.Unlock()
	if drained != nil {
		drained()
	}
	s.mu.Lock()
	return s.mu.Unlock
}

// serve executes and completes the requests of q, and answers the calls.
func (s *stepServer) serve(q *stepQP) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q.d.mu.Lock()
	if !q.err && !s.stalled {
		q.execute(len(q.sq))
	}
	arrived := s.arrived
	s.arrived = nil
	q.d.mu.Unlock()
	for _, c := range arrived {
		c.qp, c.reply.Credits = q, s.credits
		handle := s.handle
		if c.CallHeader.Proc != 0 || c.Prog == 0 {
			inOrder()
			s.calls = append(s.calls, c)
		}
		go s.answer(c, handle)
	}
	for !s.held(q) && q.complete() {
	}
}

// held reports whether the next completion of q is late. The caller holds mu.
func (s *stepServer) held(q *stepQP) bool {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	i := slices.IndexFunc(q.sq, func(wr stepRequest) bool { return wr.Signaled })
	return !q.err && i >= 0 && (i >= q.executed || s.holds != nil && s.holds(q.sq[i].Opcode))
}

func (s *stepServer) answer(c *stepCall, handle func(*stepCall) outcome) {
	result := answered
	if handle != nil {
		result = handle(c)
	}
	switch result {
	case disconnected:
		s.lost()
		c.qp.lose(io.EOF)
	case answered:
		s.reply(c)
	}
}

// reply executes and answers a call. It does nothing if the connection is lost.
func (s *stepServer) reply(c *stepCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := c.qp.d
	d.mu.Lock()
	inv, up := d.write(&c.Header), !c.qp.err && len(c.qp.rq) > 0
	d.mu.Unlock()
	if c.inv != 0 {
		inv = c.inv
	}
	if up {
		c.qp.receive(append(c.reply.Append(nil), c.rpc...), inv)
	}
}

// lose ends the connection, and tells the transport why unless cause is nil.
func (q *stepQP) lose(cause error) {
	q.fail(false)
	if cause != nil {
		q.attr.OnDisconnect(cause)
	}
}

// A bubble is a connected transport whose server is a stepServer. Time stands still in it while a
// goroutine can run.
type bubble struct {
	*stepServer
	t     *testing.T
	cfg   Config
	dev   *stepDevice
	tr    *Transport
	ended observed
}

// inBubble calls f in a bubble, with a transport that has 4 slots and no timeouts but that of a
// reply, 60 s. Its first call was answered, so the transport has credits.
func inBubble(t *testing.T, change func(*Config, *stepServer), f func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{stepServer: &stepServer{credits: 128}, t: t}
		b.dev = &stepDevice{server: b.stepServer, maxMR: 100, mrs: make(map[uint32]*stepMR)}
		cfg := Config{Provider: b.dev, Addr: netip.MustParseAddrPort("192.0.2.1:20049"), Slots: MinSlots, KeepAlive: -1,
			IdleTimeout: -1, ReconnectMin: 1, ReconnectMax: 1, Observe: b.ended.observe}
		if change != nil {
			change(&cfg, b.stepServer)
		}
		b.cfg = cfg
		b.open()
		defer func() {
			b.tr.Close()
			for _, f := range b.dev.faults {
				t.Error(f)
			}
		}()
		f(t, b)
	})
}

// open makes the transport.
func (b *bubble) open() {
	b.t.Helper()
	tr, err := New(b.cfg)
	if err == nil {
		b.tr = tr
		err = tr.Connect(b.t.Context())
	}
	if err == nil {
		err = tr.Call(b.t.Context(), echo(0, nil, 0))
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.ended.take(b.t)
}

// set changes fields of the server.
func (b *bubble) set(change func(s *stepServer)) {
	b.mu.Lock()
	change(b.stepServer)
	b.mu.Unlock()
	b.resume()
}

// handleWith makes handle decide about the following calls.
func (b *bubble) handleWith(handle func(c *stepCall) outcome) {
	b.set(func(s *stepServer) { s.handle = handle })
}

// qp returns the queue pair of the newest connection.
func (b *bubble) qp() *stepQP {
	b.dev.mu.Lock()
	defer b.dev.mu.Unlock()
	return b.dev.qps[len(b.dev.qps)-1]
}

// resume executes and completes what was stalled or held.
func (b *bubble) resume() {
	b.serve(b.qp())
	settle()
}

// A pending call runs in its own goroutine.
type pending struct {
	*sunrpc.Message
	cancel context.CancelFunc
	done   bool
	err    error
	took   time.Duration
}

// start starts a call and waits until it blocks or returns.
func (b *bubble) start(m *sunrpc.Message) *pending {
	return b.startWith(m, b.tr.Call)
}

// startWith is start with a function that makes the call.
func (b *bubble) startWith(m *sunrpc.Message, call func(context.Context, *sunrpc.Message) error) *pending {
	ctx, cancel := context.WithCancel(b.t.Context())
	p := &pending{Message: m, cancel: cancel}
	began := time.Now()
	go func() {
		err := call(ctx, m)
		inOrder()
		p.err, p.took, p.done = err, time.Since(began), true
	}()
	settle()
	return p
}

// interrupt cancels the call and waits until it blocks again or has returned.
func (p *pending) interrupt() {
	p.cancel()
	settle()
}

// mustSucceed makes a call that must succeed.
func (b *bubble) mustSucceed(m *sunrpc.Message) {
	b.t.Helper()
	if err := b.tr.Call(b.t.Context(), m); err != nil {
		b.t.Errorf("call: %v", err)
	}
}

// progress makes as many calls as a connection needs to have made progress.
func (b *bubble) progress() {
	for range progressCalls {
		b.mustSucceed(echo(1, nil, 0))
	}
}

// sleep waits until the time has passed and all goroutines are blocked.
func sleep(d time.Duration) {
	inOrder()
	time.Sleep(d)
	synctest.Wait()
}

// settle waits until all goroutines are blocked.
func settle() {
	inOrder()
	synctest.Wait()
}

var order sync.Mutex

// inOrder tells the race detector that what follows happens after what was done before the other
// calls of inOrder so far. A test reads what other goroutines have written only while they are
// blocked, but the end of a timer orders nothing.
func inOrder() {
	order.Lock()
	defer order.Unlock()
}

var errRefused = errors.New("connection refused")

// near fails the test unless got is from want to want and one interval of the checks, 1 s.
func near(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if got < want || got > want+time.Second+10*time.Millisecond {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}
