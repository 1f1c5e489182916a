package nfsserve

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
)

// Limits of the TCP port. One client address gets at most half of each of the first three.
const (
	maxTCPConns = 512
	// calls in progress: their replies are the memory that small calls can ask for
	callsAtOnce = 256
	largeCalls  = 128 // calls of more than smallRecord bytes in memory

	callsPerConn = 32
	smallRecord  = 64 << 10
	acceptPause  = 50 * time.Millisecond
	readBuffer   = 32 << 10
)

// Deadlines of a connection. The server closes a connection that exceeds one of them.
const (
	firstCallTimeout = 15 * time.Second // from connect to the end of the first call
	recordTimeout    = 30 * time.Second // from the first byte of a call to its last one
	idleTimeout      = 12 * time.Minute // between two calls, as on the RDMA port
	writeTimeout     = 30 * time.Second // for one reply, or one call to a backend
	memoryTimeout    = time.Minute      // wait of a large call for memory
	// A large call that is incomplete after this time can lose its memory to another call.
	progressTimeout = 3 * time.Second
	finishTimeout   = time.Second // wait for the client to close the connection after the last reply

	clockTick = time.Second // the deadlines are checked so often
)

// A tcpHandler executes calls, as nfsd.Server does.
type tcpHandler interface {
	ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error)
	// TryServe executes a call that does not have to wait; ok is false for the others.
	TryServe(peer netip.AddrPort, call, reply []byte) (out []byte, ok bool)
}

// A tcpServer answers RPC over TCP (RFC 5531 §11). Calls that need no disk run in the goroutine
// that reads the connection; the others run in parallel and are answered as they finish.
type tcpServer struct {
	handler tcpHandler
	log     hclog.Logger
	room    chan struct{} // one token for each call in progress
	large   chan struct{} // one token for each large call in memory
	clock   atomic.Int64  // in clockTicks, from 1

	clients struct {
		sync.Mutex
		all  int
		addr map[netip.Addr]*tcpClient
	}
}

// A tcpClient counts the resources that one client address uses.
type tcpClient struct {
	conns       map[*tcpConn]struct{} // guarded by tcpServer.clients
	room, large chan struct{}
}

// Phases of a connection in the order in which a full server closes connections.
const (
	phaseSilent  = iota // no call yet
	phasePart           // part of a call has arrived
	phaseWaiting        // a large call waits for memory
	phaseIdle
	phaseBusy // a call waits for other calls; never closed for a new connection
)

// A tcpConn is one connection. The atomic fields are for the goroutine that checks deadlines.
type tcpConn struct {
	*tcpServer
	conn   net.Conn
	peer   netip.AddrPort
	client *tcpClient

	phase   atomic.Int32
	since   atomic.Int64 // clock when the phase began
	running atomic.Int32 // calls in other goroutines
	filling atomic.Bool  // holds memory for a large call whose data has not arrived completely
	writing atomic.Int64 // clock when the present write began, or 0

	write sync.Mutex
}

func newTCPServer(h tcpHandler, log hclog.Logger) *tcpServer {
	s := &tcpServer{handler: h, log: log, room: make(chan struct{}, callsAtOnce),
		large: make(chan struct{}, largeCalls)}
	s.clients.addr = make(map[netip.Addr]*tcpClient)
	s.clock.Store(1)
	return s
}

// messages holds buffers of calls and replies.
var messages = sync.Pool{New: func() any { return new([]byte) }}

// run serves l until stop ends, and returns when every connection has ended. After the end of stop,
// each connection ends when it has sent the replies of its running calls. After the end of ctx, all
// connections end at once.
func (s *tcpServer) run(stop, ctx context.Context, l net.Listener) {
	var conns sync.WaitGroup
	var watch sync.WaitGroup
	watched, endWatch := context.WithCancel(ctx)
	watch.Go(func() { s.watch(watched) })
	defer watch.Wait()
	defer endWatch()
	defer conns.Wait()
	defer context.AfterFunc(stop, func() { l.Close() })()
	for {
		c, err := l.Accept()
		if err != nil {
			if stop.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.Warn("accept failed", "listener", l.Addr(), "error", err)
			time.Sleep(acceptPause)
			continue
		}
		t := s.admit(c)
		if t == nil {
			c.Close()
			continue
		}
		conns.Go(func() {
			defer s.leave(t)
			t.serve(stop, ctx)
		})
	}
}

// admit counts a connection. Where there are too many, it closes the one that seems least useful
// instead: connections that send nothing must not keep others out.
func (s *tcpServer) admit(c net.Conn) *tcpConn {
	ap := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	t := &tcpConn{tcpServer: s, conn: c, peer: ap}
	s.clients.Lock()
	defer s.clients.Unlock()
	own := s.clients.addr[ap.Addr()]
	if own == nil {
		own = &tcpClient{conns: make(map[*tcpConn]struct{}), room: make(chan struct{}, callsAtOnce/2),
			large: make(chan struct{}, largeCalls/2)}
	}
	var victim *tcpConn
	switch {
	case len(own.conns) >= maxTCPConns/2:
		victim = leastUseful(nil, own)
	case s.clients.all >= maxTCPConns:
		for _, client := range s.clients.addr {
			victim = leastUseful(victim, client)
		}
	}
	if (len(own.conns) >= maxTCPConns/2 || s.clients.all >= maxTCPConns) && victim == nil {
		s.log.Warn("connection refused: too many", "peer", ap, "limit", maxTCPConns, "limit_of_a_client", maxTCPConns/2)
		return nil
	}
	if victim != nil {
		s.log.Debug("connection closed to make room", "peer", victim.peer)
		s.forget(victim)
		victim.conn.Close()
	}
	s.clients.addr[ap.Addr()] = own
	own.conns[t] = struct{}{}
	s.clients.all++
	t.client = own
	t.enter(phaseSilent)
	return t
}

// leastUseful returns the worse of best and the client's connections: by phase, then by age. One
// that executes calls is never closed.
func leastUseful(best *tcpConn, client *tcpClient) *tcpConn {
	for t := range client.conns {
		if t.running.Load() > 0 || t.phase.Load() == phaseBusy || t.writing.Load() != 0 {
			continue
		}
		if best == nil || t.phase.Load() < best.phase.Load() ||
			t.phase.Load() == best.phase.Load() && t.since.Load() < best.since.Load() {
			best = t
		}
	}
	return best
}

func (s *tcpServer) leave(t *tcpConn) {
	s.clients.Lock()
	defer s.clients.Unlock()
	s.forget(t)
}

// forget removes a connection from the counts, once. clients is locked.
func (s *tcpServer) forget(t *tcpConn) {
	if _, ok := t.client.conns[t]; !ok {
		return
	}
	delete(t.client.conns, t)
	s.clients.all--
	if a := t.peer.Addr(); len(t.client.conns) == 0 && s.clients.addr[a] == t.client {
		delete(s.clients.addr, a)
	}
}

// watch advances the clock and closes connections whose deadline has passed. One ticker serves all
// of them, so that a call sets no timer.
func (s *tcpServer) watch(ctx context.Context) {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := s.clock.Add(1)
		s.clients.Lock()
		for _, client := range s.clients.addr {
			for t := range client.conns {
				if t.late(now) {
					t.conn.Close()
				}
			}
		}
		s.clients.Unlock()
	}
}

// late reports whether a deadline of the connection has passed.
func (t *tcpConn) late(now int64) bool {
	over := func(since int64, limit time.Duration) bool { return time.Duration(now-since)*clockTick > limit }
	if w := t.writing.Load(); w != 0 && over(w, writeTimeout) {
		return true
	}
	if t.running.Load() > 0 {
		return false
	}
	switch since := t.since.Load(); t.phase.Load() {
	case phaseSilent:
		return over(since, firstCallTimeout)
	case phasePart:
		return over(since, recordTimeout)
	case phaseWaiting:
		return over(since, memoryTimeout)
	case phaseIdle:
		return over(since, idleTimeout)
	}
	return false
}

func (t *tcpConn) enter(phase int32) {
	t.since.Store(t.clock.Load())
	t.phase.Store(phase)
}

// serve serves the connection until its first error, or until stop ends and the running calls have
// their replies, or until ctx ends.
func (t *tcpConn) serve(stop, ctx context.Context) {
	var calls sync.WaitGroup
	defer calls.Wait()
	defer t.conn.Close()
	defer context.AfterFunc(ctx, func() { t.conn.Close() })()
	interrupted := make(chan struct{})
	cancelInterrupt := context.AfterFunc(stop, func() {
		_ = t.conn.SetReadDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	defer func() {
		if !cancelInterrupt() {
			<-interrupted // before finish sets its deadline
		}
		if stop.Err() != nil {
			calls.Wait()
			t.finish()
		}
	}()
	slots := make(chan struct{}, callsPerConn)
	r := bufio.NewReaderSize(t.conn, readBuffer)
	for stop.Err() == nil {
		call, isLarge, err := t.next(stop, r)
		if err != nil || stop.Err() != nil {
			return
		}
		if !isLarge {
			ok, err := t.try(call)
			if err != nil {
				return
			}
			if ok {
				t.enter(phaseIdle)
				continue
			}
		}
		t.enter(phaseBusy)
		if !take(stop, slots) {
			return
		}
		if !take(stop, t.client.room) {
			return
		}
		if !take(stop, t.room) {
			<-t.client.room
			return
		}
		t.running.Add(1)
		calls.Go(func() {
			t.execute(ctx, call)
			if isLarge {
				<-t.large
				<-t.client.large
			}
			<-t.room
			<-t.client.room
			t.running.Add(-1)
			<-slots
		})
		t.enter(phaseIdle)
	}
}

// finish sends FIN and discards calls that the client still sends. Unread data would turn the end
// of the connection into a reset, which can overtake replies.
func (t *tcpConn) finish() {
	_ = t.conn.SetReadDeadline(time.Now().Add(finishTimeout))
	if c, ok := t.conn.(*net.TCPConn); ok && c.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c)
	}
}

// next reads one call. The phase tells how far it has come.
func (t *tcpConn) next(ctx context.Context, r *bufio.Reader) (call *[]byte, isLarge bool, err error) {
	if _, err := r.Peek(1); err != nil {
		return nil, false, err
	}
	t.enter(phasePart)
	mark, err := r.Peek(rpctcp.MarkSize)
	if err != nil {
		return nil, false, err
	}
	if isLarge = rpctcp.FragmentSize(mark) > smallRecord || !rpctcp.LastFragment(mark); isLarge {
		t.enter(phaseWaiting)
		if !take(ctx, t.client.large) {
			return nil, false, ctx.Err()
		}
		if !t.takeLarge(ctx) {
			<-t.client.large
			return nil, false, ctx.Err()
		}
		t.enter(phasePart)
		t.filling.Store(true)
	}
	call = messages.Get().(*[]byte)
	*call, err = rpctcp.ReadRecord(r, *call, maxRecord)
	t.filling.Store(false)
	if err != nil && isLarge {
		<-t.large
		<-t.client.large
	}
	return call, isLarge, err
}

// takeLarge takes memory for a large call. While none is free, takeLarge closes connections that
// hold memory and do not send the rest of their call, so that they cannot block other clients.
func (t *tcpConn) takeLarge(ctx context.Context) bool {
	retry := time.NewTicker(clockTick)
	defer retry.Stop()
	for {
		select {
		case t.large <- struct{}{}:
			return true
		default:
		}
		t.closeStalled()
		select {
		case t.large <- struct{}{}:
			return true
		case <-retry.C:
		case <-ctx.Done():
			return false
		}
	}
}

// closeStalled closes the oldest incomplete large call of the address that has the most of them.
func (s *tcpServer) closeStalled() {
	s.clients.Lock()
	defer s.clients.Unlock()
	var stalled *tcpConn
	most := 0
	for _, client := range s.clients.addr {
		var oldest *tcpConn
		n := 0
		for t := range client.conns {
			if !t.filling.Load() {
				continue
			}
			n++
			if oldest == nil || t.since.Load() < oldest.since.Load() {
				oldest = t
			}
		}
		if n > most {
			stalled, most = oldest, n
		}
	}
	if stalled == nil || time.Duration(s.clock.Load()-stalled.since.Load())*clockTick < progressTimeout {
		return
	}
	s.log.Debug("connection closed: incomplete large call", "peer", stalled.peer)
	stalled.conn.Close()
}

// try executes and answers a call that does not have to wait. For other calls ok is false. try
// returns the memory of the reply to the pool, so that an idle connection holds none.
func (t *tcpConn) try(call *[]byte) (ok bool, err error) {
	reply := messages.Get().(*[]byte)
	defer messages.Put(reply)
	out, ok := t.handler.TryServe(t.peer, *call, append((*reply)[:0], 0, 0, 0, 0))
	if !ok {
		return false, nil
	}
	*reply = out
	messages.Put(call)
	return true, t.send(out)
}

// take takes a token, unless ctx ends first.
func take(ctx context.Context, tokens chan struct{}) bool {
	select {
	case tokens <- struct{}{}:
		return true
	default:
	}
	select {
	case tokens <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// execute runs a call that may wait, and answers it.
func (t *tcpConn) execute(ctx context.Context, call *[]byte) {
	reply := messages.Get().(*[]byte)
	out, err := t.handler.ServeRPC(ctx, t.peer, *call, append((*reply)[:0], 0, 0, 0, 0))
	messages.Put(call)
	if err == nil {
		*reply = out
		err = t.send(out)
	}
	messages.Put(reply)
	if err != nil {
		t.conn.Close()
	}
}

// send writes a reply, which begins with room for its record mark.
func (t *tcpConn) send(out []byte) error {
	rpctcp.PutMark(out, len(out)-rpctcp.MarkSize)
	t.write.Lock()
	defer t.write.Unlock()
	t.writing.Store(t.clock.Load())
	_, err := t.conn.Write(out)
	t.writing.Store(0)
	return err
}
