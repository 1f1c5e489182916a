package xprt

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/memreg"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// maxReadDepth is how many RDMA Reads of the server are answered at a time. A power of two: stock siw rounds others up and overruns them.
const maxReadDepth = 128

// signalPart is the part of the slots after whose Sends one is signaled (S8).
const signalPart = 8

// maxNudgePause bounds the pause between nudges.
const maxNudgePause = time.Second

// A conn is one connection and everything made for it.
type conn struct {
	t      *Transport
	id     verbs.ActiveID
	pd     verbs.PD
	cq     verbs.CQ
	qp     verbs.QP
	pool   *memreg.Pool
	params memreg.Params

	inlineSend, inlineRecv int
	sendMR, recvMR         verbs.MR
	sendLKey               uint32
	recvArena              []byte
	hdr                    rpcrdma.Header // of the message in hand; CQ goroutine only

	writePad    *rpcrdma.Segment // the registration for pads, if the mount wants it (S20)
	padMem      []byte
	padList     memreg.List
	signalAfter int64
	unsignaled  atomic.Int64

	dead   chan struct{}
	failed sync.Once
	err    error // set before dead is closed

	replied    atomic.Bool
	nudgeOnce  sync.Once
	nudgeMu    sync.Mutex
	nudgeTimer *time.Timer // guarded by nudgeMu
}

type recvBuf struct{ wr verbs.RecvRequest }

// fail ends the connection, once, for a reason. It only tells the worker, and may be called from anywhere.
func (cn *conn) fail(err error) {
	cn.failed.Do(func() {
		cn.err = err
		close(cn.dead)
	})
}

// completionError handles a work completion that is not a success: flushes are quiet, others are logged once with
// their status; both end the connection (S25).
func (cn *conn) completionError(what string, wc *verbs.WorkCompletion) {
	if wc.Status != verbs.StatusWRFlushErr {
		cn.t.log.Error("work request failed", "request", what, "status", wc.Status.String(), "vendor", wc.VendorErr, "server", cn.t.cfg.Addr)
	}
	cn.fail(fmt.Errorf("%s: %s", what, wc.Status))
}

func (t *Transport) sendDone(wc *verbs.WorkCompletion) {
	if wc.Status == verbs.StatusSuccess {
		return
	}
	if cn := t.conn.Load(); cn != nil && wc.QP == cn.qp {
		cn.completionError("send", wc)
	}
}

// signalNow counts n requests and reports whether the Send behind them is to be signaled (S8).
func (cn *conn) signalNow(n int) bool {
	if cn.unsignaled.Add(int64(n)) < cn.signalAfter {
		return false
	}
	cn.unsignaled.Store(0)
	return true
}

// dial makes a connection: device, queues, Receives, handshake, in that order. It holds no lock.
func (t *Transport) dial(ctx context.Context) (_ *conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.cfg.ConnectTimeout)
	defer cancel()
	cn := &conn{t: t, dead: make(chan struct{})}
	defer func() {
		if err != nil {
			t.stats.connectFailures.Add(1)
			t.release(cn)
		}
	}()
	if cn.id, err = t.cfg.Provider.Resolve(ctx, t.cfg.Addr); err != nil {
		return nil, err
	}
	attrs := cn.id.Device().Attrs()
	if cn.params, err = memreg.Query(attrs, t.cfg.Slots); err != nil {
		return nil, err
	}
	if err = cn.makeQueues(); err != nil {
		return nil, fmt.Errorf("prepare RDMA connection to %s: %w", t.cfg.Addr, err)
	}
	mine := rpcrdma.Private{RemoteInv: attrs.Caps.Has(verbs.CapRemoteInv), SendSize: t.cfg.InlineBytes, RecvSize: t.cfg.InlineBytes}
	depth := maxReadDepth
	for depth > max(attrs.MaxQPRdAtom, 1) {
		depth /= 2
	}
	if err = cn.id.Connect(ctx, verbs.ConnParam{PrivateData: mine.Append(nil), ResponderResources: uint16(depth)}); err != nil {
		return nil, err
	}
	peer, _ := rpcrdma.ParsePrivate(cn.id.Peer().PrivateData)
	cn.inlineSend, cn.inlineRecv = rpcrdma.Thresholds(mine, peer)
	t.payload.Store(int64(min(cn.params.MaxPayload, 1<<20)))
	return cn, nil
}

func (cn *conn) makeQueues() (err error) {
	t, dev := cn.t, cn.id.Device()
	if cn.pd, err = dev.AllocPD(); err != nil {
		return err
	}
	if cn.cq, err = dev.CreateCQ(cn.params.SendWRs + cn.params.RecvWRs); err != nil {
		return err
	}
	cn.qp, err = cn.id.CreateQP(cn.pd, verbs.QPInitAttr{SendCQ: cn.cq, RecvCQ: cn.cq, MaxSendWR: cn.params.SendWRs,
		MaxRecvWR: cn.params.RecvWRs, MaxSendSGE: cn.params.SendSGEs, OnDisconnect: cn.fail})
	if err != nil {
		return err
	}
	cn.pool = memreg.NewPool(cn.pd, cn.params, &t.mrs, cn.completionError)
	cn.signalAfter = int64(max(cn.params.Slots/signalPart, 1))
	if cn.sendMR, err = cn.pd.RegMR(t.arena); err != nil {
		return err
	}
	cn.sendLKey = cn.sendMR.LKey()
	if err = cn.makeReceives(); err != nil {
		return err
	}
	return nil
}

func (cn *conn) makeReceives() (err error) {
	size := max(recvSlack, 2*cn.t.cfg.InlineBytes)
	n := cn.params.RecvWRs - 1 // one is for draining
	if cn.recvArena, err = verbs.AllocBuffer(n * size); err != nil {
		return err
	}
	if cn.recvMR, err = cn.pd.RegMR(cn.recvArena); err != nil {
		return err
	}
	for i := range n {
		r := &recvBuf{}
		r.wr.SGE = verbs.SGE{Buf: cn.recvArena[i*size : (i+1)*size : (i+1)*size], LKey: cn.recvMR.LKey()}
		r.wr.Done = func(wc *verbs.WorkCompletion) { cn.received(r, wc) }
		if _, err := cn.qp.PostRecv(&r.wr); err != nil {
			return err
		}
	}
	return nil
}

// registerPad makes the registration for pads, with the first post of the connection (S20).
func (cn *conn) registerPad() error {
	mem, err := verbs.AllocBuffer(4)
	if err != nil {
		return err
	}
	cn.padMem = mem
	cn.padList.Use(cn.pool)
	if _, err := cn.padList.Map([][]byte{mem}, true, 0); err != nil {
		return err
	}
	mr := cn.padList.Registered()[0]
	// An empty RDMA Write carries the registration: it has no other effect.
	head, _ := cn.padList.Chain(cn.emptyWrite())
	if _, err := cn.qp.PostSend(head); err != nil {
		return err
	}
	cn.writePad = &rpcrdma.Segment{Handle: mr.Handle(), Length: mr.Length(), Offset: mr.Offset()}
	return nil
}

// emptyWrite is a zero-length RDMA Write: the peer checks no STag and consumes no Receive (RFC 5041 §5.2).
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
	if t.conn.Load() != cn {
		return
	}
	if _, err := cn.qp.PostSend(cn.emptyWrite()); err != nil {
		return
	}
	t.stats.nudges.Add(1)
	cn.scheduleNudge(min(2*after, maxNudgePause))
}

// sawReply notes the first valid reply of the connection.
func (cn *conn) sawReply() {
	if !cn.replied.Load() {
		cn.replied.Store(true)
	}
}

// release takes apart whatever dial and the life of the connection made, in the reverse order. When it returns no memory
// of any call can be reached by the server. Not from a completion handler.
func (t *Transport) release(cn *conn) {
	cn.fail(ErrClosed)
	cn.nudgeMu.Lock()
	if cn.nudgeTimer != nil {
		cn.nudgeTimer.Stop()
	}
	cn.nudgeMu.Unlock()
	if cn.qp != nil {
		cn.qp.Drain()
		q := cn.qp.Stats()
		t.stats.accessErrs.Add(q.RemoteAccessErrors)
		t.stats.posts.Add(q.PostedChains)
		t.stats.completions.Add(q.SendCompletions)
	}
	if cn.id != nil {
		cn.id.Close()
	}
	cn.padList.Reset()
	if cn.pool != nil {
		if n := cn.pool.Destroy(); n > 0 {
			t.log.Error("memory regions could not be destroyed", "orphaned", n, "server", t.cfg.Addr)
		}
	}
	for _, mr := range []verbs.MR{cn.sendMR, cn.recvMR} {
		if mr != nil {
			mr.Dereg()
		}
	}
	if cn.cq != nil {
		cn.cq.Close()
	}
	if cn.pd != nil {
		if err := cn.pd.Dealloc(); err != nil {
			t.log.Error("protection domain could not be released", "error", err, "server", t.cfg.Addr)
		}
	}
	if cn.recvArena != nil {
		verbs.FreeBuffer(cn.recvArena)
	}
	if cn.padMem != nil {
		verbs.FreeBuffer(cn.padMem)
	}
}
