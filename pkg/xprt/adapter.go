package xprt

import (
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An adapter holds the resources of a transport on one device, across all connections to it. These
// are the protection domain, the pool of MRs, and the registered memory of Sends and Receives. Its
// fields do not change.
type adapter struct {
	t      *Transport
	dev    verbs.Device
	params memreg.Params
	pd     verbs.PD
	pool   *memreg.Pool

	sendMR, recvMR verbs.MR
	sendLKey       uint32
	recvArena      []byte
	recvSize       int // bytes of one Receive buffer
}

// openAdapter allocates the resources for connections on dev.
func (t *Transport) openAdapter(dev verbs.Device) (_ *adapter, err error) {
	a := &adapter{t: t, dev: dev, recvSize: max(recvSlack, 2*t.cfg.InlineBytes)}
	if a.params, err = memreg.Query(dev.Attrs(), t.cfg.Slots); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.pd, err = dev.AllocPD(); err != nil {
		return nil, err
	}
	a.pool = memreg.NewPool(a.pd, a.params, &t.mrs, memreg.Hooks{Failed: t.completionError, Trace: t.trace})
	if a.sendMR, err = a.pd.RegMR(t.arena); err != nil {
		return nil, err
	}
	a.sendLKey = a.sendMR.LKey()
	if a.recvArena, err = membuf.Alloc(a.receives() * a.recvSize); err != nil {
		return nil, err
	}
	if a.recvMR, err = a.pd.RegMR(a.recvArena); err != nil {
		return nil, err
	}
	return a, nil
}

// receives returns the number of Receives of a connection. One place of the receive queue is
// reserved to drain it.
func (a *adapter) receives() int { return a.params.RecvWRs - 1 }

// postReceives posts all Receives to a queue pair that is not connected yet.
func (a *adapter) postReceives(cn *conn) error {
	for i := range a.receives() {
		r := &recvBuf{}
		r.wr.SGE = verbs.SGE{Buf: a.recvArena[i*a.recvSize : (i+1)*a.recvSize : (i+1)*a.recvSize],
			LKey: a.recvMR.LKey()}
		r.wr.Done = func(wc *verbs.WorkCompletion) { cn.received(r, wc) }
		if _, err := cn.qp.PostRecv(&r.wr); err != nil {
			return err
		}
	}
	return nil
}

// close releases all resources. No connection of the adapter may remain.
func (a *adapter) close() {
	log := a.t.log.With("server", a.t.Address())
	if a.pool != nil {
		if n := a.pool.Destroy(); n > 0 {
			log.Error("failed to destroy memory regions", "orphaned", n)
		}
	}
	for _, mr := range []verbs.MR{a.sendMR, a.recvMR} {
		if mr != nil {
			if err := mr.Dereg(); err != nil {
				log.Error("failed to deregister message buffers", "error", err)
			}
		}
	}
	if a.pd != nil {
		if err := a.pd.Dealloc(); err != nil {
			log.Error("failed to release protection domain", "error", err)
		}
	}
	if a.recvArena != nil {
		membuf.Free(a.recvArena)
	}
}

// adapterFor returns the adapter for a connection on dev. It opens a new one if the current adapter
// belongs to another device. Only Connect and then the worker call it.
func (t *Transport) adapterFor(dev verbs.Device) (*adapter, error) {
	if t.adapter != nil && t.adapter.dev == dev {
		return t.adapter, nil
	}
	t.send.Lock()
	t.dropAdapter()
	t.send.Unlock()
	a, err := t.openAdapter(dev)
	if err != nil {
		return nil, fmt.Errorf("prepare RDMA device %s for %s: %w", dev.Attrs().Name, t.Address(), err)
	}
	t.adapter = a
	return a, nil
}

// dropAdapter closes the adapter. Only Connect, the worker and Close call it, with the send lock
// held or without pending calls.
func (t *Transport) dropAdapter() {
	if t.adapter != nil {
		t.adapter.close()
		t.adapter = nil
	}
}
