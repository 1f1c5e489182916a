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

// A turnstile lets one connect to a remote address through at a time. A stock
// siw listener loses itself in a burst of them.
type turnstile struct {
	mu    sync.Mutex
	gates map[netip.AddrPort]*gate // guarded by mu
}

type gate struct {
	free chan struct{} // holds a token when nobody is inside
	refs int           // inside or waiting; guarded by turnstile.mu
}

// connects is shared by all providers of the process: the peer does not care which of them knocks.
var connects = turnstile{gates: make(map[netip.AddrPort]*gate)}

// enter waits for the turn to connect to a, and returns the function that ends it.
func (t *turnstile) enter(ctx context.Context, closed <-chan struct{}, a netip.AddrPort) (leave func(), err error) {
	t.mu.Lock()
	g := t.gates[a]
	if g == nil {
		g = &gate{free: make(chan struct{}, 1)}
		g.free <- struct{}{}
		t.gates[a] = g
	}
	g.refs++
	t.mu.Unlock()
	drop := func() {
		t.mu.Lock()
		if g.refs--; g.refs == 0 {
			delete(t.gates, a)
		}
		t.mu.Unlock()
	}
	if err = ctx.Err(); err != nil { // not even when the turn is free
		drop()
		return nil, err
	}
	select {
	case <-closed:
		drop()
		return nil, base.ErrClosed
	default:
	}
	select {
	case <-g.free:
		return func() { g.free <- struct{}{}; drop() }, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-closed:
		err = base.ErrClosed
	}
	drop()
	return nil, err
}

// settlePause is how often Settle looks.
const settlePause = 5 * time.Millisecond

// Settle returns when no connect of this process is under way, or ctx ends. A program that has
// closed everything calls it before it exits: a connect that was given up still waits a moment for
// the peer's answer (see abandonWait), and the kernel would drop its TCP connection at once.
func Settle(ctx context.Context) {
	for connects.busy() && ctx.Err() == nil {
		time.Sleep(settlePause)
	}
}

func (t *turnstile) busy() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.gates) > 0
}

// Resolve finds the local address that reaches raddr. No packet is sent.
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
	// Connecting a datagram socket looks the route up and does nothing else.
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

// An attempt is one connection set-up. It runs on a goroutine of its own, because a caller who
// gives up must not make it drop a fresh TCP connection at once (see abandonWait).
type attempt struct {
	id    *activeID
	param verbs.ConnParam
	qp    *qp
	own   depths
	leave func()

	reached atomic.Bool   // the peer took the TCP connection
	givenUp chan struct{} // closed when nobody wants the connection any more
	done    chan error    // capacity 1
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
	leave, err := connects.enter(ctx, a.Done(), a.RemoteAddr())
	if err != nil {
		return a.Fail(ioKind(err), phaseQueue, err)
	}
	t := &attempt{
		id: a, param: param, qp: q, leave: leave,
		own: depths{ird: roundDepth(int(param.ResponderResources), maxReadDepth),
			ord: min(int(param.InitiatorDepth), maxReadDepth)},
		givenUp: make(chan struct{}), done: make(chan error, 1),
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
	close(t.givenUp)
	if t.reached.Load() {
		return t.replyError(err)
	}
	return a.Fail(ioKind(err), phaseConnect, err)
}

func (t *attempt) abandoned() bool {
	select {
	case <-t.givenUp:
		return true
	default:
		return false
	}
}

func (t *attempt) run() {
	defer t.id.release()
	defer t.leave()
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
	// A caller who gave up at this very moment has not taken the result, but still owns the ConnID
	// and closes it.
}

// handshake exchanges the MPA frames, as the initiator of RFC 6581.
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
	// One write: kernels before 6.6 give up on a request that TCP delivers in parts.
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
		case <-t.givenUp:
			conn.SetReadDeadline(time.Now().Add(abandonWait))
		}
	}()
	var rep mpaFrame
	if err = awaitOctets(raw); err == nil {
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

// replyError says what was wrong instead of a Reply.
func (t *attempt) replyError(err error) error {
	kind := ioKind(err)
	switch {
	case kind == verbs.ConnTimeout:
		err = fmt.Errorf("the peer took the connection and did not answer: is it an RDMA port? %w", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = errors.New("the peer closed the connection in the middle of its MPA reply")
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		err = fmt.Errorf("the peer closed the connection without an MPA reply (%w): is it an RDMA port?", err)
	case errors.Is(err, errMPAKey):
		err = fmt.Errorf("the peer does not speak MPA: is it an RDMA port? %w", err)
	}
	return t.id.Fail(kind, phaseReadReply, err)
}

// adopt settles the parameters of an accepting Reply.
func (t *attempt) adopt(conn *net.TCPConn, rep *mpaFrame) (stream, error) {
	id := t.id
	switch {
	case !rep.enhanced:
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			fmt.Errorf("MPA revision %d reply without enhanced connection data to an enhanced request", rep.rev))
	case rep.markers:
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			errors.New("the peer demands MPA markers, which are not supported"))
	}
	s := stream{conn: conn, crc: rep.crc || id.dev.cfg.CRC, active: true}
	var ok bool
	if s.depths, ok = adoptDepths(rep, t.own, maxReadDepth); !ok {
		sendTerminate(conn, termInsufficientIRD, s.crc)
		return stream{}, id.Fail(verbs.ConnProtocol, phaseCheckReply,
			fmt.Errorf("the peer wants to have %d RDMA Reads outstanding, %d are possible", rep.ord, maxReadDepth))
	}
	return s, nil
}

// sendTerminate sends a Terminate on a stream that has no QP yet.
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
	conn.SetWriteDeadline(time.Now().Add(abandonWait))
	b.send()
	conn.CloseWrite()
}
