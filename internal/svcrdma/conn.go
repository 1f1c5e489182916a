package svcrdma

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// writesPerChain is how many RDMA Writes and Sends one post holds at most.
const writesPerChain = 32

// A conn is one connection.
//
//	accept ──► ready ──(peer, error, Serve's end)──► down ──► QP closed ──► workers ended ──► released
type conn struct {
	*server
	id   verbs.ConnRequest
	peer netip.AddrPort

	ctx    context.Context // ends when the connection goes down
	cancel context.CancelCauseFunc
	srvCtx context.Context // ends with Serve

	pd verbs.PD
	cq verbs.CQ
	qp verbs.QP

	sendThreshold, recvThreshold int // RFC 8797 §4.2
	remoteInv                    bool

	recvs    []recvBuf
	recvMem  []byte
	recvMR   verbs.MR
	calls    chan *recvBuf       // received, not yet taken by a worker; room for every Receive, so that a handler never blocks
	readSlot chan struct{}       // one token per RDMA Read outstanding (ORD)
	sq       *semaphore.Weighted // room on the send queue for Writes and Sends
	sqRoom   int64
	workers  sync.WaitGroup

	mu   sync.Mutex
	free []*msgBuf // guarded by mu; last used first
	all  []*msgBuf // guarded by mu
}

// A recvBuf is one Receive.
type recvBuf struct {
	req verbs.RecvRequest
	buf []byte
	n   int
}

// A msgBuf holds one unreduced message and is registered for local use.
type msgBuf struct {
	mem []byte
	mr  verbs.MR
}

func (s *server) serveConn(srvCtx context.Context, req verbs.ConnRequest) {
	c := &conn{server: s, id: req, peer: req.RemoteAddr(), srvCtx: srvCtx}
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
	log.Info("connected", "inline_send", c.sendThreshold, "inline_recv", c.recvThreshold, "remote_invalidate", c.remoteInv, "read_depth", cap(c.readSlot))
	<-c.ctx.Done()
	log.Info("disconnected", "cause", context.Cause(c.ctx))
}

// setup makes everything that the connection needs and posts its Receives, before the peer is accepted.
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
		return fmt.Errorf("device %s has queues of %d requests, %d are needed: lower the credits", attrs.Name, attrs.MaxQPWR, max(sendWRs, recvWRs))
	}
	var err error
	if c.pd, err = dev.AllocPD(); err != nil {
		return err
	}
	if c.cq, err = dev.CreateCQ(sendWRs + recvWRs); err != nil {
		return err
	}
	if c.qp, err = c.id.CreateQP(c.pd, verbs.QPInitAttr{
		SendCQ: c.cq, RecvCQ: c.cq, MaxSendWR: sendWRs, MaxRecvWR: recvWRs, MaxSendSGE: 1,
		OnDisconnect: func(cause error) { c.cancel(cause) },
	}); err != nil {
		return err
	}
	return c.postReceives()
}

// private is what this side says of itself (RFC 8797 §4).
func (c *conn) private() rpcrdma.Private {
	return rpcrdma.Private{RemoteInv: c.cfg.RemoteInv, SendSize: c.cfg.InlineBytes, RecvSize: c.cfg.InlineBytes}
}

// postReceives posts one Receive per credit (RFC 8166 §3.3.1), each as large as this side offered: a peer whose own offer is
// smaller just does not fill them.
func (c *conn) postReceives() (err error) {
	size, n := c.cfg.InlineBytes, c.cfg.Credits
	if c.recvMem, err = verbs.AllocBuffer(size * n); err != nil {
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
		r.req = verbs.RecvRequest{SGE: verbs.SGE{Buf: r.buf, LKey: c.recvMR.LKey()}, Done: func(wc *verbs.WorkCompletion) {
			if wc.Status != verbs.StatusSuccess {
				return // flushed: OnDisconnect tells the cause
			}
			r.n = int(wc.ByteLen)
			c.calls <- r
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
		c.workers.Go(w.loop)
	}
	ctx, cancel := context.WithTimeout(c.ctx, acceptTimeout)
	defer cancel()
	peer := c.id.Peer()
	return c.id.Accept(ctx, verbs.ConnParam{
		PrivateData: c.private().Append(nil),
		// Nothing of this side may be read, but a responder grants what the initiator asks (RFC 6581 §9.1).
		ResponderResources: uint16(min(int(peer.InitiatorDepth), c.id.Device().Attrs().MaxQPRdAtom)),
		InitiatorDepth:     uint16(cap(c.readSlot)),
	})
}

// repost gives a Receive back to the queue. A failure means that the connection is ending.
func (c *conn) repost(r *recvBuf) {
	if _, err := c.qp.PostRecv(&r.req); err != nil {
		c.cancel(fmt.Errorf("post Receive: %w", err))
	}
}

// getBuf takes a message buffer. There are at most two per worker.
func (c *conn) getBuf() (*msgBuf, error) {
	c.mu.Lock()
	if n := len(c.free); n > 0 {
		b := c.free[n-1]
		c.free = c.free[:n-1]
		c.mu.Unlock()
		return b, nil
	}
	c.mu.Unlock()
	b, err := c.newBuf(c.cfg.MaxMessage)
	if err != nil {
		return nil, fmt.Errorf("message buffer: %w", err)
	}
	return b, nil
}

func (c *conn) newBuf(size int) (*msgBuf, error) {
	mem, err := verbs.AllocBuffer(size)
	if err != nil {
		return nil, err
	}
	mr, err := c.pd.RegMR(mem)
	if err != nil {
		verbs.FreeBuffer(mem)
		return nil, err
	}
	b := &msgBuf{mem: mem, mr: mr}
	c.mu.Lock()
	c.all = append(c.all, b)
	c.mu.Unlock()
	return b, nil
}

func (c *conn) putBuf(b *msgBuf) {
	c.mu.Lock()
	c.free = append(c.free, b)
	c.mu.Unlock()
}

// release ends the connection and frees everything. Order: the QP first, so that no completion comes any more and nothing
// of the device touches memory; then the workers, which see the closed channel; then what they used.
func (c *conn) release() {
	c.cancel(context.Canceled)
	if err := c.id.Close(); err != nil {
		c.log.Warn("close connection", "peer", c.peer, "error", err)
	}
	if c.calls != nil {
		close(c.calls)
	}
	c.workers.Wait()
	if h, ok := c.cfg.Handler.(ConnHandler); ok {
		h.ConnClosed(c.peer)
	}
	for _, b := range c.all {
		c.must(b.mr.Dereg())
		verbs.FreeBuffer(b.mem)
	}
	if c.recvMR != nil {
		c.must(c.recvMR.Dereg())
	}
	if c.recvMem != nil {
		verbs.FreeBuffer(c.recvMem)
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
