package verbstest

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// waitTimeout bounds each wait of the suite. waitTimeout is generous because the suite does not
// check speed.
const waitTimeout = 30 * time.Second

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
	// The active end uses pd and cq instead of a new PD and CQ if pd is set.
	pd verbs.PD
	cq verbs.CQ
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
	active, passive *endpoint
}

// An endpoint is one end of a connection, with its resources.
type endpoint struct {
	t           testing.TB
	id          verbs.ConnID
	dev         verbs.Device
	pd          verbs.PD
	cq          verbs.CQ
	qp          verbs.QP
	disconnects chan error // causes of OnDisconnect; the capacity reveals a second call

	lastKey map[verbs.MR]uint8 // key of the last FastReg of each MR
}

func timeoutContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	t.Cleanup(cancel)
	return ctx
}

// newEndpoint creates the resources for id. The cleanup of t releases them.
func newEndpoint(t testing.TB, id verbs.ConnID, o *options) *endpoint {
	t.Helper()
	e := &endpoint{t: t, id: id, dev: id.Device(), disconnects: make(chan error, 4), lastKey: make(map[verbs.MR]uint8)}
	var err error
	own := o.pd == nil
	if e.pd, e.cq = o.pd, o.cq; own {
		if e.pd, err = e.dev.AllocPD(); err != nil {
			t.Fatal(err)
		}
		if e.cq, err = e.dev.CreateCQ(o.sendDepth + o.recvDepth); err != nil {
			t.Fatal(err)
		}
	}
	e.qp, err = id.CreateQP(e.pd, verbs.QPInitAttr{
		SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: o.sendDepth, MaxRecvWR: o.recvDepth, MaxSendSGE: defaultSGE,
		OnDisconnect: func(cause error) { e.disconnects <- cause },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := id.Close(); err != nil {
			t.Errorf("close connection: %v", err)
		}
		if !own {
			return
		}
		if err := e.cq.Close(); err != nil {
			t.Errorf("close completion queue: %v", err)
		}
		if err := e.pd.Dealloc(); err != nil {
			t.Errorf("deallocate protection domain: %v", err)
		}
	})
	return e
}

func listen(t testing.TB, p verbs.Provider, laddr netip.AddrPort) verbs.Listener {
	t.Helper()
	l, err := p.Listen(timeoutContext(t), laddr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// newPair connects two endpoints over laddr.
func newPair(t testing.TB, p verbs.Provider, laddr netip.AddrPort, o options) *pair {
	t.Helper()
	o.defaults()
	l := listen(t, p, laddr)
	return connectPair(t, p, l, o)
}

func connectPair(t testing.TB, p verbs.Provider, l verbs.Listener, o options) *pair {
	t.Helper()
	o.defaults()
	id, err := p.Resolve(timeoutContext(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	pr := &pair{active: newEndpoint(t, id, &o)}
	if o.noConnect {
		return pr
	}
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(timeoutContext(t), o.activeParam) }()
	req, err := l.Accept(timeoutContext(t))
	if err != nil {
		t.Fatal(err)
	}
	o.pd, o.cq = nil, nil
	pr.passive = newEndpoint(t, req, &o)
	if err := req.Accept(timeoutContext(t), o.passiveParam); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return pr
}

// other returns the opposite endpoint.
func (p *pair) other(e *endpoint) *endpoint {
	if e == p.active {
		return p.passive
	}
	return p.active
}

// buffer returns n bytes of memory, registered for local use in e's PD.
func (e *endpoint) buffer(n int) verbs.SGE {
	e.t.Helper()
	b, err := membuf.Alloc(max(n, 1))
	if err != nil {
		e.t.Fatal(err)
	}
	m, err := e.pd.RegMR(b)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		e.qp.Drain() // the device may use the memory until Drain returns
		if err := m.Dereg(); err != nil {
			e.t.Errorf("deregister buffer: %v", err)
		}
		membuf.Free(b)
	})
	return verbs.SGE{Buf: b[:n], LKey: m.LKey()}
}

// mr allocates an MR in e's PD.
func (e *endpoint) mr(depth int) verbs.MR {
	e.t.Helper()
	m, err := e.pd.AllocMR(depth)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		if err := m.Dereg(); err != nil {
			e.t.Errorf("deregister MR: %v", err)
		}
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
	timeout := time.After(waitTimeout)
	for {
		if l := c.all(); len(l) >= n {
			return l[:n]
		}
		select {
		case <-c.notify:
		case <-timeout:
			t.Fatalf("completions after %v: got %d, want %d: %+v", waitTimeout, len(c.all()), n, c.all())
		}
	}
}

// chain links requests.
func chain(wrs ...*verbs.WorkRequest) *verbs.WorkRequest {
	for i := range wrs[:len(wrs)-1] {
		wrs[i].Next = wrs[i+1]
	}
	return wrs[0]
}

// post posts a chain of signaled requests and does not wait.
func (e *endpoint) post(c *completions, wrs ...*verbs.WorkRequest) {
	e.t.Helper()
	for _, wr := range wrs {
		wr.Signaled, wr.Done = true, c.done
	}
	if bad, err := e.qp.PostSend(chain(wrs...)); err != nil {
		e.t.Fatalf("post %v: %v", bad.Opcode, err)
	}
}

// do posts a chain and returns its completions.
func (e *endpoint) do(wrs ...*verbs.WorkRequest) []verbs.WorkCompletion {
	e.t.Helper()
	c := newCompletions()
	e.post(c, wrs...)
	return c.wait(e.t, len(wrs))
}

// must is do for requests that must succeed.
func (e *endpoint) must(wrs ...*verbs.WorkRequest) []verbs.WorkCompletion {
	e.t.Helper()
	l := e.do(wrs...)
	for i, wc := range l {
		if wc.Status != verbs.StatusSuccess {
			e.t.Fatalf("%v: got %v, want success", wrs[i].Opcode, wc.Status)
		}
	}
	return l
}

// recv posts a Receive.
func (e *endpoint) recv(c *completions, sge verbs.SGE) {
	e.t.Helper()
	if _, err := e.qp.PostRecv(&verbs.RecvRequest{SGE: sge, Done: c.done}); err != nil {
		e.t.Fatalf("post Receive: %v", err)
	}
}

// waitDisconnect waits for OnDisconnect and returns its cause.
func (e *endpoint) waitDisconnect() error {
	e.t.Helper()
	select {
	case cause := <-e.disconnects:
		if cause == nil {
			e.t.Error("OnDisconnect: got no cause, want one")
		}
		return cause
	case <-time.After(waitTimeout):
		e.t.Fatal("OnDisconnect was not called")
		return nil
	}
}

// sync sends a message from e to the other end and waits for it. When sync returns, earlier posts
// of e have reached the peer's memory.
func (p *pair) sync(e *endpoint) {
	e.t.Helper()
	o := p.other(e)
	in := newCompletions()
	o.recv(in, o.buffer(4))
	e.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{e.buffer(4)}})
	if wc := in.wait(e.t, 1)[0]; wc.Status != verbs.StatusSuccess {
		e.t.Fatalf("Receive: got %v, want success", wc.Status)
	}
}

// sendFirst sends a message from the active side. The passive side may not send before it (RFC 5044
// §7.1.2).
func (p *pair) sendFirst() *pair {
	p.active.t.Helper()
	p.sync(p.active)
	return p
}

// pattern fills b with bytes that depend on their position and on seed.
func pattern(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)*31 ^ byte(i>>16)*17 ^ seed
	}
}
