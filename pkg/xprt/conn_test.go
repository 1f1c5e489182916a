package xprt

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// A recordingProvider is a hookedProvider that records how a connection is made.
type recordingProvider struct {
	*hookedProvider
	qp    verbs.QPInitAttr
	param verbs.ConnParam
}

type recordingID struct {
	verbs.ActiveID
	p *recordingProvider
}

func (p *recordingProvider) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.hookedProvider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	return &recordingID{id, p}, nil
}

func (i *recordingID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	i.p.qp = attr
	return i.ActiveID.CreateQP(pd, attr)
}

func (i *recordingID) Connect(ctx context.Context, p verbs.ConnParam) error {
	i.p.param = p
	return i.ActiveID.Connect(ctx, p)
}

// TestReadDepthIsPowerOfTwo checks the number of RDMA Reads that the server may have in flight, on
// devices with different limits.
func TestReadDepthIsPowerOfTwo(t *testing.T) {
	addr := serve(t, svcrdma.Config{Handler: &service{}})
	for limit, want := range map[int]uint16{0: 1, 1: 1, 2: 2, 3: 2, 16: 16, 100: 64, 127: 64, 128: 128, 1000: 128} {
		p := &recordingProvider{hookedProvider: hooked(&hookedProvider{
			attrs: func(a *verbs.DeviceAttrs) { a.MaxQPRdAtom = limit }})}
		tr := dial(t, addr, func(c *Config) { c.Provider, c.Slots = p, 8 })
		if got := p.param.ResponderResources; got != want {
			t.Errorf("device with %d RDMA Reads: got %d, want %d", limit, got, want)
		}
		tr.Close()
	}
}

// TestQueuesFollowParams checks the sizes of the queues of a connection, and its Receives.
func TestQueuesFollowParams(t *testing.T) {
	addr := serve(t, svcrdma.Config{Handler: &service{}, InlineBytes: 65536})
	for _, inline := range []int{4096, 65536} {
		var receives atomic.Int64
		p := &recordingProvider{hookedProvider: hooked(&hookedProvider{open: func() qpHooks {
			return qpHooks{recv: func() error { receives.Add(1); return nil }}
		}})}
		tr := dial(t, addr, func(c *Config) { c.Provider, c.Slots, c.InlineBytes = p, 16, inline })
		a := tr.adapter
		if p.qp.MaxSendWR != a.params.SendWRs || p.qp.MaxRecvWR != a.params.RecvWRs ||
			p.qp.MaxSendSGE != a.params.SendSGEs {
			t.Errorf("queue pair: got %+v, want the sizes of %+v", p.qp, a.params)
		}
		// One place is for Drain.
		if n := receives.Load(); n != int64(a.params.RecvWRs-1) || len(a.recvArena) < int(n)*a.recvSize {
			t.Errorf("Receives: got %d in %d bytes, want %d of %d bytes", n, len(a.recvArena), a.params.RecvWRs-1,
				a.recvSize)
		}
		if want := max(2*inline, recvSlack); a.recvSize != want {
			t.Errorf("Receive buffer with %d inline bytes: got %d bytes, want %d", inline, a.recvSize, want)
		}
		if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
			t.Fatal(err)
		}
		if q := &connOf(t, tr).sq; q.size != int64(a.params.SendWRs) || q.signalAfter != int64(a.params.Slots/8) {
			t.Errorf("send queue: got size %d, signals after %d; want %d, %d", q.size, q.signalAfter, a.params.SendWRs,
				a.params.Slots/8)
		}
		tr.Close()
	}
}

// TestFailedConnectIsCounted connects to a port that refuses connections.
func TestFailedConnectIsCounted(t *testing.T) {
	tr := unconnected(t, func(c *Config) {
		c.Addr, c.Provider = netip.MustParseAddrPort("127.0.0.1:1"), softiwarp.New(softiwarp.Config{})
	})
	if err := tr.Connect(testContext(t)); err == nil {
		t.Fatal("Connect: got nil, want an error")
	}
	s := tr.Stats()
	if s.ConnectFailures != 1 || s.Connects != 0 || s.State != StateDisconnected || s.LastError == "" ||
		s.ConnectTime <= 0 || tr.adapter != nil {
		t.Errorf("got %+v, want one failure and no device", s)
	}
}
