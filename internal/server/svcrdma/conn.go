package svcrdma

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// writesPerChain is the maximum number of RDMA Writes and Sends in one post.
const writesPerChain = 32

// A conn is one connection.
//
//	accept ──► ready ──(peer, error, end of Serve)──► down ──► QP closed ──► workers ended ──► released
type conn struct {
	*server
	id    verbs.ConnRequest
	peer  netip.AddrPort
	addr  netip.Addr // of the peer; identifies the client across connections
	share *memShare  // from memBudget.join

	ctx    context.Context // ends when the connection goes down
	cancel context.CancelCauseFunc
	srvCtx context.Context // ends with Serve

	pd verbs.PD
	cq verbs.CQ
	qp verbs.QP

	sendThreshold, recvThreshold int // RFC 8797 §4.2
	remoteInv                    bool

	recvs   []recvBuf
	recvMem []byte
	recvMR  verbs.MR
	quick   QuickHandler // the Handler, if it is one
	// calls holds received messages for the workers. It has room for every Receive, so that a
	// completion handler never blocks.
	calls    chan *recvBuf
	pool     execPool
	readSlot chan struct{}       // one token per outstanding RDMA Read (ORD)
	sq       *semaphore.Weighted // free entries of the send queue for Writes and Sends
	sqRoom   int64
	workers  sync.WaitGroup

	execs     []*exec      // constant after accept
	startedAt time.Time    // origin of age
	idle      stopwatch    // runs while no call is in progress
	running   atomic.Int32 // calls in progress
	called    atomic.Bool  // a call has arrived on the connection
	leave     func()       // removes the connection from the count; may be called twice

	messages struct { // message buffers
		sync.Mutex
		unused []*msgBuf // most recently used last
		all    map[*msgBuf]struct{}
	}
	replied struct { // calls with a reply
		sync.Mutex
		xids []uint32 // ring of the last XIDs
		n    int      // XIDs written to the ring
	}
}

// A recvBuf is one Receive.
type recvBuf struct {
	req verbs.RecvRequest
	buf []byte
	n   int
}

func (s *server) serveConn(srvCtx context.Context, req verbs.ConnRequest, leave func()) {
	c := &conn{server: s, id: req, leave: leave, peer: req.RemoteAddr(), srvCtx: srvCtx, startedAt: time.Now()}
	c.quick, _ = s.cfg.Handler.(QuickHandler)
	c.pool.returned.L = &c.pool
	c.messages.all = make(map[*msgBuf]struct{})
	c.replied.xids = make([]uint32, s.cfg.Credits)
	c.addr = c.peer.Addr().Unmap()
	c.ctx, c.cancel = context.WithCancelCause(srvCtx)
	log := s.log.With("peer", c.peer)
	defer c.release()
	if err := c.setup(); err != nil {
		log.Error("connection refused", "error", err)
		_ = req.Reject(nil)
		return
	}
	if err := c.accept(); err != nil {
		log.Warn("connection not established", "error", err)
		return
	}
	s.cfg.Stats.Connections.Add(1)
	defer s.cfg.Stats.Connections.Add(-1)
	log.Info("connected", "inline_send", c.sendThreshold, "inline_recv", c.recvThreshold, "remote_invalidate",
		c.remoteInv, "read_depth", cap(c.readSlot))
	c.watch()
	log.Info("disconnected", "cause", context.Cause(c.ctx))
}

// setup allocates the resources of the connection and posts its Receives. It runs before accept.
func (c *conn) setup() error {
	priv, _ := rpcrdma.ParsePrivate(c.id.Peer().PrivateData)
	c.sendThreshold, c.recvThreshold = rpcrdma.Thresholds(c.private(), priv)
	c.remoteInv = c.cfg.RemoteInv && priv.RemoteInv

	dev := c.id.Device()
	attrs := dev.Attrs()
	depth := min(c.cfg.ReadDepth, int(c.id.Peer().ResponderResources), max(attrs.MaxQPInitRdAtom, 0))
	c.readSlot = make(chan struct{}, depth)
	c.sqRoom = int64(max(c.cfg.Credits+1, 2*writesPerChain))
	c.sq = semaphore.NewWeighted(c.sqRoom)
	sendWRs, recvWRs := int(c.sqRoom)+depth, c.cfg.Credits
	if attrs.MaxQPWR > 0 && max(sendWRs, recvWRs) > attrs.MaxQPWR {
		return fmt.Errorf("device %s: queues have %d entries, %d are required; reduce the credits", attrs.Name,
			attrs.MaxQPWR, max(sendWRs, recvWRs))
	}
	var err error
	if c.pd, err = dev.AllocPD(); err != nil {
		return err
	}
	if c.cq, err = dev.CreateCQ(sendWRs + recvWRs); err != nil {
		return err
	}
	if c.qp, err = c.id.CreateQP(c.pd, verbs.QPInitAttr{
		SendCQ: c.cq, RecvCQ: c.cq, MaxSendWR: sendWRs, MaxRecvWR: recvWRs, MaxSendSGE: 1, InlineHandlers: true,
		OnDisconnect: func(cause error) {
			c.countStrikes(cause)
			c.cancel(cause)
		},
	}); err != nil {
		return err
	}
	return c.postReceives()
}

// private returns the private data of this side (RFC 8797 §4).
func (c *conn) private() rpcrdma.Private {
	return rpcrdma.Private{RemoteInv: c.cfg.RemoteInv, SendSize: c.cfg.InlineBytes, RecvSize: c.cfg.InlineBytes}
}

// postReceives posts one Receive per credit (RFC 8166 §3.3.1). The buffers have the size that this
// side offered, which may exceed the threshold of the peer.
func (c *conn) postReceives() (err error) {
	size, n := c.cfg.InlineBytes, c.cfg.Credits
	if c.recvMem, err = membuf.Alloc(size * n); err != nil {
		return err
	}
	if c.recvMR, err = c.pd.RegMR(c.recvMem); err != nil {
		return err
	}
	c.calls = make(chan *recvBuf, n)
	c.recvs = make([]recvBuf, n)
	for i := range c.recvs {
		r := &c.recvs[i]
		r.buf = c.recvMem[i*size : (i+1)*size : (i+1)*size]
		r.req = verbs.RecvRequest{SGE: verbs.SGE{Buf: r.buf, LKey: c.recvMR.LKey()},
			Done: func(wc *verbs.WorkCompletion) {
				if wc.Status != verbs.StatusSuccess {
					return // flushed; OnDisconnect has the cause
				}
				r.n = int(wc.ByteLen)
				c.received(r)
			}}
		if _, err = c.qp.PostRecv(&r.req); err != nil {
			return err
		}
	}
	return nil
}

func (c *conn) accept() error {
	for range c.cfg.Credits {
		w, err := c.newExec()
		if err != nil {
			_ = c.id.Reject(nil)
			return err
		}
		c.execs = append(c.execs, w)
		c.pool.put(w)
	}
	for range c.execs {
		c.workers.Go(c.work)
	}
	c.mem.join(c)
	c.idle.start(c.age())
	ctx, cancel := context.WithTimeout(c.ctx, acceptTimeout)
	defer cancel()
	peer := c.id.Peer()
	return c.id.Accept(ctx, verbs.ConnParam{
		PrivateData: c.private().Append(nil),
		// The client cannot read memory of this side, but a responder grants the depth that the
		// initiator requests (RFC 6581 §9.1).
		ResponderResources: uint16(min(int(peer.InitiatorDepth), c.id.Device().Attrs().MaxQPRdAtom)),
		InitiatorDepth:     uint16(cap(c.readSlot)),
	})
}

// repost posts a Receive again. It ends the connection on a failure.
func (c *conn) repost(r *recvBuf) {
	if _, err := c.qp.PostRecv(&r.req); err != nil {
		c.cancel(fmt.Errorf("post Receive: %w", err))
	}
}

// release ends the connection and frees its resources. It closes the QP first: the device then
// accesses no memory and delivers no completion. The workers end when their channel is closed, and
// release frees their resources after that.
func (c *conn) release() {
	c.cancel(context.Canceled)
	if err := c.id.Close(); err != nil {
		c.log.Warn("close connection", "peer", c.peer, "error", err)
	}
	if c.calls != nil {
		close(c.calls)
	}
	c.waitWorkers()
	if h, ok := c.cfg.Handler.(ConnHandler); ok {
		h.ConnClosed(c.peer)
	}
	c.mem.leave(c)
	for b := range c.messages.all {
		c.must(b.destroy())
	}
	c.mem.give(c, len(c.messages.all))
	for _, x := range c.execs {
		x.cancelDetached()
		c.must(x.send.destroy())
	}
	if c.recvMR != nil {
		c.must(c.recvMR.Dereg())
	}
	if c.recvMem != nil {
		membuf.Free(c.recvMem)
	}
	if c.cq != nil {
		c.must(c.cq.Close())
	}
	if c.pd != nil {
		c.must(c.pd.Dealloc())
	}
}

func (c *conn) must(err error) {
	if err != nil {
		c.log.Error("release connection", "peer", c.peer, "error", err)
	}
}
