package svcrdma

import (
	"container/list"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// An RDMA operation that the client's memory refuses ends the connection; the client connects
// again, sends the call again, and loses that connection too. RFC 8166 §4.5.3 breaks the loop: the
// call is answered with ERR_CHUNK on the new connection.
//
// Which call it was is certain for an RDMA Read, whose request the client's Terminate quotes. For
// an RDMA Write or a Send it is one of the replies that left last, so those are only counted, and a
// call is answered so when it was among them three times over.
const (
	fatalStrikes = 3
	maxFatal     = 1024
	fatalMaxAge  = drcMaxAge
)

// What a client's Terminate says when an RDMA Write, a Send, or its invalidation was refused (RFC
// 5040 §4.8, RFC 5041 §7.2).
const (
	layerRDMAP           = 0
	layerDDP             = 1
	etypeTagged          = 1
	etypeUntagged        = 2
	codeCannotInvalidate = 0x09
)

// refusedReply tells whether a connection ended because the client's memory or Receives refused a
// reply.
func refusedReply(cause error) bool {
	var t *verbs.TerminateError
	if !errors.As(cause, &t) || t.Local {
		return false
	}
	switch t.Layer {
	case layerDDP:
		return t.EType == etypeTagged || t.EType == etypeUntagged
	case layerRDMAP:
		return t.Code == codeCannotInvalidate
	}
	return false
}

type fatalKey struct {
	addr netip.Addr
	xid  uint32
}

type fatalCall struct {
	key     fatalKey
	strikes int
	at      time.Time
}

// fatalCalls remembers calls that ended their connections: bounded, oldest out first, shared by all
// connections.
type fatalCalls struct {
	any atomic.Bool // spares calls the lock while there are none

	mu    sync.Mutex
	calls map[fatalKey]*list.Element // guarded by mu; of *fatalCall
	order list.List                  // guarded by mu; newest in front
}

func newFatalCalls() *fatalCalls { return &fatalCalls{calls: make(map[fatalKey]*list.Element)} }

// add counts strikes against a call.
func (f *fatalCalls) add(addr netip.Addr, xid uint32, strikes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := fatalKey{addr, xid}
	e := f.calls[k]
	if e == nil {
		e = f.order.PushFront(&fatalCall{key: k})
		f.calls[k] = e
	}
	f.order.MoveToFront(e)
	call := e.Value.(*fatalCall)
	call.strikes += strikes
	call.at = time.Now()
	for f.order.Len() > maxFatal {
		f.remove(f.order.Back())
	}
	f.any.Store(true)
}

// hopeless tells whether the call is to be answered with ERR_CHUNK.
func (f *fatalCalls) hopeless(addr netip.Addr, xid uint32) bool {
	if !f.any.Load() {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.calls[fatalKey{addr, xid}]
	if e == nil {
		return false
	}
	call := e.Value.(*fatalCall)
	if time.Since(call.at) > fatalMaxAge {
		f.remove(e)
		return false
	}
	return call.strikes >= fatalStrikes
}

// forget drops a call that has been answered: its XID may come again with another.
func (f *fatalCalls) forget(addr netip.Addr, xid uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.calls[fatalKey{addr, xid}]; e != nil {
		f.remove(e)
	}
}

// remove is called with mu held.
func (f *fatalCalls) remove(e *list.Element) {
	delete(f.calls, e.Value.(*fatalCall).key)
	f.order.Remove(e)
	f.any.Store(f.order.Len() > 0)
}

// answered notes the call whose reply is about to leave; ended counts strikes against the last of
// them.
func (c *conn) answered(xid uint32) {
	c.mu.Lock()
	c.recent[c.recentAt%len(c.recent)] = xid
	c.recentAt++
	c.mu.Unlock()
}

func (c *conn) ended(cause error) {
	if !refusedReply(cause) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range min(c.recentAt, len(c.recent)) {
		c.fatal.add(c.addr, c.recent[i], 1)
	}
}
