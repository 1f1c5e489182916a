package verbstest

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Default queue sizes of the suite's QPs.
const (
	defaultDepth = 64
	defaultSGE   = 4
	defaultReads = 8
)

// A NewProvider returns a new provider for one test.
type NewProvider func(t testing.TB) verbs.Provider

// options configures a pair.
type options struct {
	sendDepth, recvDepth int
	activeParam          verbs.ConnParam
	passiveParam         verbs.ConnParam
	noConnect            bool
	blocking             bool // a handler blocks, so handlers must not run on the reader
	// The active end uses PD and CQ instead of new ones if PD is set.
	PD verbs.PD
	CQ verbs.CQ
}

func (o *options) defaults() {
	if o.sendDepth == 0 {
		o.sendDepth = defaultDepth
	}
	if o.recvDepth == 0 {
		o.recvDepth = defaultDepth
	}
	for _, p := range []*verbs.ConnParam{&o.activeParam, &o.passiveParam} {
		if p.ResponderResources == 0 {
			p.ResponderResources = defaultReads
		}
		if p.InitiatorDepth == 0 {
			p.InitiatorDepth = defaultReads
		}
	}
}

// A pair is two connected endpoints.
type pair struct {
	active, passive *Endpoint
}

// An Endpoint is one end of a connection, with its resources.
type Endpoint struct {
	T           testing.TB
	ID          verbs.ConnID
	Dev         verbs.Device
	PD          verbs.PD
	CQ          verbs.CQ
	QP          verbs.QP
	Disconnects chan error // causes of OnDisconnect; the capacity reveals a second call

	lastKey map[verbs.MR]uint8 // key of the last FastReg of each MR
}

// Context returns a context that bounds a wait of a test.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	t.Cleanup(cancel)
	return ctx
}

// NewEndpoint creates the resources for id, which is not connected yet. The cleanup of t releases
// them.
func NewEndpoint(t testing.TB, id verbs.ConnID) *Endpoint {
	t.Helper()
	return newEndpoint(t, id, options{})
}

// newEndpoint is NewEndpoint with options.
func newEndpoint(t testing.TB, id verbs.ConnID, o options) *Endpoint {
	t.Helper()
	o.defaults()
	e := &Endpoint{T: t, ID: id, Dev: id.Device(), Disconnects: make(chan error, 4), lastKey: make(map[verbs.MR]uint8)}
	var err error
	own := o.PD == nil
	if e.PD, e.CQ = o.PD, o.CQ; own {
		e.PD, err = e.Dev.AllocPD()
		kit.Must(t, err)
		e.CQ, err = e.Dev.CreateCQ(o.sendDepth + o.recvDepth)
		kit.Must(t, err)
	}
	e.QP, err = id.CreateQP(e.PD, verbs.QPInitAttr{
		SendCQ: e.CQ, RecvCQ: e.CQ, MaxSendWR: o.sendDepth, MaxRecvWR: o.recvDepth, MaxSendSGE: defaultSGE,
		InlineHandlers: !o.blocking,
		OnDisconnect:   func(cause error) { e.Disconnects <- cause },
	})
	kit.Must(t, err)
	t.Cleanup(func() {
		succeeds(t, "close connection", id.Close())
		if n := len(e.Disconnects); n > 1 {
			t.Errorf("OnDisconnect calls: got %d, want at most 1", n)
		}
		if !own {
			return
		}
		succeeds(t, "close completion queue", e.CQ.Close())
		succeeds(t, "deallocate protection domain", e.PD.Dealloc())
	})
	return e
}

func listen(t testing.TB, p verbs.Provider, laddr netip.AddrPort) verbs.Listener {
	t.Helper()
	l, err := p.Listen(Context(t), laddr)
	kit.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// newPair connects two endpoints over laddr.
func newPair(t testing.TB, p verbs.Provider, laddr netip.AddrPort, o options) *pair {
	t.Helper()
	return connectPair(t, p, listen(t, p, laddr), o)
}

// Connect connects an endpoint of client to an endpoint of the provider of l. The passive end may
// not send before the first message of the active end.
func Connect(t testing.TB, client verbs.Provider, l verbs.Listener) (active, passive *Endpoint) {
	t.Helper()
	p := connectPair(t, client, l, options{})
	return p.active, p.passive
}

func connectPair(t testing.TB, p verbs.Provider, l verbs.Listener, o options) *pair {
	t.Helper()
	o.defaults()
	id, err := p.Resolve(Context(t), l.Addr())
	kit.Must(t, err)
	pr := &pair{active: newEndpoint(t, id, o)}
	if o.noConnect {
		return pr
	}
	o.PD, o.CQ = nil, nil
	pr.passive = connect(t, id, l, o)
	return pr
}

// connect connects id, which has a queue pair, to a new endpoint of l.
func connect(t testing.TB, id verbs.ActiveID, l verbs.Listener, o options) *Endpoint {
	t.Helper()
	req, connected := beginConnect(t, id, l, o.activeParam)
	e := newEndpoint(t, req, o)
	kit.Must(t, req.Accept(Context(t), o.passiveParam))
	kit.Must(t, <-connected)
	return e
}

// beginConnect starts a Connect and returns the request that the listener accepts.
func beginConnect(t testing.TB, id verbs.ActiveID, l verbs.Listener, param verbs.ConnParam) (verbs.ConnRequest,
	chan error) {
	t.Helper()
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(Context(t), param) }()
	req, err := l.Accept(Context(t))
	kit.Must(t, err)
	return req, connected
}

// other returns the opposite endpoint.
func (p *pair) other(e *Endpoint) *Endpoint {
	if e == p.active {
		return p.passive
	}
	return p.active
}

// Buffer returns n bytes of memory, registered for local use in e.PD.
func (e *Endpoint) Buffer(n int) verbs.SGE {
	e.T.Helper()
	b, err := membuf.Alloc(max(n, 1))
	kit.Must(e.T, err)
	m, err := e.PD.RegMR(b)
	kit.Must(e.T, err)
	e.T.Cleanup(func() {
		e.QP.Drain() // the device may use the memory until Drain returns
		succeeds(e.T, "deregister buffer", m.Dereg())
		membuf.Free(b)
	})
	return verbs.SGE{Buf: b[:n], LKey: m.LKey()}
}

// MR allocates an MR in e.PD.
func (e *Endpoint) MR(depth int) verbs.MR {
	e.T.Helper()
	m, err := e.PD.AllocMR(depth)
	kit.Must(e.T, err)
	e.T.Cleanup(func() {
		succeeds(e.T, "deregister MR", m.Dereg())
	})
	return m
}

// completions records completions.
type completions struct {
	mu     sync.Mutex
	list   []verbs.WorkCompletion
	notify chan struct{}
}

func newCompletions() *completions { return &completions{notify: make(chan struct{}, 1)} }

// done is a completion handler.
func (c *completions) done(wc *verbs.WorkCompletion) {
	c.mu.Lock()
	c.list = append(c.list, *wc)
	c.mu.Unlock()
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

func (c *completions) all() []verbs.WorkCompletion {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]verbs.WorkCompletion(nil), c.list...)
}

// wait returns the first n completions.
func (c *completions) wait(t testing.TB, n int) []verbs.WorkCompletion {
	t.Helper()
	timeout := time.After(kit.Timeout)
	for {
		if l := c.all(); len(l) >= n {
			return l[:n]
		}
		select {
		case <-c.notify:
		case <-timeout:
			t.Fatalf("completions after %v: got %d, want %d: %+v", kit.Timeout, len(c.all()), n, c.all())
		}
	}
}

// Chain links requests and returns the first one.
func Chain(wrs ...*verbs.WorkRequest) *verbs.WorkRequest {
	for i := range wrs[:len(wrs)-1] {
		wrs[i].Next = wrs[i+1]
	}
	return wrs[0]
}

// post posts a chain of signaled requests and does not wait.
func (e *Endpoint) post(c *completions, wrs ...*verbs.WorkRequest) {
	e.T.Helper()
	for _, wr := range wrs {
		wr.Signaled, wr.Done = true, c.done
	}
	if bad, err := e.QP.PostSend(Chain(wrs...)); err != nil {
		e.T.Fatalf("post %v: %v", bad.Opcode, err)
	}
}

// do posts a chain and returns its completions.
func (e *Endpoint) do(wrs ...*verbs.WorkRequest) []verbs.WorkCompletion {
	e.T.Helper()
	c := newCompletions()
	e.post(c, wrs...)
	return c.wait(e.T, len(wrs))
}

// must is do for requests that must succeed.
func (e *Endpoint) must(wrs ...*verbs.WorkRequest) []verbs.WorkCompletion {
	e.T.Helper()
	l := e.do(wrs...)
	for i, wc := range l {
		if wc.Status != verbs.StatusSuccess {
			e.T.Fatalf("%v: got %v, want success", wrs[i].Opcode, wc.Status)
		}
	}
	return l
}

// recv posts a Receive.
func (e *Endpoint) recv(c *completions, sge verbs.SGE) {
	e.T.Helper()
	if _, err := e.QP.PostRecv(&verbs.RecvRequest{SGE: sge, Done: c.done}); err != nil {
		e.T.Fatalf("post Receive: %v", err)
	}
}

// WaitDisconnect waits for OnDisconnect and returns its cause.
func (e *Endpoint) WaitDisconnect() error {
	e.T.Helper()
	cause := next(e.T, "call of OnDisconnect", e.Disconnects)
	if cause == nil {
		e.T.Error("OnDisconnect: got no cause, want one")
	}
	return cause
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

// succeeds checks that err is nil.
func succeeds(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// fails checks that err is an error.
func fails(t testing.TB, what string, err error) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: got no error, want one", what)
	}
}

// failsWith checks that err wraps want.
func failsWith(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

// failed reports whether a request failed by itself: it was not flushed because of another one.
func failed(st verbs.Status) bool { return st != verbs.StatusSuccess && st != verbs.StatusWRFlushErr }

// sync sends a message from e to the other end and waits for it. When sync returns, earlier posts
// of e have reached the peer's memory.
func (p *pair) sync(e *Endpoint) {
	e.T.Helper()
	o := p.other(e)
	in := newCompletions()
	o.recv(in, o.Buffer(4))
	e.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{e.Buffer(4)}})
	if wc := in.wait(e.T, 1)[0]; wc.Status != verbs.StatusSuccess {
		e.T.Fatalf("Receive: got %v, want success", wc.Status)
	}
}

// sendFirst sends a message from the active side. The passive side may not send before it (RFC 5044
// §7.1.2).
func (p *pair) sendFirst() *pair {
	p.active.T.Helper()
	p.sync(p.active)
	return p
}

// pattern fills b with bytes that depend on their position and on seed.
func pattern(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)*31 ^ byte(i>>16)*17 ^ seed
	}
}
