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

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// Limits of the TCP port. One client address gets at most half of the connections. It gets at most
// half of the others, too, and only while it has no more than is left for other addresses.
const (
	maxTCPConns = 512
	callsAtOnce = 256       // calls that a handler executes
	tcpMemory   = 256 << 20 // bytes of large calls, and of replies from their calls to their last byte

	callsPerConn = 32
	acceptPause  = 50 * time.Millisecond
	readBuffer   = 32 << 10
)

// Deadlines of a connection. The server closes a connection that exceeds one of them.
const (
	firstCallTimeout = 15 * time.Second // from connect to the end of the first call
	recordTimeout    = 30 * time.Second // from the first byte of a call to its last one
	idleTimeout      = 12 * time.Minute // between two calls, as on the RDMA port
	writeTimeout     = 30 * time.Second // for one reply, or one call to a backend
	memoryTimeout    = time.Minute      // wait of a call for memory
	// A connection whose large call has not arrived, or whose reply has not left, after this time
	// can lose its memory to another call, and its place to another connection.
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
// that reads the connection; the others run in parallel and are answered as they finish. A call
// takes memory for its reply before it is executed, and gives it back when the reply is written. It
// takes a place only while it is executed.
type tcpServer struct {
	handler tcpHandler
	log     hclog.Logger
	places  *fair.Pool   // one for each call that is executed, of callsAtOnce
	memory  *fair.Pool   // in bytes, of tcpMemory
	clock   atomic.Int64 // in clockTicks, from 1

	clients struct {
		sync.Mutex
		all  int
		addr map[netip.Addr]*tcpClient
	}
}

// A tcpClient counts the resources that one client address uses. It exists as long as a connection
// of the address is served.
type tcpClient struct {
	conns  map[*tcpConn]struct{} // guarded by tcpServer.clients
	served int                   // connections, with those that are being closed; guarded likewise
	// Calls of MOUNT and of the port mapper have a share of their own, so that other calls of the
	// address do not delay them.
	nfs, mount tcpShare
}

// A tcpShare is what calls of one kind use.
type tcpShare struct{ places, memory fair.User }

// Phases of a connection in the order in which a full server closes connections.
const (
	phaseSilent  = iota // no call yet
	phasePart           // part of a call has arrived
	phaseWaiting        // a call waits for memory
	phaseStalled        // the client does not take a reply; see tcpConn.rank
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
	running atomic.Int32 // calls in other goroutines, until their replies are written
	filling atomic.Bool  // holds memory for a large call whose data has not arrived completely
	writing atomic.Int64 // clock when the present write began, or 0

	write sync.Mutex
}

func newTCPServer(h tcpHandler, log hclog.Logger) *tcpServer {
	s := &tcpServer{handler: h, log: log, places: fair.NewPool(callsAtOnce), memory: fair.NewPool(tcpMemory)}
	s.clients.addr = make(map[netip.Addr]*tcpClient)
	s.clock.Store(1)
	return s
}

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
		own = &tcpClient{conns: make(map[*tcpConn]struct{})}
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
	own.served++
	s.clients.all++
	t.client = own
	t.enter(phaseSilent)
	return t
}

// leastUseful returns the worse of best and the client's connections: by rank, then by age. One that
// is busy is never closed.
func leastUseful(best *tcpConn, client *tcpClient) *tcpConn {
	for t := range client.conns {
		rank := t.rank()
		if rank == phaseBusy {
			continue
		}
		if best == nil || rank < best.rank() || rank == best.rank() && t.since.Load() < best.since.Load() {
			best = t
		}
	}
	return best
}

// rank returns the phase of the connection with regard to its calls and replies.
func (t *tcpConn) rank() int32 {
	switch {
	case t.stalled():
		return phaseStalled
	case t.running.Load() > 0 || t.writing.Load() != 0:
		return phaseBusy
	}
	return t.phase.Load()
}

// stalled reports whether the client has not taken a reply for progressTimeout.
func (t *tcpConn) stalled() bool {
	w := t.writing.Load()
	return w != 0 && passed(w, t.clock.Load(), progressTimeout)
}

// passed reports whether more than limit has passed between two times of the clock.
func passed(since, now int64, limit time.Duration) bool {
	return time.Duration(now-since)*clockTick > limit
}

func (s *tcpServer) leave(t *tcpConn) {
	s.clients.Lock()
	defer s.clients.Unlock()
	s.forget(t)
	if t.client.served--; t.client.served == 0 {
		delete(s.clients.addr, t.peer.Addr())
	}
}

// forget removes a connection from the counts, once. clients is locked.
func (s *tcpServer) forget(t *tcpConn) {
	if _, ok := t.client.conns[t]; !ok {
		return
	}
	delete(t.client.conns, t)
	s.clients.all--
}

// watch advances the clock, and closes connections whose deadline has passed or whose memory others
// need. One ticker serves all of them, so that a call sets no timer.
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
		if s.memory.Waiting() {
			s.closeStalled(now)
		}
		s.clients.Unlock()
	}
}

// late reports whether a deadline of the connection has passed.
func (t *tcpConn) late(now int64) bool {
	over := func(since int64, limit time.Duration) bool { return passed(since, now, limit) }
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
		call, err := t.next(stop, r)
		if err != nil {
			return
		}
		done, err := t.begin(stop, &call)
		if err != nil {
			return
		}
		if !done {
			t.enter(phaseBusy)
			if !take(stop, slots) {
				t.end(&call)
				return
			}
			if t.places.Take(stop, &call.share.places, 1) != nil {
				t.end(&call)
				return
			}
			t.running.Add(1)
			started := call // the next call has no part in it
			calls.Go(func() {
				t.execute(ctx, &started)
				t.running.Add(-1)
				<-slots
			})
		}
		t.enter(phaseIdle)
	}
}

// begin takes memory for the reply of a call, and executes the call if it does not have to wait:
// then done is true and the call has ended. A small reply of such a call is not counted, because a
// connection has at most one. An error ends the call, too.
func (t *tcpConn) begin(ctx context.Context, c *tcpCall) (done bool, err error) {
	if large := c.memory > 0; large {
		return false, nil
	}
	if c.reply > smallReply {
		if err := t.takeMemory(ctx, c, c.reply); err != nil {
			return false, err
		}
	}
	if done, err = t.try(c); done {
		t.end(c)
		return true, err
	}
	if c.memory == 0 {
		err = t.takeMemory(ctx, c, c.reply)
	}
	return false, err
}

// takeMemory takes n bytes of memory for a call. An error ends the call.
func (t *tcpConn) takeMemory(ctx context.Context, c *tcpCall, n int) error {
	if !t.memory.TryTake(&c.share.memory, int64(n)) {
		t.enter(phaseWaiting)
		if err := t.memory.Take(ctx, &c.share.memory, int64(n)); err != nil {
			t.end(c)
			return err
		}
	}
	c.memory = int64(n)
	return nil
}

// keepMemory gives the memory of a call back that is more than n bytes.
func (t *tcpConn) keepMemory(c *tcpCall, n int) {
	if more := c.memory - int64(n); more > 0 {
		t.memory.Give(&c.share.memory, more)
		c.memory -= more
	}
}

// end returns what a call holds. It may be called twice.
func (t *tcpConn) end(c *tcpCall) {
	t.putCall(c)
	t.keepMemory(c, 0)
}

// putCall returns the buffer of a call, which has been executed.
func (t *tcpConn) putCall(c *tcpCall) {
	if c.message != nil {
		putMessage(c.message)
		c.message = nil
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

// next reads one call. The phase tells how far it has come. A large call takes memory for itself
// and for a small reply at once, so that it does not wait for memory while it holds some.
func (t *tcpConn) next(ctx context.Context, r *bufio.Reader) (c tcpCall, err error) {
	if _, err := r.Peek(1); err != nil {
		return c, err
	}
	t.enter(phasePart)
	mark, err := r.Peek(rpctcp.MarkSize)
	if err != nil {
		return c, err
	}
	c.share = &t.client.nfs
	size := rpctcp.FragmentSize(mark)
	if size > maxRecord || !rpctcp.LastFragment(mark) {
		size = maxRecord
	}
	if size > smallRecord {
		if err := t.takeMemory(ctx, &c, size+smallReply); err != nil {
			return c, err
		}
		t.enter(phasePart)
		t.filling.Store(true)
	}
	c.message = getMessage(size)
	*c.message, err = rpctcp.ReadRecord(r, *c.message, maxRecord)
	t.filling.Store(false)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		t.end(&c)
		return c, err
	}
	c.classify(t.client)
	return c, nil
}

// closeStalled closes, of the client that uses the most memory, the connection that has not made
// progress for the longest time. clients is locked.
func (s *tcpServer) closeStalled(now int64) {
	var stalled *tcpConn
	var most, oldest int64
	for _, client := range s.clients.addr {
		used := s.memory.Used(&client.nfs.memory) + s.memory.Used(&client.mount.memory)
		for t := range client.conns {
			since := t.writing.Load()
			if since == 0 && t.filling.Load() {
				since = t.since.Load()
			}
			if since == 0 || !passed(since, now, progressTimeout) {
				continue
			}
			if stalled == nil || used > most || used == most && since < oldest {
				stalled, most, oldest = t, used, since
			}
		}
	}
	if stalled != nil {
		s.log.Debug("connection closed: other calls need its memory", "peer", stalled.peer)
		stalled.conn.Close()
	}
}

// try executes and answers a call that does not have to wait. For other calls done is false. try
// returns the memory of the reply to the pool, so that an idle connection holds none.
func (t *tcpConn) try(c *tcpCall) (done bool, err error) {
	reply := getMessage(c.reply)
	defer putMessage(reply)
	out, done := t.handler.TryServe(t.peer, *c.message, append((*reply)[:0], 0, 0, 0, 0))
	if !done {
		return false, nil
	}
	*reply = out
	t.putCall(c)
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

// execute runs a call that may wait, and answers it. It gives the place of the call back before it
// writes the reply, and keeps memory for the reply only.
func (t *tcpConn) execute(ctx context.Context, c *tcpCall) {
	defer t.end(c)
	reply := getMessage(c.reply)
	defer putMessage(reply)
	out, err := t.handler.ServeRPC(ctx, t.peer, *c.message, append((*reply)[:0], 0, 0, 0, 0))
	t.places.Give(&c.share.places, 1)
	t.putCall(c)
	if err == nil {
		*reply = out
		t.keepMemory(c, max(smallReply, cap(out)))
		err = t.send(out)
	}
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
