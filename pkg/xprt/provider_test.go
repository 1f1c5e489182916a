package xprt

import (
	"context"
	"net/netip"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A hookedProvider is softiwarp with changes to its device, its memory regions and its queue pairs.
// Each hook is optional.
type hookedProvider struct {
	verbs.Provider
	attrs func(*verbs.DeviceAttrs)
	// prepare is called before a FastReg uses mem. An error is the error of Prepare.
	prepare func(mem []byte) error
	// alloc is called before an MR is allocated. An error is the error of AllocMR.
	alloc func() error
	// unregister makes the MRs PerIOMRs, and is called instead of their Unregister.
	unregister func() error
	// dereg is called before an MR is deregistered.
	dereg func()
	// open is called for each queue pair, and returns its hooks.
	open func() qpHooks

	mu  sync.Mutex // guards dev
	dev *hookedDevice
}

// A postHook is called before a chain of n requests is posted, in the order of the posts. After an
// error, only the first keep requests are posted, and PostSend returns the error.
type postHook func(first *verbs.WorkRequest, n int) (keep int, err error)

// qpHooks are the changes to one queue pair.
type qpHooks struct {
	post postHook
	// done is called instead of the handler of wr, which is next. at is the number of the request,
	// counted from 0.
	done func(wr *verbs.WorkRequest, at int, wc *verbs.WorkCompletion, next func(*verbs.WorkCompletion))
	// recv is called before Receives are posted. An error is the error of PostRecv.
	recv func() error
	// drain is called before Drain.
	drain func()
}

func hooked(h *hookedProvider) *hookedProvider {
	h.Provider = softiwarp.New(softiwarp.Config{})
	return h
}

func (p *hookedProvider) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dev == nil {
		p.dev = &hookedDevice{id.Device(), p}
	}
	return &hookedID{id, p}, nil
}

type hookedDevice struct {
	verbs.Device
	p *hookedProvider
}

func (d *hookedDevice) Attrs() verbs.DeviceAttrs {
	a := d.Device.Attrs()
	if d.p.attrs != nil {
		d.p.attrs(&a)
	}
	return a
}

func (d *hookedDevice) AllocPD() (verbs.PD, error) {
	pd, err := d.Device.AllocPD()
	return &hookedPD{pd, d.p}, err
}

type hookedPD struct {
	verbs.PD
	p *hookedProvider
}

func (d *hookedPD) Prepare(mem []byte) error {
	if d.p.prepare == nil {
		return nil
	}
	return d.p.prepare(mem)
}

func (d *hookedPD) AllocMR(depth int) (verbs.MR, error) {
	if d.p.alloc != nil {
		if err := d.p.alloc(); err != nil {
			return nil, err
		}
	}
	mr, err := d.PD.AllocMR(depth)
	if err != nil {
		return nil, err
	}
	m := hookedMR{mr, d.p}
	if d.p.unregister != nil {
		return &hookedPerIOMR{hookedMR: m}, nil
	}
	return &m, nil
}

type hookedMR struct {
	verbs.MR
	p *hookedProvider
}

func (m *hookedMR) Dereg() error {
	if m.p.dereg != nil {
		m.p.dereg()
	}
	return m.MR.Dereg()
}

// unhooked returns the MR of the device.
func (m *hookedMR) unhooked() verbs.MR { return m.MR }

// A hookedPerIOMR is a PerIOMR on top of an MR with FastReg.
type hookedPerIOMR struct {
	hookedMR
	key uint8
}

// Register returns the key of the next FastReg, which registers the memory.
func (m *hookedPerIOMR) Register(verbs.Access, []byte) (verbs.RKey, error) {
	m.key++
	return m.MR.RKey().WithKey(m.key), nil
}

func (m *hookedPerIOMR) Unregister() error { return m.p.unregister() }

type hookedID struct {
	verbs.ActiveID
	p *hookedProvider
}

func (i *hookedID) Device() verbs.Device { return i.p.dev }

func (i *hookedID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	qp, err := i.ActiveID.CreateQP(pd.(*hookedPD).PD, attr)
	if err != nil {
		return nil, err
	}
	q := &hookedQP{QP: qp}
	if i.p.open != nil {
		q.hooks = i.p.open()
	}
	return q, nil
}

type hookedQP struct {
	verbs.QP
	hooks qpHooks

	mu     sync.Mutex // guards posted, and orders the posts
	posted int
}

func (q *hookedQP) PostRecv(first *verbs.RecvRequest) (*verbs.RecvRequest, error) {
	if q.hooks.recv != nil {
		if err := q.hooks.recv(); err != nil {
			return first, err
		}
	}
	return q.QP.PostRecv(first)
}

func (q *hookedQP) Drain() {
	if q.hooks.drain != nil {
		q.hooks.drain()
	}
	q.QP.Drain()
}

func (q *hookedQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var originals []*verbs.WorkRequest
	for wr := first; wr != nil; wr = wr.Next {
		originals = append(originals, wr)
	}
	keep := len(originals)
	var hookErr error
	if q.hooks.post != nil {
		if n, err := q.hooks.post(first, keep); err != nil {
			keep, hookErr = n, err
		}
	}
	if keep == 0 {
		return first, hookErr
	}
	copies := make([]verbs.WorkRequest, keep)
	for i, wr := range originals[:keep] {
		copies[i] = *wr
		copies[i].Next = nil
		if m, ok := wr.MR.(interface{ unhooked() verbs.MR }); ok {
			copies[i].MR = m.unhooked()
		}
		at, next := q.posted+i, wr.Done
		copies[i].Done = func(wc *verbs.WorkCompletion) {
			w := *wc
			w.QP = q
			if q.hooks.done != nil {
				q.hooks.done(wr, at, &w, next)
			} else {
				next(&w)
			}
		}
		if i > 0 {
			copies[i-1].Next = &copies[i]
		}
	}
	q.posted += keep
	bad, err := q.QP.PostSend(&copies[0])
	for i := range copies {
		if bad == &copies[i] {
			return originals[i], err
		}
	}
	if hookErr != nil {
		return originals[keep], hookErr
	}
	return nil, err
}

// withDepth returns a hook that limits the pages of an MR.
func withDepth(pages int) func(*verbs.DeviceAttrs) {
	return func(a *verbs.DeviceAttrs) { a.MaxFastRegPageListLen = pages }
}

// connOf returns the connection of tr.
func connOf(t *testing.T, tr *Transport) (cn *conn) {
	t.Helper()
	kit.Eventually(t, "connection", func() bool {
		cn = tr.conn.Load()
		return cn != nil
	})
	return cn
}

// softiwarpAttrs returns the attributes of the device of softiwarp.
func softiwarpAttrs(t *testing.T) verbs.DeviceAttrs {
	t.Helper()
	id, err := softiwarp.New(softiwarp.Config{}).Resolve(testContext(t), netip.MustParseAddrPort("127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	defer id.Close()
	return id.Device().Attrs()
}
