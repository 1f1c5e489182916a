package xprt

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A memoryProvider changes the memory registration of another provider. With CapPerIOReg in its
// attributes, its MRs are PerIOMRs.
type memoryProvider struct {
	verbs.Provider
	attrs      func(*verbs.DeviceAttrs)
	alloc      func() error // before each allocation
	unregister func() error // before each Unregister
	drain      func()       // before a queue pair is drained

	mrs atomic.Int64 // present MRs

	once sync.Once
	dev  *memoryDevice
}

type memoryDevice struct {
	verbs.Device
	p *memoryProvider
}

type memoryID struct {
	verbs.ActiveID
	p *memoryProvider
}

type memoryPD struct {
	verbs.PD
	p *memoryProvider
}

type memoryMR struct {
	verbs.MR
	p *memoryProvider
}

type perIOMemoryMR struct {
	memoryMR
	key uint8
}

type memoryQP struct {
	verbs.QP
	p *memoryProvider
}

func (p *memoryProvider) Resolve(ctx context.Context, a netip.AddrPort) (verbs.ActiveID, error) {
	id, err := p.Provider.Resolve(ctx, a)
	if err != nil {
		return nil, err
	}
	p.once.Do(func() { p.dev = &memoryDevice{id.Device(), p} })
	return &memoryID{id, p}, nil
}

func (d *memoryDevice) Attrs() verbs.DeviceAttrs {
	a := d.Device.Attrs()
	d.p.attrs(&a)
	return a
}

func (d *memoryDevice) AllocPD() (verbs.PD, error) {
	pd, err := d.Device.AllocPD()
	return &memoryPD{pd, d.p}, err
}

func (p *memoryPD) AllocMR(depth int) (verbs.MR, error) {
	if p.p.alloc != nil {
		if err := p.p.alloc(); err != nil {
			return nil, err
		}
	}
	mr, err := p.PD.AllocMR(depth)
	if err != nil {
		return nil, err
	}
	p.p.mrs.Add(1)
	m := memoryMR{mr, p.p}
	if p.p.dev.Attrs().Caps.Has(verbs.CapPerIOReg) {
		return &perIOMemoryMR{memoryMR: m}, nil
	}
	return &m, nil
}

func (m *memoryMR) Dereg() error {
	m.p.mrs.Add(-1)
	return m.MR.Dereg()
}

// Register returns the key of the next FastReg, which registers the memory.
func (m *perIOMemoryMR) Register(verbs.Access, []byte) (verbs.RKey, error) {
	m.key++
	return m.MR.RKey().WithKey(m.key), nil
}

func (m *perIOMemoryMR) Unregister() error { return m.p.unregister() }

func (i *memoryID) Device() verbs.Device { return i.p.dev }

func (i *memoryID) CreateQP(pd verbs.PD, attr verbs.QPInitAttr) (verbs.QP, error) {
	qp, err := i.ActiveID.CreateQP(pd.(*memoryPD).PD, attr)
	return &memoryQP{qp, i.p}, err
}

func (q *memoryQP) PostSend(first *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	for wr := first; wr != nil; wr = wr.Next {
		switch m := wr.MR.(type) {
		case *memoryMR:
			wr.MR = m.MR
		case *perIOMemoryMR:
			wr.MR = m.MR
		}
	}
	return q.QP.PostSend(first)
}

func (q *memoryQP) Drain() {
	if q.p.drain != nil {
		q.p.drain()
	}
	q.QP.Drain()
}

// TestSlotsFitTheMRsOfTheDevice runs the calls that need most MRs in all slots of a device with few
// MRs, with a write pad. Every call must find its MRs at once.
func TestSlotsFitTheMRsOfTheDevice(t *testing.T) {
	const payload = 1<<20 + 15<<10
	for _, c := range []struct{ depth, mrs int }{{64, 1 + 5*10}, {257, 1 + 5*4}} {
		p := &memoryProvider{attrs: func(a *verbs.DeviceAttrs) { a.MaxFastRegPageListLen, a.MaxMR = c.depth, c.mrs }}
		p.alloc = func() error {
			if p.mrs.Load() >= int64(c.mrs) {
				return syscall.ENOMEM
			}
			return nil
		}
		// The server answers when it has a call of every slot, or when one was not sent.
		var arrived atomic.Int64
		all := make(chan struct{})
		handler := handlerFunc(func(ctx context.Context, proc uint32) {
			if proc == 0 {
				return
			}
			arrived.Add(1)
			select {
			case <-all:
			case <-ctx.Done():
			}
		})
		tr := dial(t, serve(t, svcrdma.Config{Handler: handler}), func(cfg *Config) {
			cfg.WritePad, p.Provider, cfg.Provider = true, cfg.Provider, p
		})
		if err := tr.Call(testContext(t), echo(0, nil, 0)); err != nil { // its reply grants the credits
			t.Fatal(err)
		}
		slots := tr.conn.Load().params.Slots
		var wg sync.WaitGroup
		for range slots {
			wg.Go(func() {
				if err := tr.Call(testContext(t), echo(1, fill(0, payload), payload)); err != nil {
					t.Error(err)
				}
			})
		}
		eventually(t, "calls at the server", func() bool {
			return arrived.Load() == int64(slots) || tr.Stats().FailedMarshal > 0
		})
		close(all)
		wg.Wait()
		s := tr.Stats()
		if slots != 5 || s.MapErrors != 0 || s.FailedMarshal != 0 || s.MRsTotal != uint64(c.mrs) {
			t.Errorf("depth %d: got %d slots, %d map errors, %d failed marshals, %d MRs; want 5, 0, 0, %d", c.depth,
				slots, s.MapErrors, s.FailedMarshal, s.MRsTotal, c.mrs)
		}
		tr.Close()
	}
}

// TestFailedUnmapEndsConnection has a device that cannot unregister the memory of a call that was
// not sent. The call must not return, and its buffers must not be used again, before the connection
// is taken down. Then the call is sent again, or returns the error that prevented it.
func TestFailedUnmapEndsConnection(t *testing.T) {
	const payload = 1 << 20
	for _, c := range []struct {
		name string
		call *sunrpc.Message
		// noMR makes the second allocation fail.
		noMR bool
		long int64 // buffers for long messages that the call uses
		want error
	}{
		{"no memory: the call is sent again", echo(1, fill(0, payload), payload), true, 2, nil},
		{"final error", &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: 1, Cred: noCred, ArgData: fill(0, payload),
			MaxResult: payload}, false, 1, memreg.ErrForeignMemory},
	} {
		t.Run(c.name, func(t *testing.T) {
			var broken, drained atomic.Bool
			var long atomic.Int64 // buffers for long messages in use when the connection is taken down
			var tr *Transport
			p := &memoryProvider{attrs: func(a *verbs.DeviceAttrs) {
				a.Caps |= verbs.CapPerIOReg
				a.Caps &^= verbs.CapGaps | verbs.CapRegisterAny
			}}
			p.alloc = func() error {
				if c.noMR && broken.Load() && p.mrs.Load() > 0 {
					return syscall.ENOMEM
				}
				return nil
			}
			p.unregister = func() error {
				if broken.Load() {
					return syscall.EBUSY
				}
				return nil
			}
			p.drain = func() {
				if broken.CompareAndSwap(true, false) {
					long.Store(int64(tr.long.Out()))
					drained.Store(true)
				}
			}
			tr = dial(t, serve(t, svcrdma.Config{Handler: &service{}}),
				func(cfg *Config) { p.Provider, cfg.Provider = cfg.Provider, p })
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Fatal(err)
			}
			broken.Store(true)
			err := tr.Call(testContext(t), c.call)
			if !errors.Is(err, c.want) || c.want == nil && !bytes.Equal(c.call.Result, fill(0, payload)) {
				t.Errorf("Call: got %v and %d bytes, want %v", err, len(c.call.Result), c.want)
			}
			if !drained.Load() || long.Load() != c.long {
				t.Fatalf("when the call returns: connection taken down: %v, with %d buffers in use; want true, %d",
					drained.Load(), long.Load(), c.long)
			}
			const reason = "release memory: unregister MR 1: device or resource busy"
			eventually(t, "next connection", func() bool { return tr.Stats().Connects == 2 })
			if s := tr.Stats(); s.LastError != reason {
				t.Errorf("last error of the connection: got %q, want %q", s.LastError, reason)
			}
			if n := tr.long.Out(); n != 0 {
				t.Errorf("buffers for long messages in use: got %d, want 0", n)
			}
			if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
				t.Error(err)
			}
		})
	}
}
