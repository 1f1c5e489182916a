package softiwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// A connectLimiter allows one connect to a remote address at a time. A stock siw listener fails
// permanently on a burst of connects.
type connectLimiter struct {
	mu    sync.Mutex
	addrs map[netip.AddrPort]*addrLimit // guarded by mu
}

type addrLimit struct {
	turn base.Turn
	refs int // running and waiting connects; guarded by connectLimiter.mu
}

// connects is shared by all providers of the process, because they may connect to the same peer.
var connects = connectLimiter{addrs: make(map[netip.AddrPort]*addrLimit)}

// acquire waits until no other connect to a is running, and returns the function that ends this
// one.
func (t *connectLimiter) acquire(ctx context.Context, closed <-chan struct{}, a netip.AddrPort) (release func(),
	err error) {
	t.mu.Lock()
	g := t.addrs[a]
	if g == nil {
		g = &addrLimit{}
		t.addrs[a] = g
	}
	g.refs++
	t.mu.Unlock()
	drop := func() {
		t.mu.Lock()
		if g.refs--; g.refs == 0 {
			delete(t.addrs, a)
		}
		t.mu.Unlock()
	}
	if err = g.turn.Acquire(ctx, closed, nil); err != nil {
		drop()
		return nil, err
	}
	return func() { g.turn.Release(); drop() }, nil
}

// settleInterval is how often Settle checks.
const settleInterval = 5 * time.Millisecond

// Settle returns when no connect of this process is in progress, or ctx ends. A program that has
// closed everything calls Settle before it exits. A canceled connect still waits up to
// abandonTimeout for the peer's answer, and an exit would close the TCP connection at once.
func Settle(ctx context.Context) {
	for connects.busy() && ctx.Err() == nil {
		time.Sleep(settleInterval)
	}
}

func (t *connectLimiter) busy() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.addrs) > 0
}

// Resolve finds the local address that reaches raddr. Resolve sends no packet.
func (p *provider) Resolve(ctx context.Context, raddr netip.AddrPort) (verbs.ActiveID, error) {
	raddr = netip.AddrPortFrom(raddr.Addr().Unmap(), raddr.Port())
	fail := func(kind verbs.ConnErrorKind, err error) error {
		return &verbs.ConnError{Kind: kind, Phase: phaseResolve, Addr: raddr.String(), Err: err}
	}
	if err := ctx.Err(); err != nil {
		return nil, fail(ioKind(err), err)
	}
	if !raddr.IsValid() || raddr.Port() == 0 {
		return nil, fail(verbs.ConnLocal, errors.New("not an address with a port"))
	}
	// connect(2) on a datagram socket only looks up the route.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(raddr))
	if err != nil {
		return nil, fail(verbs.ConnUnreachable, err)
	}
	local := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
	c.Close()
	a := &activeID{connID: newConnID(p.dev, netip.AddrPortFrom(local, 0), raddr)}
	a.hold()
	return a, nil
}

// An activeID is the connecting side's ConnID.
type activeID struct {
	connID
	tried atomic.Bool
}

// Close ends the connection and releases the ConnID.
func (a *activeID) Close() error {
	a.close(nil)
	return nil
}

// An attempt is one connection set-up. An attempt runs on a separate goroutine, because a canceled
// attempt must not close a new TCP connection at once (see abandonTimeout).
type attempt struct {
	id          *activeID
	param       verbs.ConnParam
	qp          *qp
	own         depths
	releaseTurn func()

	connected atomic.Bool   // the TCP connection is established
	canceled  chan struct{} // closed when the caller no longer waits
	done      chan error    // capacity 1
}

// Connect performs the TCP and MPA handshakes.
func (a *activeID) Connect(ctx context.Context, param verbs.ConnParam) error {
	if a.tried.Swap(true) {
		return a.Fail(verbs.ConnLocal, phaseStart, base.ErrReused)
	}
	q := a.QP()
	switch {
	case q == nil:
		return a.Fail(verbs.ConnLocal, phaseStart, base.ErrNoQP)
	case len(param.PrivateData) > maxULPData:
		return a.Fail(verbs.ConnLocal, phaseSendRequest, errDataTooLong)
	}
	release, err := connects.acquire(ctx, a.Done(), a.RemoteAddr())
	if err != nil {
		return a.Fail(ioKind(err), phaseQueue, err)
	}
	t := &attempt{
		id: a, param: param, qp: q, releaseTurn: release,
		own: depths{ird: roundDepth(int(param.ResponderResources), maxReadDepth),
			ord: min(int(param.InitiatorDepth), maxReadDepth)},
		canceled: make(chan struct{}), done: make(chan error, 1),
	}
	a.hold()
	go t.run()
	select {
	case err := <-t.done:
		return err
	case <-ctx.Done():
		err = ctx.Err()
	case <-a.Done():
		err = base.ErrClosed
	}
	close(t.canceled)
	if t.connected.Load() {
		return t.replyError(err)
	}
	return a.Fail(ioKind(err), phaseConnect, err)
}

func (t *attempt) abandoned() bool {
	select {
	case <-t.canceled:
		return true
	default:
		return false
	}
}

func (t *attempt) run() {
	defer t.id.release()
	defer t.releaseTurn()
	conn, err := t.dial()
	if err != nil {
		t.done <- err
		return
	}
	s, err := t.handshake(conn)
	if err != nil || t.abandoned() {
		conn.Close()
		t.done <- err
		return
	}
	if !t.qp.start(s) {
		conn.Close()
		t.done <- t.id.Fail(verbs.ConnLocal, phaseStart, base.ErrClosed)
		return
	}
	t.done <- nil
	// If the caller was canceled at this moment it has not taken the result, but it still owns the
	// ConnID and closes it.
}

// handshake exchanges the MPA frames as the initiator (RFC 6581).
func (t *attempt) handshake(conn *net.TCPConn) (stream, error) {
	id, cfg := t.id, &t.id.dev.cfg
	req := mpaFrame{
		crc: cfg.CRC, enhanced: true, rev: mpaRev2,
		ird: uint16(t.own.ird), ord: uint16(t.own.ord), data: t.param.PrivateData,
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return stream{}, id.Fail(verbs.ConnLocal, phaseSendRequest, err)
	}
	conn.SetDeadline(time.Now().Add(cfg.ReplyTimeout))
	if err := setConnTCPRepair(raw, false); err != nil {
		return stream{}, id.Fail(verbs.ConnLocal, phaseSendRequest, err)
	}
	// Kernels before 6.6 drop a request that TCP delivers in parts, so send the request with one
	// write.
	if _, err := conn.Write(req.append(nil)); err != nil {
		return stream{}, id.Fail(ioKind(err), phaseSendRequest, err)
	}
	setConnTCPRepair(raw, true)
	got := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-got:
		case <-t.canceled:
			conn.SetReadDeadline(time.Now().Add(abandonTimeout))
		}
	}()
	var rep mpaFrame
	if err = awaitReadable(raw); err == nil {
		setConnTCPRepair(raw, false)
		rep, err = readMPAFrame(conn, true)
	}
	close(got)
	<-watched
	if err != nil {
		return stream{}, t.replyError(err)
	}
	conn.SetDeadline(time.Time{})
	peer := verbs.ConnParam{PrivateData: rep.data, ResponderResources: rep.ird, InitiatorDepth: rep.ord}
	if rep.reject {
		e := id.Fail(verbs.ConnRejected, phaseReadReply, errors.New("the peer rejected the connection"))
		e.PrivateData = rep.data
		id.SetPeer(peer)
		return stream{}, e
	}
	s, err := t.adopt(conn, &rep)
	if err != nil {
		return stream{}, err
	}
	id.SetPeer(peer)
	return s, nil
}

// checkPort is the hint of errors that a server of another protocol may cause.
const checkPort = "check that the port is an RDMA port"

// replyError returns the error of an attempt that received no valid Reply.
func (t *attempt) replyError(err error) error {
	kind := ioKind(err)
	switch {
	case kind == verbs.ConnTimeout:
		err = fmt.Errorf("the peer accepted the TCP connection but did not answer: %w; %s", err, checkPort)
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = errors.New("the peer closed the connection in the middle of its MPA reply")
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		err = fmt.Errorf("the peer closed the connection without an MPA reply: %w; %s", err, checkPort)
	case errors.Is(err, errMPAKey):
		err = fmt.Errorf("the peer does not speak MPA: %w; %s", err, checkPort)
	}
	return t.id.Fail(kind, phaseReadReply, err)
}

// adopt checks an accepting Reply and returns the stream with the negotiated parameters.
func (t *attempt) adopt(conn *net.TCPConn, rep *mpaFrame) (stream, error) {
	id := t.id
	switch {
	case !rep.enhanced:
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			fmt.Errorf("MPA revision %d reply without enhanced connection data to an enhanced request", rep.rev))
	case rep.markers:
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			errors.New("the peer requires MPA markers, which are not supported"))
	}
	s := stream{conn: conn, crc: rep.crc || id.dev.cfg.CRC, active: true}
	var ok bool
	if s.depths, ok = adoptDepths(rep, t.own, maxReadDepth); !ok {
		sendTerminate(conn, termInsufficientIRD, s.crc)
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			fmt.Errorf("the peer requires %d outstanding RDMA Reads, at most %d are supported", rep.ord, maxReadDepth))
	}
	return s, nil
}

// sendTerminate sends a Terminate on a stream without a QP.
func sendTerminate(conn *net.TCPConn, code termCode, crc bool) {
	var b batch
	if b.init(conn) != nil {
		return
	}
	b.crc = crc
	var p [fpduLenSize + maxTermULPDU]byte
	n := (&terminate{code: code}).encode(p[:])
	copy(b.header(n), p[:n])
	b.closeHeader()
	b.trailer(n - fpduLenSize)
	conn.SetWriteDeadline(time.Now().Add(abandonTimeout))
	b.send()
	conn.CloseWrite()
}
