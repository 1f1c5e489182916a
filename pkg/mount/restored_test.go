package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A quietRDMA is an RDMA device, and the provider of its connections. It connects at once, except
// to refused, and the peer sends nothing.
type quietRDMA struct {
	refused netip.Addr
	mrs     atomic.Uint32
}

func (d *quietRDMA) Name() string { return "quiet" }

func (d *quietRDMA) Listen(context.Context, netip.AddrPort) (verbs.Listener, error) {
	return nil, errors.ErrUnsupported
}

func (d *quietRDMA) Resolve(_ context.Context, to netip.AddrPort) (verbs.ActiveID, error) {
	if to.Addr() == d.refused {
		return nil, syscall.ECONNREFUSED
	}
	return &quietID{d: d, to: to}, nil
}

func (d *quietRDMA) Attrs() verbs.DeviceAttrs {
	return verbs.DeviceAttrs{Name: "quiet0", Transport: verbs.TransportIB, PageSize: 4096, MaxFastRegPageListLen: 256,
		MaxQPWR: 1024, MaxCQE: 2048, MaxSendSGE: 4, MaxRecvSGE: 1, MaxSGERd: 1, MaxQPRdAtom: 16, MaxQPInitRdAtom: 16,
		MaxMR: 1 << 20, Caps: verbs.CapFastReg | verbs.CapChosenIOVA | verbs.CapRegisterAny | verbs.CapGaps}
}

func (d *quietRDMA) AllocPD() (verbs.PD, error)           { return d, nil }
func (d *quietRDMA) AllocMR(int) (verbs.MR, error)        { return quietMR(d.mrs.Add(1)), nil }
func (d *quietRDMA) RegMR([]byte) (verbs.MR, error)       { return quietMR(0), nil }
func (d *quietRDMA) Dealloc() error                       { return nil }
func (d *quietRDMA) CreateCQ(depth int) (verbs.CQ, error) { return quietCQ{}, nil }

type quietCQ struct{}

func (quietCQ) Close() error { return nil }

type quietMR uint32

func (m quietMR) LKey() uint32     { return 0 }
func (m quietMR) RKey() verbs.RKey { return verbs.RKey(m << 8) }
func (m quietMR) Dereg() error     { return nil }

type quietID struct {
	d  *quietRDMA
	to netip.AddrPort
}

func (i *quietID) Device() verbs.Device                                  { return i.d }
func (i *quietID) LocalAddr() netip.AddrPort                             { return i.to }
func (i *quietID) RemoteAddr() netip.AddrPort                            { return i.to }
func (i *quietID) Connect(context.Context, verbs.ConnParam) error        { return nil }
func (i *quietID) Peer() verbs.ConnParam                                 { return verbs.ConnParam{} }
func (i *quietID) Close() error                                          { return nil }
func (i *quietID) CreateQP(verbs.PD, verbs.QPInitAttr) (verbs.QP, error) { return quietQP{}, nil }

type quietQP struct{}

func (quietQP) PostSend(*verbs.WorkRequest) (*verbs.WorkRequest, error) { return nil, nil }
func (quietQP) PostRecv(*verbs.RecvRequest) (*verbs.RecvRequest, error) { return nil, nil }
func (quietQP) Drain()                                                  {}
func (quietQP) Stats() verbs.QPStats                                    { return verbs.QPStats{} }

// A mountFleet is a daemon with mounts of 16 connections each to one server.
type mountFleet struct {
	mounts int
	rate   int  // connect_rate
	down   bool // the first of two addresses refuses connects
}

var fleetAddress = netip.MustParseAddrPort("192.0.2.1:20049")

func newMountFleet() mountFleet {
	if kit.Race {
		return mountFleet{mounts: 32, rate: 5}
	}
	return mountFleet{mounts: 313, rate: 50}
}

func (f *mountFleet) shared() *shared {
	return &shared{log: hclog.NewNullLogger(), connects: xprt.NewConnectLimits(f.rate)}
}

func (f *mountFleet) options() Options {
	o := DefaultOptions()
	o.NConnect, o.Slots, o.InlineBytes = 16, xprt.MinSlots, xprt.MinInlineBytes
	o.KeepAlive, o.Idle, o.TraceEvents = 0, 0, 0
	return o
}

// connect makes the connections of a mount, and is the rest of its build.
func (f *mountFleet) connect(ctx context.Context, t *testing.T, s *mountStack) (mountInstance, error) {
	s.address = fleetAddress
	t.Cleanup(s.transports.close)
	if err := s.connect(ctx, hclog.NewNullLogger()); err != nil {
		s.transports.close()
		return nil, err
	}
	return newFakeMount(), nil
}

// restore continues the mounts and returns how long that takes, and how often a mount was tried.
func (f *mountFleet) restore(t *testing.T) (took time.Duration, tries int) {
	d := &quietRDMA{}
	var builds atomic.Int32
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		common, opts := f.shared(), f.options()
		if f.down {
			d.refused = fleetAddress.Addr()
			opts.RemotePorts = []netip.Addr{d.refused, d.refused.Next()}
		}
		tab := newTable(common, opts, 30*time.Second, func(ctx context.Context, p plan) (mountInstance, error) {
			if int(builds.Add(1)) > 4*f.mounts { // the test has failed; end it
				return newFakeMount(), nil
			}
			p.left = nil // it has no state
			return f.connect(ctx, t, &mountStack{plan: p, shared: common, provider: d})
		})
		var restored, watched sync.WaitGroup
		var entries []*entry
		for i := range f.mounts {
			restored.Add(1)
			l := &leftMount{keeper: &keeper{state: new(fusefs.State)}}
			e := &entry{plan: plan{dir: fmt.Sprint("/", i), opts: opts, left: l, timeout: tab.timeout},
				built: make(chan struct{}), ended: make(chan struct{}),
				removed: make(chan struct{}), restored: restored.Done,
				state: control.StateRestoring}
			tab.mu.entries[e.dir] = e
			tab.work.Add(1)
			entries = append(entries, e)
			watched.Go(func() { tab.continueMount(t.Context(), e) })
		}
		restored.Wait()
		took = time.Since(began)
		for _, e := range entries {
			e.instance.(*fakeMount).end()
		}
		watched.Wait()
	})
	return took, int(builds.Load())
}

// TestRestoredMountsShareConnectRate continues mounts whose connects take longer than the timeout
// of a mount, because of connect_rate. No mount drops its first connections and tries again.
func TestRestoredMountsShareConnectRate(t *testing.T) {
	f := newMountFleet()
	want := time.Duration(16*(f.mounts-1)) * time.Second / time.Duration(f.rate)
	took, tries := f.restore(t)
	if tries != f.mounts || took > want+time.Millisecond {
		t.Errorf("got %d tries and %v, want %d and %v", tries, took, f.mounts, want)
	}
	// Half of the connections prefer the address that refuses, and move to the other one. The
	// daemon tries that address again after some time.
	f.down = true
	took, tries = f.restore(t)
	if tries != f.mounts || took > 2*want {
		t.Errorf("with an address that refuses: got %d tries and %v, want %d and at most %v", tries, took, f.mounts,
			2*want)
	}
}

// TestNewMountsShareConnectRate makes mounts at once, whose connects take longer than the timeout
// of a mount. Those whose turn comes in time are mounted, and the others fail at once.
func TestNewMountsShareConnectRate(t *testing.T) {
	const timeout = 30 * time.Second
	f := newMountFleet()
	synctest.Test(t, func(t *testing.T) {
		common, opts, d, began := f.shared(), f.options(), &quietRDMA{}, time.Now()
		var mounted, refused atomic.Int32
		var mounts sync.WaitGroup
		for range f.mounts {
			mounts.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				_, err := f.connect(ctx, t, &mountStack{plan: plan{opts: opts}, shared: common, provider: d})
				var limit *xprt.ConnectLimitError
				switch {
				case err == nil:
					mounted.Add(1)
				case errors.As(err, &limit) && time.Since(began) == 0:
					refused.Add(1)
				default:
					t.Errorf("got error %v after %v, want one with connect_rate at once", err, time.Since(began))
				}
			})
		}
		mounts.Wait()
		want := 1 + f.rate*int(timeout/time.Second)/16
		if int(mounted.Load()) != want || int(refused.Load()) != f.mounts-want {
			t.Errorf("got %d mounts and %d errors, want %d and %d", mounted.Load(), refused.Load(), want, f.mounts-want)
		}
	})
}
