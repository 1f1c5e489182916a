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

// patience bounds every wait of the suite. It is generous: the suite asserts no speed.
const patience = 30 * time.Second

// Queue sizes of the suite's QPs unless a test asks for others.
const (
	defaultDepth = 64
	defaultSGE   = 4
	defaultReads = 8
)

// A NewProvider makes a fresh provider for one test.
type NewProvider func(t testing.TB) verbs.Provider

// options of a pair.
type options struct {
	sendDepth, recvDepth int
	activeParam          verbs.ConnParam
	passiveParam         verbs.ConnParam
	noConnect            bool
	// pd and cq, if set, are what the active end uses instead of its own.
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

// An endpoint is one end with resources of its own.
type endpoint struct {
	t    testing.TB
	id   verbs.ConnID
	dev  verbs.Device
	pd   verbs.PD
	cq   verbs.CQ
	qp   verbs.QP
	gone chan error // OnDisconnect, capacity beyond 1 so that a second call shows

	lastKey map[verbs.MR]uint8 // of the FastReg before
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// newEndpoint gives id its resources; t's clean-up releases them.
func newEndpoint(t testing.TB, id verbs.ConnID, o *options) *endpoint {
	t.Helper()
	e := &endpoint{t: t, id: id, dev: id.Device(), gone: make(chan error, 4), lastKey: make(map[verbs.MR]uint8)}
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
		OnDisconnect: func(cause error) { e.gone <- cause },
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
	l, err := p.Listen(within(t), laddr)
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
	id, err := p.Resolve(within(t), l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	pr := &pair{active: newEndpoint(t, id, &o)}
	if o.noConnect {
		return pr
	}
	connected := make(chan error, 1)
	go func() { connected <- id.Connect(within(t), o.activeParam) }()
	req, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	o.pd, o.cq = nil, nil
	pr.passive = newEndpoint(t, req, &o)
	if err := req.Accept(within(t), o.passiveParam); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return pr
}

// other is the opposite end.
func (p *pair) other(e *endpoint) *endpoint {
	if e == p.active {
		return p.passive
	}
	return p.active
}

// buffer is n octets of device memory, registered for local use with e's PD.
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
		e.qp.Drain() // the device may hold the memory until then
		if err := m.Dereg(); err != nil {
			e.t.Errorf("deregister buffer: %v", err)
		}
		membuf.Free(b)
	})
	return verbs.SGE{Buf: b[:n], LKey: m.LKey()}
}

// mr allocates an MR of e's PD.
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

// comps counts and keeps completions.
type comps struct {
	mu   sync.Mutex
	list []verbs.WorkCompletion
	tell chan struct{}
}

func newComps() *comps { return &comps{tell: make(chan struct{}, 1)} }

// done is a completion handler.
func (c *comps) done(wc *verbs.WorkCompletion) {
	c.mu.Lock()
	c.list = append(c.list, *wc)
	c.mu.Unlock()
	select {
	case c.tell <- struct{}{}:
	default:
	}
}

func (c *comps) all() []verbs.WorkCompletion {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]verbs.WorkCompletion(nil), c.list...)
}

// wait returns the first n completions.
func (c *comps) wait(t testing.TB, n int) []verbs.WorkCompletion {
	t.Helper()
	timeout := time.After(patience)
	for {
		if l := c.all(); len(l) >= n {
			return l[:n]
		}
		select {
		case <-c.tell:
		case <-timeout:
			t.Fatalf("%d completions after %v, want %d: %+v", len(c.all()), patience, n, c.all())
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

// post posts a chain, all of it signaled, without waiting.
func (e *endpoint) post(c *comps, wrs ...*verbs.WorkRequest) {
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
	c := newComps()
	e.post(c, wrs...)
	return c.wait(e.t, len(wrs))
}

// must is do, and every status has to be success.
func (e *endpoint) must(wrs ...*verbs.WorkRequest) []verbs.WorkCompletion {
	e.t.Helper()
	l := e.do(wrs...)
	for i, wc := range l {
		if wc.Status != verbs.StatusSuccess {
			e.t.Fatalf("%v: %v", wrs[i].Opcode, wc.Status)
		}
	}
	return l
}

// recv posts a Receive.
func (e *endpoint) recv(c *comps, sge verbs.SGE) {
	e.t.Helper()
	if _, err := e.qp.PostRecv(&verbs.RecvRequest{SGE: sge, Done: c.done}); err != nil {
		e.t.Fatalf("post Receive: %v", err)
	}
}

// goneWithin waits for OnDisconnect.
func (e *endpoint) goneWithin() error {
	e.t.Helper()
	select {
	case cause := <-e.gone:
		if cause == nil {
			e.t.Error("OnDisconnect was called without a cause")
		}
		return cause
	case <-time.After(patience):
		e.t.Fatal("OnDisconnect was not called")
		return nil
	}
}

// sync sends a message from e to the other end and waits for it: what e posted before has reached
// the peer's memory.
func (p *pair) sync(e *endpoint) {
	e.t.Helper()
	o := p.other(e)
	in := newComps()
	o.recv(in, o.buffer(4))
	e.must(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{e.buffer(4)}})
	if wc := in.wait(e.t, 1)[0]; wc.Status != verbs.StatusSuccess {
		e.t.Fatalf("Receive: %v", wc.Status)
	}
}

// open lets the passive side send: a responder may not before it has heard the initiator (RFC 5044
// §7.1.2).
func (p *pair) open() *pair {
	p.active.t.Helper()
	p.sync(p.active)
	return p
}

// pattern fills b with octets that differ from place to place and seed to seed.
func pattern(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)*31 ^ byte(i>>16)*17 ^ seed
	}
}
