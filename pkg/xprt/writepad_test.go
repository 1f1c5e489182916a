package xprt

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A deregWatch provider records how many buffers exist when the first MR is deregistered.
type deregWatch struct {
	verbs.Provider
	buffers *atomic.Int64
}

type deregWatchID struct {
	verbs.ActiveID
	dev *deregWatchDevice
}

type deregWatchDevice struct {
	verbs.Device
	buffers *atomic.Int64
}

type deregWatchPD struct {
	verbs.PD
	buffers *atomic.Int64
}

type deregWatchMR struct {
	verbs.MR
	buffers *atomic.Int64
}

func (p *deregWatch) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	return &deregWatchID{id, &deregWatchDevice{id.Device(), p.buffers}}, nil
}

func (i *deregWatchID) Device() verbs.Device { return i.dev }

func (i *deregWatchID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	qp, err := i.ActiveID.CreateQP(pd.(*deregWatchPD).PD, attr)
	return &unwrapQP{qp}, err
}

func (d *deregWatchDevice) AllocPD() (verbs.PD, error) {
	pd, err := d.Device.AllocPD()
	return &deregWatchPD{pd, d.buffers}, err
}

func (p *deregWatchPD) AllocMR(depth int) (verbs.MR, error) {
	mr, err := p.PD.AllocMR(depth)
	return &deregWatchMR{mr, p.buffers}, err
}

func (m *deregWatchMR) Dereg() error {
	m.buffers.CompareAndSwap(0, leakcheck.Count(leakcheck.Buffer))
	return m.MR.Dereg()
}

// An unwrapQP passes the original MRs to the device.
type unwrapQP struct{ verbs.QP }

func (q *unwrapQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	for wr := first; wr != nil; wr = wr.Next {
		if m, ok := wr.MR.(*deregWatchMR); ok {
			wr.MR = m.MR
		}
	}
	return q.QP.PostSend(first)
}

// TestPadOutlivesItsRegistration ends a connection with a write pad. The memory of the pad must be
// freed only after its MR is destroyed.
func TestPadOutlivesItsRegistration(t *testing.T) {
	var buffers atomic.Int64
	tr := dial(t, startServerProcess(t), func(c *Config) {
		c.WritePad, c.Provider = true, &deregWatch{c.Provider, &buffers}
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	connected := leakcheck.Count(leakcheck.Buffer)
	tr.conn.Load().fail(errIdle)
	eventually(t, "deregistration of the pad", func() bool { return buffers.Load() != 0 })
	if n := buffers.Load(); n < connected {
		t.Errorf("buffers when the MR is destroyed: got %d, want at least %d", n, connected)
	}
}
