package mount

import (
	"context"
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// bulkBytes is the payload in bytes from which a call does not use the first connection.
	bulkBytes = 64 << 10
	// A call adds 1 to the load of its connection, and 1 for each loadUnit bytes of its payload.
	loadUnit = 16 << 10
)

// A caller distributes the RPCs of one mount over its transports (option nconnect).
//
// A call with a bulk payload does not use the first transport, unless the others have lost their
// connections. The other calls therefore never wait behind many bulk payloads. Each call takes the
// transport with the smallest load that is ready: a transport that has lost its connection gets no
// new calls while another one is ready.
//
// Its methods may be called concurrently, except add.
type caller struct {
	all  []*carrier // does not change once the mount is complete
	next atomic.Uint32
}

// A carrier is one transport and its load. Its size keeps the loads on different cache lines.
type carrier struct {
	*xprt.Transport
	load atomic.Int64 // of the calls that have not ended
	_    [48]byte
}

// add adds a transport.
func (c *caller) add(t *xprt.Transport) { c.all = append(c.all, &carrier{Transport: t}) }

// Call implements nfs3.Caller. A call that an earlier process made goes to the same transport.
func (c *caller) Call(ctx context.Context, m *sunrpc.Message) error {
	if id, ok := sunrpc.KeptCall(ctx, m); ok && int64(id.Conn) < int64(len(c.all)) {
		return c.all[id.Conn].Repeat(ctx, m, id.XID)
	}
	if len(c.all) == 1 {
		return c.all[0].CallNew(ctx, m)
	}
	bytes := max(len(m.ArgData), m.ResultRoom())
	t, load := c.choose(bytes), int64(1+bytes/loadUnit)
	t.load.Add(load)
	defer t.load.Add(-load)
	return t.CallNew(ctx, m)
}

// choose returns the transport of a new call with a payload of n bytes. There are several
// transports.
func (c *caller) choose(n int) *carrier {
	all, start := c.all, 0
	if n >= bulkBytes {
		all = all[1:]
		start = int(c.next.Add(1) % uint32(len(all))) // sequential transfers use all connections
	}
	t, ready := leastLoaded(all, start)
	if !ready && c.all[0].Ready() {
		return c.all[0]
	}
	return t
}

// leastLoaded returns the ready carrier with the smallest load, or the one with the smallest load
// if none is ready. Of equal carriers it returns the first one from all[start] on.
func leastLoaded(all []*carrier, start int) (best *carrier, ready bool) {
	var least int64
	for i := range all {
		t := all[(start+i)%len(all)]
		r, load := t.Ready(), t.load.Load()
		if best == nil || r && !ready || r == ready && load < least {
			best, ready, least = t, r, load
		}
	}
	return best, ready
}

func (c *caller) close() {
	for _, t := range c.all {
		_ = t.Close()
	}
}
