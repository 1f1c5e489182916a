package xprt

import (
	"fmt"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An adapter is what a transport has on one device, over all its connections to it: the protection
// domain with the pool of MRs, and the registered memory of Sends and Receives. Its fields do not
// change.
type adapter struct {
	t      *Transport
	dev    verbs.Device
	params memreg.Params
	pd     verbs.PD
	pool   *memreg.Pool

	sendMR, recvMR verbs.MR
	sendLKey       uint32
	recvArena      []byte
	recvSize       int // octets of one Receive buffer
}

// openAdapter makes ready for connections on dev.
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

// receives is how many Receives a connection has; one place of the queue is for draining.
func (a *adapter) receives() int { return a.params.RecvWRs - 1 }

// postReceives gives the Receives to a queue pair that is not connected yet.
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

// close releases everything, when no connection of the adapter is left.
func (a *adapter) close() {
	log := a.t.log.With("server", a.t.cfg.Addr)
	if a.pool != nil {
		if n := a.pool.Destroy(); n > 0 {
			log.Error("memory regions could not be destroyed", "orphaned", n)
		}
	}
	for _, mr := range []verbs.MR{a.sendMR, a.recvMR} {
		if mr != nil {
			if err := mr.Dereg(); err != nil {
				log.Error("message buffers could not be deregistered", "error", err)
			}
		}
	}
	if a.pd != nil {
		if err := a.pd.Dealloc(); err != nil {
			log.Error("protection domain could not be released", "error", err)
		}
	}
	if a.recvArena != nil {
		membuf.Free(a.recvArena)
	}
}

// adapterFor returns the adapter for a connection on dev: the one that there is, when it is of this
// device and every MR of it is certain, or a new one. Only for whoever connects: Connect, and then
// the worker.
func (t *Transport) adapterFor(dev verbs.Device) (*adapter, error) {
	if t.adapter != nil && t.adapter.dev == dev {
		return t.adapter, nil
	}
	t.send.Lock()
	t.dropAdapter()
	t.send.Unlock()
	a, err := t.openAdapter(dev)
	if err != nil {
		return nil, fmt.Errorf("prepare RDMA device %s for %s: %w", dev.Attrs().Name, t.cfg.Addr, err)
	}
	t.adapter = a
	return a, nil
}

// dropAdapter closes the adapter. Only for whoever connects, with the send lock held or no call
// left.
func (t *Transport) dropAdapter() {
	if t.adapter != nil {
		t.adapter.close()
		t.adapter = nil
	}
}
