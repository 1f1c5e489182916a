package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// maxPending limits the connections between accept(2) and Accept. A further connection replaces one
// that has not sent its MPA Request.
const maxPending = 64

// acceptRetryDelay is the pause after a failed accept, for example without free descriptors.
const acceptRetryDelay = 50 * time.Millisecond

// A listener accepts TCP connections and reads their MPA Requests, each on one goroutine with a
// timeout.
type listener struct {
	dev    *device
	tcp    *net.TCPListener
	addr   netip.AddrPort
	ready  chan *connRequest // capacity maxPending: sending never blocks
	slots  chan struct{}     // one token for each connection that Accept has not returned
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup // accept loop and handshakes

	handshakes struct {
		sync.Mutex
		conns map[*net.TCPConn]time.Time // start of each handshake
	}
}

// Listen accepts connections on laddr.
func (p *provider) Listen(ctx context.Context, laddr netip.AddrPort) (verbs.Listener, error) {
	lc := net.ListenConfig{Control: p.dev.tuneListener}
	lc.SetMultipathTCP(false) // this package uses socket options of plain TCP
	tl, err := lc.Listen(ctx, "tcp", laddr.String())
	if err != nil {
		return nil, fmt.Errorf("softiwarp: listen for RDMA connections on %s: %w", laddr, err)
	}
	l := &listener{
		dev: p.dev, tcp: tl.(*net.TCPListener), addr: addrPort(tl.Addr()),
		ready: make(chan *connRequest, maxPending), slots: make(chan struct{}, maxPending),
		closed: make(chan struct{}),
	}
	l.handshakes.conns = make(map[*net.TCPConn]time.Time)
	selfcheck.Track(selfcheck.Listener, 1)
	l.wg.Add(1)
	go l.run()
	return l, nil
}

// Addr is the address listened on.
func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) run() {
	defer l.wg.Done()
	for {
		c, err := l.tcp.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case <-l.closed:
				return
			case <-time.After(acceptRetryDelay):
			}
			continue
		}
		if !l.takeSlot() {
			l.dev.cfg.Logger.Debug("connection refused: too many connections are pending", "peer", c.RemoteAddr())
			c.Close()
			continue
		}
		c.SetDeadline(time.Now().Add(l.dev.cfg.RequestTimeout))
		if !l.enroll(c) {
			c.Close()
			return
		}
		l.wg.Add(1)
		go l.handshake(c)
	}
}

// takeSlot acquires a slot for one more connection. When all slots are in use, takeSlot closes one
// connection that has not sent its MPA Request: the oldest one of the address that has the most of
// them. So clients that send nothing cannot block other clients.
func (l *listener) takeSlot() bool {
	select {
	case l.slots <- struct{}{}:
		return true
	default:
	}
	if !l.closeSilent() {
		return false
	}
	select {
	case l.slots <- struct{}{}:
		return true
	case <-l.closed:
	case <-time.After(acceptRetryDelay):
	}
	return false
}

// closeSilent ends one handshake for takeSlot. It returns false if no handshake is in progress.
func (l *listener) closeSilent() bool {
	l.handshakes.Lock()
	defer l.handshakes.Unlock()
	count := make(map[netip.Addr]int)
	for c := range l.handshakes.conns {
		count[addrPort(c.RemoteAddr()).Addr()]++
	}
	var oldest *net.TCPConn
	most := 0
	for c, began := range l.handshakes.conns {
		n := count[addrPort(c.RemoteAddr()).Addr()]
		if n > most || n == most && began.Before(l.handshakes.conns[oldest]) {
			oldest, most = c, n
		}
	}
	if oldest == nil {
		return false
	}
	oldest.SetDeadline(time.Unix(1, 0)) // the handshake closes it
	delete(l.handshakes.conns, oldest)
	return true
}

// enroll registers c for Close. enroll returns false when the listener is closed.
func (l *listener) enroll(c *net.TCPConn) bool {
	l.handshakes.Lock()
	defer l.handshakes.Unlock()
	select {
	case <-l.closed:
		return false
	default:
	}
	l.handshakes.conns[c] = time.Now()
	return true
}

// handshake reads the MPA Request. handshake closes the connection without an answer when the
// Request is invalid (RFC 5044 §7.1.2).
func (l *listener) handshake(c *net.TCPConn) {
	defer l.wg.Done()
	req, err := readMPAFrame(c, false)
	if err == nil && req.markers {
		// This package does not send markers; siw rejects the request in the same way.
		err = errors.New("the peer requires MPA markers, which are not supported")
		rep := replyTo(&req)
		rep.reject = true
		c.Write(rep.append(nil))
	}
	l.handshakes.Lock()
	delete(l.handshakes.conns, c)
	l.handshakes.Unlock()
	if err != nil {
		l.dev.cfg.Logger.Debug("connection refused in the MPA handshake", "peer", c.RemoteAddr(), "error", err)
		c.Close()
		<-l.slots
		return
	}
	c.SetDeadline(time.Time{})
	r := &connRequest{connID: newConnID(l.dev, addrPort(c.LocalAddr()), addrPort(c.RemoteAddr())), conn: c, req: req}
	r.hold()
	r.SetPeer(verbs.ConnParam{PrivateData: req.data, ResponderResources: req.ird, InitiatorDepth: req.ord})
	l.ready <- r
}

// replyTo returns a Reply in the form of the Request.
func replyTo(req *mpaFrame) mpaFrame {
	return mpaFrame{reply: true, rev: req.rev, enhanced: req.enhanced, crc: req.crc}
}

// Accept waits for the next connection request.
func (l *listener) Accept(ctx context.Context) (verbs.ConnRequest, error) {
	select {
	case <-l.closed:
		return nil, net.ErrClosed
	default:
	}
	select {
	case r := <-l.ready:
		<-l.slots
		return r, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close stops listening and closes the connections that Accept has not returned.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.handshakes.Lock()
		close(l.closed)
		for c := range l.handshakes.conns {
			c.SetDeadline(time.Unix(1, 0)) // the handshake closes it
		}
		l.handshakes.Unlock()
		l.tcp.Close()
		l.wg.Wait()
		for {
			select {
			case r := <-l.ready:
				<-l.slots
				r.Close()
				continue
			default:
			}
			break
		}
		selfcheck.Track(selfcheck.Listener, -1)
	})
	return nil
}

// A connRequest is the accepting side's ConnID.
type connRequest struct {
	connID
	conn     *net.TCPConn
	req      mpaFrame
	answered atomic.Bool
}

// Accept sends the MPA Reply and starts the queue pair.
func (r *connRequest) Accept(ctx context.Context, param verbs.ConnParam) error {
	q := r.QP()
	switch {
	case q == nil:
		return r.Fail(verbs.ConnLocal, phaseStart, base.ErrNoQP)
	case len(param.PrivateData) > maxULPData:
		return r.Fail(verbs.ConnLocal, phaseSendReply, errDataTooLong)
	case r.answered.Swap(true):
		return r.Fail(verbs.ConnLocal, phaseSendReply, base.ErrReused)
	}
	rep := replyTo(&r.req)
	rep.crc = r.req.crc || r.dev.cfg.CRC
	rep.data = param.PrivateData
	s := stream{conn: r.conn, crc: rep.crc}
	s.depths, rep.ird, rep.ord = answerDepths(&r.req,
		depths{int(param.ResponderResources), int(param.InitiatorDepth)}, maxReadDepth)
	if !r.req.enhanced { // depths are not exchanged; the ULPs know them (RFC 5044)
		s.depths = depths{roundDepth(int(param.ResponderResources), maxReadDepth),
			min(int(param.InitiatorDepth), maxReadDepth)}
	}
	s.rtr = r.chooseRTR(&rep, &s.depths)
	if err := r.sendReply(ctx, &rep); err != nil {
		return err
	}
	if !q.start(s) {
		return r.Fail(verbs.ConnLocal, phaseStart, base.ErrClosed)
	}
	return nil
}

// chooseRTR answers a peer-to-peer request (RFC 6581 §9.2). chooseRTR prefers the zero-length
// Write, which uses no resources, and offers it when the peer names no other option. chooseRTR
// reports whether it chose the zero-length Send.
func (r *connRequest) chooseRTR(rep *mpaFrame, d *depths) bool {
	if !r.req.peer {
		return false
	}
	rep.peer = true
	switch {
	case r.req.rtrWrite:
		rep.rtrWrite = true
	case r.req.rtrRead:
		rep.rtrRead = true
		if d.ird == 0 { // the RTR Read itself needs a depth of 1 (RFC 6581 §9.1)
			d.ird = 1
			if rep.ird != depthByULP {
				rep.ird = 1
			}
		}
	case r.req.rtrSend:
		rep.rtrSend = true
		return true
	default:
		rep.rtrWrite = true
	}
	return false
}

// sendReply writes the frame with one system call. The timeout and ctx bound it.
func (r *connRequest) sendReply(ctx context.Context, rep *mpaFrame) error {
	deadline := time.Now().Add(r.dev.cfg.ReplyTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := ctx.Err(); err != nil {
		return r.Fail(ioKind(err), phaseSendReply, err)
	}
	r.conn.SetWriteDeadline(deadline)
	if _, err := r.conn.Write(rep.append(nil)); err != nil {
		return r.Fail(ioKind(err), phaseSendReply, err)
	}
	r.conn.SetWriteDeadline(time.Time{})
	return nil
}

// Reject sends a rejecting MPA Reply and closes the ConnID.
func (r *connRequest) Reject(privateData []byte) error {
	defer r.Close()
	if len(privateData) > maxULPData {
		return r.Fail(verbs.ConnLocal, phaseSendReply, errDataTooLong)
	}
	if r.answered.Swap(true) {
		return r.Fail(verbs.ConnLocal, phaseSendReply, base.ErrReused)
	}
	rep := replyTo(&r.req)
	rep.reject, rep.data = true, privateData
	if err := r.sendReply(context.Background(), &rep); err != nil {
		return err
	}
	// The initiator closes the connection (RFC 5044 §7.1.2). Wait for that, so that a reset does
	// not overtake the reply.
	r.conn.CloseWrite()
	r.conn.SetReadDeadline(time.Now().Add(r.dev.cfg.Linger))
	var b [mpaHdrSize]byte
	for {
		if _, err := r.conn.Read(b[:]); err != nil {
			return nil
		}
	}
}

// Close ends the connection and releases the ConnID.
func (r *connRequest) Close() error {
	r.close(func(q *qp) {
		if q == nil || !q.started() {
			r.conn.Close()
		}
	})
	return nil
}
