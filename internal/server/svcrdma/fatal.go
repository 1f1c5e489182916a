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

// An RDMA operation that the RNIC of the client refuses ends the connection. The client reconnects
// and sends the call again, and the next connection ends too. RFC 8166 §4.5.3 breaks this loop: the
// server replies to the call with ERR_CHUNK on the new connection.
//
// A refused RDMA Read identifies its call, because the Terminate message quotes the request. A
// refused RDMA Write or Send belongs to one of the last replies. The server gives one strike to
// each call of these replies, and refuses a call with three strikes.
const (
	fatalStrikes = 3
	maxFatal     = 1024
	fatalMaxAge  = drcMaxAge
)

// Fields of a Terminate message for a refused RDMA Write, Send or invalidation (RFC 5040 §4.8, RFC
// 5041 §7.2).
const (
	layerRDMAP           = 0
	layerDDP             = 1
	etypeTagged          = 1
	etypeUntagged        = 2
	codeCannotInvalidate = 0x09
)

// refusedReply reports whether a connection ended because the RNIC of the client refused a reply.
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
	lastAt  time.Time // of the last strike
}

// fatalCalls holds the calls of all connections that ended a connection. It keeps at most maxFatal
// calls and evicts the oldest.
type fatalCalls struct {
	any atomic.Bool // false while there are no calls; avoids the lock

	mu struct { // guards its fields
		sync.Mutex
		calls map[fatalKey]*list.Element // of *fatalCall
		order list.List                  // newest first
	}
}

func newFatalCalls() *fatalCalls {
	f := new(fatalCalls)
	f.mu.calls = make(map[fatalKey]*list.Element)
	return f
}

// add adds strikes to a call.
func (f *fatalCalls) add(addr netip.Addr, xid uint32, strikes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	k := fatalKey{addr, xid}
	e := f.mu.calls[k]
	if e == nil {
		e = f.mu.order.PushFront(&fatalCall{key: k})
		f.mu.calls[k] = e
	}
	f.mu.order.MoveToFront(e)
	call := e.Value.(*fatalCall)
	call.strikes += strikes
	call.lastAt = time.Now()
	for f.mu.order.Len() > maxFatal {
		f.remove(f.mu.order.Back())
	}
	f.any.Store(true)
}

// isFatal reports whether the server must reply to the call with ERR_CHUNK.
func (f *fatalCalls) isFatal(addr netip.Addr, xid uint32) bool {
	if !f.any.Load() {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.mu.calls[fatalKey{addr, xid}]
	if e == nil {
		return false
	}
	call := e.Value.(*fatalCall)
	if time.Since(call.lastAt) > fatalMaxAge {
		f.remove(e)
		return false
	}
	return call.strikes >= fatalStrikes
}

// forget removes a call after its reply, because the client may reuse the XID.
func (f *fatalCalls) forget(addr netip.Addr, xid uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.mu.calls[fatalKey{addr, xid}]; e != nil {
		f.remove(e)
	}
}

// remove removes a call. The caller holds mu.
func (f *fatalCalls) remove(e *list.Element) {
	delete(f.mu.calls, e.Value.(*fatalCall).key)
	f.mu.order.Remove(e)
	f.any.Store(f.mu.order.Len() > 0)
}

// recordReply records the XID of a reply before the reply is sent.
func (c *conn) recordReply(xid uint32) {
	c.replied.Lock()
	c.replied.xids[c.replied.n%len(c.replied.xids)] = xid
	c.replied.n++
	c.replied.Unlock()
}

// countStrikes adds a strike to the calls of the last replies if the client refused a reply.
func (c *conn) countStrikes(cause error) {
	if !refusedReply(cause) {
		return
	}
	c.replied.Lock()
	defer c.replied.Unlock()
	for i := range min(c.replied.n, len(c.replied.xids)) {
		c.fatal.add(c.addr, c.replied.xids[i], 1)
	}
}
