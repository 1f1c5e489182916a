package xprt

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// maxReadDepth is the largest number of RDMA Reads that the server may have in flight. It is a
// power of two: stock siw rounds other values up and then exceeds them.
const maxReadDepth = 128

// signalPart is the fraction of the slots after whose Sends one Send is signaled: 1/8 (S8).
const signalPart = 8

// maxNudgePause is the longest pause between nudges.
const maxNudgePause = time.Second

// causeWait is the longest wait for the cause of a lost connection. The provider may first have to
// write its own requests to a socket that is blocked.
const causeWait = 2 * time.Second

// A conn is one connection.
//
//	dial --> install (first keepalive call, one credit) --> in use
//	                                                          |
//	      fail: completion, post or protocol error, timeout,  |
//	      loss, idle, Close                                   v
//	                                                        ended
//	                                                          | waitCause
//	                                                          v
//	      uninstall: send lock, drain, close, recover MRs, wake calls
type conn struct {
	*adapter
	id verbs.ActiveID
	cq verbs.CQ
	qp verbs.QP
	sq sendQueue

	inlineSend, inlineRecv int // inline thresholds in bytes

	// Used by the completion handlers only, which run one after the other.
	hdr         rpcrdma.Header // of the current message
	lastWarning int64          // last log of warnDiscarded, as returned by Transport.now

	writePad *rpcrdma.Segment // registration for pads; nil without the option writepad (S20)
	padMem   []byte

	failed    sync.Once
	ended     chan struct{} // closed by fail
	err       error         // set before ended is closed; then owned by the worker
	down      chan struct{} // closed by the worker when the connection is taken down
	panicked  atomic.Bool   // a call panicked, so the state of its MRs is unknown
	causeOnce sync.Once
	causeSet  chan struct{} // closed when the provider has reported why it lost the connection
	cause     error         // set before causeSet is closed

	installedAt   int64        // as returned by Transport.now
	lastReceived  atomic.Int64 // time of the last message, as returned by Transport.now
	answered      atomic.Bool  // the server answered a call, keepalive calls included
	served        atomic.Int32 // answered calls of the consumer, at most progressCalls
	pingsInFlight atomic.Int32 // pending keepalive calls

	nudge struct {
		once sync.Once
		sync.Mutex
		timer *time.Timer
	}
}

type recvBuf struct{ wr verbs.RecvRequest }

// fail ends the connection with the first err. It only notifies the worker, so any goroutine may
// call it.
func (cn *conn) fail(err error) {
	cn.failed.Do(func() {
		cn.err = err
		close(cn.ended)
	})
}

// disconnected records why the provider lost the connection. The provider calls it.
func (cn *conn) disconnected(cause error) {
	cn.causeOnce.Do(func() {
		cn.cause = cause
		close(cn.causeSet)
	})
	cn.fail(cause)
}

// waitCause waits for the cause that the provider reports, if err is only a consequence of the
// loss. Flushes and rejected posts may come before the cause. The worker calls waitCause after
// ended is closed.
func (cn *conn) waitCause(closing <-chan struct{}) {
	if !followsLoss(cn.err) {
		return
	}
	timer := time.NewTimer(causeWait)
	defer timer.Stop()
	select {
	case <-cn.causeSet:
		cn.err = cn.cause
	case <-timer.C:
	case <-closing:
	}
}

// completionError handles a failed work completion. It logs each failure once with its status,
// except flushes, which are not logged. Failures and flushes end the connection (S25).
func (t *Transport) completionError(what string, wc *verbs.WorkCompletion) {
	cn := t.conn.Load()
	if cn == nil || wc.QP != cn.qp {
		return
	}
	if wc.Status != verbs.StatusWRFlushErr {
		t.log.Error("work request failed", "request", what, "status", wc.Status.String(), "vendor", wc.VendorErr,
			"server", t.Address())
	}
	cn.fail(&completionFailure{what: what, status: wc.Status})
}

func (t *Transport) sendDone(wc *verbs.WorkCompletion) {
	if wc.Status != verbs.StatusSuccess {
		t.completionError("send", wc)
	}
}

// dial makes a connection: device, queues, Receives, handshake, in this order. It holds no lock.
// It chooses the address, waits for the limits of connects, and records an attempt that failed. If
// admitted is set, the caller has waited for the limits of the preferred address.
func (t *Transport) dial(ctx context.Context, admitted bool) (_ *conn, err error) {
	address, timeout := t.cfg.Servers.choose(t.preferred(), t.cfg.ConnectTimeout)
	t.address.Store(int32(address))
	if !admitted || address != t.preferred() {
		t.waitsForTurn.Store(true)
		err := t.cfg.ConnectLimits.Wait(ctx, t.Address().Addr())
		t.waitsForTurn.Store(false)
		if err != nil {
			return nil, err
		}
	}
	attempt, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cn := &conn{ended: make(chan struct{}), causeSet: make(chan struct{}), down: make(chan struct{})}
	began := time.Now()
	defer func() { t.connectNanos.Add(int64(time.Since(began))) }()
	defer func() {
		if err != nil {
			t.stats.ConnectFailures.Add(1)
			if ctx.Err() == nil {
				t.cfg.Servers.failed(address)
			}
			t.closeConn(cn)
		}
	}()
	if cn.id, err = t.cfg.Provider.Resolve(attempt, t.Address()); err != nil {
		return nil, err
	}
	if cn.adapter, err = t.adapterFor(cn.id.Device()); err != nil {
		return nil, err
	}
	attrs := cn.dev.Attrs()
	if err = cn.makeQueues(); err != nil {
		return nil, fmt.Errorf("prepare RDMA connection to %s: %w", t.Address(), err)
	}
	mine := rpcrdma.Private{RemoteInv: attrs.Caps.Has(verbs.CapRemoteInv), SendSize: t.cfg.InlineBytes,
		RecvSize: t.cfg.InlineBytes}
	depth := maxReadDepth
	for depth > max(attrs.MaxQPRdAtom, 1) {
		depth /= 2
	}
	if err = cn.id.Connect(attempt, verbs.ConnParam{PrivateData: mine.Append(nil),
		ResponderResources: uint16(depth)}); err != nil {
		return nil, err
	}
	peer, found := rpcrdma.ParsePrivate(cn.id.Peer().PrivateData)
	cn.inlineSend, cn.inlineRecv = rpcrdma.Thresholds(mine, peer)
	t.link.Store(&Link{Device: attrs, Peer: peer, PeerFound: found, InlineSend: cn.inlineSend,
		InlineRecv: cn.inlineRecv})
	t.payload.Store(int64(min(cn.params.MaxPayload, 1<<20)))
	return cn, nil
}

func (cn *conn) makeQueues() (err error) {
	if cn.cq, err = cn.dev.CreateCQ(cn.params.SendWRs + cn.params.RecvWRs); err != nil {
		return err
	}
	cn.qp, err = cn.id.CreateQP(cn.pd, verbs.QPInitAttr{SendCQ: cn.cq, RecvCQ: cn.cq, MaxSendWR: cn.params.SendWRs,
		MaxRecvWR: cn.params.RecvWRs, MaxSendSGE: cn.params.SendSGEs, InlineHandlers: true,
		OnDisconnect: cn.disconnected})
	if err != nil {
		return err
	}
	cn.sq.init(cn.params.SendWRs, cn.params.Slots/signalPart)
	return cn.postReceives(cn)
}

// registerPad registers the memory for pads with the first post of the connection (S20).
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
	// The empty RDMA Write only ends the chain of the registration. The queue is new and has room.
	head, n := pad.Chain(cn.emptyWrite())
	cn.sq.take(n + 1)
	cn.sq.begin(n + 1)
	if _, err := cn.qp.PostSend(head); err != nil {
		return err
	}
	cn.sq.end(n + 1)
	cn.writePad = &rpcrdma.Segment{Handle: mr.Handle(), Length: mr.Length(), Offset: mr.Offset()}
	return nil
}

// emptyWrite returns an RDMA Write of zero bytes. The peer does not check the STag of the Write and
// consumes no Receive (RFC 5041 §5.2).
func (cn *conn) emptyWrite() *verbs.WorkRequest {
	return &verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: 1, Done: cn.t.sendDone}
}

// startNudges schedules a nudge for the case that the first reply of the connection is late.
func (cn *conn) startNudges() {
	if cn.answered.Load() {
		return
	}
	cn.nudge.once.Do(func() {
		if cn.id.Device().Attrs().Transport != verbs.TransportIWARP {
			return
		}
		cn.scheduleNudge(cn.t.cfg.NudgeAfter)
	})
}

func (cn *conn) scheduleNudge(after time.Duration) {
	cn.nudge.Lock()
	defer cn.nudge.Unlock()
	select {
	case <-cn.ended:
		return
	default:
	}
	cn.nudge.timer = time.AfterFunc(after, func() { cn.sendNudge(after) })
}

// sendNudge sends an empty RDMA Write, which makes a server read a first FPDU that it left in its
// socket.
func (cn *conn) sendNudge(after time.Duration) {
	if cn.answered.Load() {
		return
	}
	t := cn.t
	t.send.RLock()
	defer t.send.RUnlock()
	if t.conn.Load() != cn || !cn.sq.take(1) {
		return
	}
	t.stats.Nudges.Add(1) // before the post, because a reply may follow at once
	t.trace.Add(trace.Event{Kind: trace.Nudge})
	cn.sq.begin(1)
	if _, err := cn.qp.PostSend(cn.emptyWrite()); err != nil {
		cn.fail(&postError{"nudge", err})
		return
	}
	cn.sq.end(1)
	cn.scheduleNudge(min(2*after, maxNudgePause))
}

// recordReply records that the server answered the call of s. Only completion handlers call it.
func (cn *conn) recordReply(s *slot) {
	if !cn.answered.Load() {
		cn.answered.Store(true)
	}
	if n := cn.served.Load(); !s.ping && n < progressCalls {
		cn.served.Store(n + 1)
	}
}

// usefulness classifies the connection.
func (cn *conn) usefulness(minLife time.Duration) usefulness {
	switch {
	case cn.served.Load() >= progressCalls:
		return useProgress
	case !cn.answered.Load():
		return useNone
	case cn.t.now()-cn.installedAt >= int64(minLife):
		return useProgress
	}
	return useAlive
}

// closeConn releases everything that dial and the connection allocated, in reverse order. After it
// returns, no memory can be reached through the connection. Only Connect and the worker call it,
// never a completion handler.
func (t *Transport) closeConn(cn *conn) {
	cn.fail(ErrClosed)
	cn.nudge.Lock()
	if cn.nudge.timer != nil {
		cn.nudge.timer.Stop()
	}
	cn.nudge.Unlock()
	if cn.qp != nil {
		cn.qp.Drain()
	}
	if cn.id != nil {
		cn.id.Close()
	}
	t.detach(cn)
	if cn.cq != nil {
		if err := cn.cq.Close(); err != nil {
			t.log.Error("failed to close completion queue", "error", err, "server", t.Address())
		}
	}
}

// detach removes the connection from the transport and adds the counters of its queue pair.
func (t *Transport) detach(cn *conn) {
	t.status.Lock()
	defer t.status.Unlock()
	if cn.qp != nil {
		t.status.ended.add(cn.qp.Stats())
	}
	t.conn.Store(nil)
}

// recoverMRs prepares the adapter of a closed connection for the next one, or drops it. After it
// returns, the server cannot reach the memory of any call. The worker calls it with the send lock
// held for writing.
func (t *Transport) recoverMRs(cn *conn) {
	if cn.padMem != nil {
		defer membuf.Free(cn.padMem) // after its MR is destroyed
	}
	if cn.panicked.Load() {
		t.dropAdapter()
		return
	}
	if !cn.pool.Recover() {
		t.log.Error("failed to destroy a memory region, closing its protection domain", "server", t.Address())
		t.dropAdapter()
		return
	}
	if selfcheck.On() {
		if err := cn.pool.Check(); err != nil {
			selfcheck.Failf("MR pool after a connection: %v", err)
		}
	}
}
