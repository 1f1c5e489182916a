package xprt

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/verify"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// maxReadDepth is how many RDMA Reads of the server are answered at a time. A power of two: stock
// siw rounds others up and overruns them.
const maxReadDepth = 128

// signalPart is the part of the slots after whose Sends one is signaled (S8).
const signalPart = 8

// maxNudgePause bounds the pause between nudges.
const maxNudgePause = time.Second

// causeWait bounds the wait for a provider's reason: it may first have to get its own requests off
// a socket that does not move.
const causeWait = 2 * time.Second

// A conn is one connection.
type conn struct {
	*adapter
	id verbs.ActiveID
	cq verbs.CQ
	qp verbs.QP
	sq sendQueue

	inlineSend, inlineRecv int
	hdr                    rpcrdma.Header // of the message in hand; CQ goroutine only
	// when a discarded message was logged last; CQ goroutine only
	warned int64

	writePad *rpcrdma.Segment // the registration for pads, if the mount wants it (S20)
	padMem   []byte

	dead   chan struct{}
	failed sync.Once
	err    error // set before dead is closed, and then the worker's
	hear   sync.Once
	told   chan struct{} // closed when the provider has said why it lost the connection
	cause  error         // set before told is closed

	replied    atomic.Bool  // to a call, a liveness call perhaps
	served     atomic.Bool  // a call of the consumer
	installed  int64        // when it was put up, in nanoseconds after Transport.epoch
	pinging    atomic.Int32 // liveness calls under way
	lastHeard  atomic.Int64 // when the last message came, in nanoseconds after Transport.epoch
	nudgeOnce  sync.Once
	nudgeMu    sync.Mutex
	nudgeTimer *time.Timer // guarded by nudgeMu
}

type recvBuf struct{ wr verbs.RecvRequest }

// fail ends the connection, once, for a reason. It only tells the worker, and may be called from
// anywhere.
func (cn *conn) fail(err error) {
	cn.failed.Do(func() {
		cn.err = err
		close(cn.dead)
	})
}

// disconnected is told by the provider why it lost the connection.
func (cn *conn) disconnected(cause error) {
	cn.hear.Do(func() {
		cn.cause = cause
		close(cn.told)
	})
	cn.fail(cause)
}

// learnCause puts the provider's reason for a lost connection in the place of what only follows
// from the loss: flushes, and posts that are refused, which may come first. For the worker, when
// dead is closed.
func (cn *conn) learnCause(closing <-chan struct{}) {
	if !followsLoss(cn.err) {
		return
	}
	timer := time.NewTimer(causeWait)
	defer timer.Stop()
	select {
	case <-cn.told:
		cn.err = cn.cause
	case <-timer.C:
	case <-closing:
	}
}

// completionError handles a work completion that is not a success: flushes are quiet, others are
// logged once with their status; both end the connection (S25).
func (t *Transport) completionError(what string, wc *verbs.WorkCompletion) {
	cn := t.conn.Load()
	if cn == nil || wc.QP != cn.qp {
		return
	}
	if wc.Status != verbs.StatusWRFlushErr {
		t.log.Error("work request failed", "request", what, "status", wc.Status.String(), "vendor", wc.VendorErr,
			"server", t.cfg.Addr)
	}
	cn.fail(&completionFailure{what: what, status: wc.Status})
}

func (t *Transport) sendDone(wc *verbs.WorkCompletion) {
	if wc.Status != verbs.StatusSuccess {
		t.completionError("send", wc)
	}
}

// dial makes a connection: device, queues, Receives, handshake, in that order. It holds no lock.
func (t *Transport) dial(ctx context.Context) (_ *conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.cfg.ConnectTimeout)
	defer cancel()
	cn := &conn{dead: make(chan struct{}), told: make(chan struct{})}
	began := time.Now()
	defer func() { t.stats.connectNanos.Add(uint64(time.Since(began))) }()
	defer func() {
		if err != nil {
			t.stats.connectFailures.Add(1)
			t.release(cn)
		}
	}()
	if cn.id, err = t.cfg.Provider.Resolve(ctx, t.cfg.Addr); err != nil {
		return nil, err
	}
	if cn.adapter, err = t.adapterFor(cn.id.Device()); err != nil {
		return nil, err
	}
	attrs := cn.dev.Attrs()
	if err = cn.makeQueues(); err != nil {
		return nil, fmt.Errorf("prepare RDMA connection to %s: %w", t.cfg.Addr, err)
	}
	mine := rpcrdma.Private{RemoteInv: attrs.Caps.Has(verbs.CapRemoteInv), SendSize: t.cfg.InlineBytes,
		RecvSize: t.cfg.InlineBytes}
	depth := maxReadDepth
	for depth > max(attrs.MaxQPRdAtom, 1) {
		depth /= 2
	}
	if err = cn.id.Connect(ctx, verbs.ConnParam{PrivateData: mine.Append(nil),
		ResponderResources: uint16(depth)}); err != nil {
		return nil, err
	}
	peer, _ := rpcrdma.ParsePrivate(cn.id.Peer().PrivateData)
	cn.inlineSend, cn.inlineRecv = rpcrdma.Thresholds(mine, peer)
	t.payload.Store(int64(min(cn.params.MaxPayload, 1<<20)))
	return cn, nil
}

func (cn *conn) makeQueues() (err error) {
	if cn.cq, err = cn.dev.CreateCQ(cn.params.SendWRs + cn.params.RecvWRs); err != nil {
		return err
	}
	cn.qp, err = cn.id.CreateQP(cn.pd, verbs.QPInitAttr{SendCQ: cn.cq, RecvCQ: cn.cq, MaxSendWR: cn.params.SendWRs,
		MaxRecvWR: cn.params.RecvWRs, MaxSendSGE: cn.params.SendSGEs, OnDisconnect: cn.disconnected})
	if err != nil {
		return err
	}
	cn.sq.init(cn.params.SendWRs, cn.params.Slots/signalPart)
	return cn.postReceives(cn)
}

// registerPad makes the registration for pads, with the first post of the connection (S20).
func (cn *conn) registerPad() error {
	mem, err := membuf.Alloc(4)
	if err != nil {
		return err
	}
	cn.padMem = mem
	pad := &cn.t.padList
	pad.Use(cn.pool)
	if _, err := pad.Map([][]byte{mem}, true, 0); err != nil {
		return err
	}
	mr := pad.Registered()[0]
	// An empty RDMA Write carries the registration: it has no other effect. The queue is new and
	// has room.
	head, n := pad.Chain(cn.emptyWrite())
	cn.sq.take(n + 1)
	if _, err := cn.qp.PostSend(head); err != nil {
		return err
	}
	cn.sq.posted.Add(int64(n + 1))
	cn.writePad = &rpcrdma.Segment{Handle: mr.Handle(), Length: mr.Length(), Offset: mr.Offset()}
	return nil
}

// emptyWrite is a zero-length RDMA Write: the peer checks no STag and consumes no Receive (RFC 5041
// §5.2).
func (cn *conn) emptyWrite() *verbs.WorkRequest {
	return &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: cn.t.sendDone}
}

// firstSend starts the watch over the first reply of the connection.
func (cn *conn) firstSend() {
	if cn.replied.Load() {
		return
	}
	cn.nudgeOnce.Do(func() {
		if cn.id.Device().Attrs().Transport != verbs.TransportIWARP {
			return
		}
		cn.scheduleNudge(cn.t.cfg.NudgeAfter)
	})
}

func (cn *conn) scheduleNudge(after time.Duration) {
	cn.nudgeMu.Lock()
	defer cn.nudgeMu.Unlock()
	select {
	case <-cn.dead:
		return
	default:
	}
	cn.nudgeTimer = time.AfterFunc(after, func() { cn.nudge(after) })
}

// nudge wakes a server that left the first FPDU in its socket.
func (cn *conn) nudge(after time.Duration) {
	if cn.replied.Load() {
		return
	}
	t := cn.t
	t.send.RLock()
	defer t.send.RUnlock()
	if t.conn.Load() != cn || !cn.sq.take(1) {
		return
	}
	t.stats.nudges.Add(1) // before the reply that it may bring
	t.trace.Add(trace.Event{Kind: trace.Nudge})
	if _, err := cn.qp.PostSend(cn.emptyWrite()); err != nil {
		return
	}
	cn.sq.posted.Add(1)
	cn.scheduleNudge(min(2*after, maxNudgePause))
}

// sawReply notes the first valid replies of the connection.
func (cn *conn) sawReply(s *slot) {
	if !cn.replied.Load() {
		cn.replied.Store(true)
	}
	if !s.ping && !cn.served.Load() {
		cn.served.Store(true)
	}
}

// use is what the connection was good for: aWhile is how long it must have stood to count as good
// without a call.
func (cn *conn) use(aWhile time.Duration) usefulness {
	switch {
	case cn.served.Load():
		return useCalls
	case !cn.replied.Load():
		return useNone
	case cn.t.now()-cn.installed >= int64(aWhile):
		return useCalls
	}
	return useAlive
}

// release takes apart what dial and the life of the connection made, in the reverse order. When it
// returns no memory can be reached through the connection. Only for whoever connects; not from a
// completion handler.
func (t *Transport) release(cn *conn) {
	cn.fail(ErrClosed)
	cn.nudgeMu.Lock()
	if cn.nudgeTimer != nil {
		cn.nudgeTimer.Stop()
	}
	cn.nudgeMu.Unlock()
	if cn.qp != nil {
		cn.qp.Drain()
	}
	if cn.id != nil {
		cn.id.Close()
	}
	t.retire(cn)
	if cn.cq != nil {
		if err := cn.cq.Close(); err != nil {
			t.log.Error("completion queue could not be released", "error", err, "server", t.cfg.Addr)
		}
	}
}

// retire adds the counters of a queue pair that is no more to the transport's.
func (t *Transport) retire(cn *conn) {
	t.stateMu.Lock()
	defer t.stateMu.Unlock()
	if cn.qp != nil {
		t.ended.add(cn.qp.Stats())
	}
	t.conn.Store(nil)
}

// settle makes the adapter of a connection that was released fit for the next one, or drops it.
// When it returns no memory of any call can be reached by the server, nor will be. Called by the
// worker with the send lock held for writing.
func (t *Transport) settle(cn *conn) {
	if cn.padMem != nil {
		defer membuf.Free(cn.padMem) // when its MR is no more
	}
	if !cn.pool.Recover() {
		t.log.Error("a memory region could not be destroyed: the protection domain is given up with it", "server",
			t.cfg.Addr)
		t.dropAdapter()
		return
	}
	if verify.On() {
		if err := cn.pool.Check(); err != nil {
			verify.Failf("after a connection: %v", err)
		}
	}
}
