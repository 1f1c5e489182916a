package nlm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// Limits of a Service.
const (
	maxServiceConns = 64
	maxPeerConns    = maxServiceConns / 4
	maxDatagrams    = 16 // handled at the same time
	serviceIdle     = 5 * time.Minute
	replyTimeout    = 10 * time.Second
	lowestFreePort  = 1024 // a caller with a lower source port is root (as in Linux's statd)
)

// ServiceConfig configures a Service.
type ServiceConfig struct {
	// Listen is ADDRESS:PORT for the calls of servers, on TCP and UDP. Port 0 takes a free port; ""
	// receives no calls.
	Listen string
	// StateDir keeps the owners of locks, so that the next daemon releases the locks of a killed
	// one; "" for none.
	StateDir string
	// Restore means that clients with the State of the earlier daemon follow. The service then
	// releases no lock of the earlier daemon before Restored is called, and none that such a client
	// has. Without Restored the other locks stay for the next daemon.
	Restore bool
	Logger  hclog.Logger

	portmapPort int           // for tests; 0 means 111
	staleRetry  time.Duration // for tests; 0 means staleRetry
}

// A Service receives the calls of lock servers for all mounts of a daemon: GRANTED of NLM, and the
// notices of restarts of NSM. It starts with the first mount, and does nothing on a host without a
// port mapper or with a kernel lock service: servers could not find it. Its methods may be called
// concurrently, except Close, which comes last. A nil *Service is valid and does nothing.
type Service struct {
	cfg    ServiceConfig
	log    hclog.Logger
	dir    *os.File    // the state directory, locked; nil for none
	logged atomic.Bool // that owners are not recorded

	start   sync.Once
	release sync.Once // of the locks of the earlier daemon
	work    sync.WaitGroup
	ctx     context.Context
	end     context.CancelFunc
	ready   chan struct{} // closed when the start is complete

	mu struct {
		sync.Mutex
		clients    map[*Client]struct{}
		hosts      map[netip.Addr]*monitored
		conns      map[net.Conn]netip.Addr // with the peer
		registered []mapping
		stale      map[string]struct{} // files of an earlier process that no client has claimed
		serviceState
	}
}

// A serviceState is what servers and the status monitor of this host know of a Service.
type serviceState struct {
	callbacks bool   // servers can call this service
	foreign   bool   // servers call another lock service of this host
	statd     int    // TCP port of the status monitor of this host; 0 for none
	nsmState  uint32 // state number of this host; 0 if unknown
	addr      net.Addr
	reason    string // why servers cannot call this service
}

// A monitored is a server whose restart the status monitor reports.
type monitored struct {
	clients int
	priv    [nlmwire.PrivSize]byte
	once    sync.Once
	state   uint32 // of the last notice
}

// NewService returns a Service. It releases the locks of a killed daemon in the background, with
// the option Restore after Restored, and listens when the first mount needs it.
func NewService(cfg ServiceConfig) *Service {
	if cfg.Logger == nil {
		cfg.Logger = hclog.NewNullLogger()
	}
	if cfg.portmapPort == 0 {
		cfg.portmapPort = mountd.PortmapPort
	}
	if cfg.staleRetry == 0 {
		cfg.staleRetry = staleRetry
	}
	s := &Service{cfg: cfg, log: cfg.Logger, ready: make(chan struct{})}
	s.mu.clients, s.mu.hosts = make(map[*Client]struct{}), make(map[netip.Addr]*monitored)
	s.mu.conns, s.mu.stale = make(map[net.Conn]netip.Addr), make(map[string]struct{})
	s.ctx, s.end = context.WithCancel(context.Background())
	if cfg.StateDir != "" {
		if err := s.openStateDir(); err != nil {
			s.notRecorded(err)
		}
	}
	if !cfg.Restore {
		s.Restored()
	}
	return s
}

// Close ends the registrations and the service.
func (s *Service) Close() {
	if s == nil {
		return
	}
	s.start.Do(func() { close(s.ready) }) // no start from now on
	s.end()
	<-s.ready
	ctx, cancel := context.WithTimeout(context.Background(), localTimeout)
	defer cancel()
	for _, m := range s.registrations() {
		_, _ = portmap(ctx, s.cfg.portmapPort, portmapUnset, m)
	}
	s.mu.Lock()
	for conn := range s.mu.conns {
		conn.Close()
	}
	s.mu.Unlock()
	s.work.Wait()
	if s.dir != nil {
		s.dir.Close()
	}
}

func (s *Service) registrations() []mapping {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.registered
}

// Status describes the service for the log and for the status of a mount.
func (s *Service) Status() string {
	if s == nil {
		return "off"
	}
	switch st := s.state(); {
	case st.callbacks && st.statd != 0:
		return fmt.Sprintf("callbacks at %s, notices of restarts by rpc.statd", st.addr)
	case st.callbacks:
		return fmt.Sprintf("callbacks and notices of restarts at %s", st.addr)
	case st.reason != "":
		return "polling: " + st.reason
	}
	return "polling"
}

// add registers a client and starts the service. It does not wait.
func (s *Service) add(c *Client) {
	s.mu.Lock()
	s.mu.clients[c] = struct{}{}
	h := s.mu.hosts[c.addr]
	if h == nil {
		h = &monitored{}
		_, _ = rand.Read(h.priv[:]) // never fails
		s.mu.hosts[c.addr] = h
	}
	h.clients++
	s.mu.Unlock()
	s.start.Do(func() {
		s.work.Go(func() {
			defer close(s.ready)
			if err := s.run(); err != nil {
				s.log.Info("waiting locks are polled", "reason", err)
				s.mu.Lock()
				s.mu.reason = err.Error()
				s.mu.Unlock()
			}
		})
	})
}

// leave removes a client. It returns whether the client was the last one of its server, and the
// port of the status monitor of this host.
func (s *Service) leave(c *Client) (last bool, statd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.clients, c)
	h := s.mu.hosts[c.addr]
	h.clients--
	if last = h.clients == 0; last {
		delete(s.mu.hosts, c.addr)
	}
	return last, s.mu.statd
}

// remove is the reverse of add.
func (s *Service) remove(c *Client) {
	if last, statd := s.leave(c); last && statd != 0 {
		_, _ = callMonitor(statd, nlmwire.NSMUnmon, nlmwire.AppendUnmon(nil, c.cfg.Host, &notifyCall))
	}
}

// notifyCall is the callback that the status monitor of this host makes. Linux's rpc.statd accepts
// only a procedure of the lock manager.
var notifyCall = nlmwire.MonitorCall{Name: loopback, Prog: nlmwire.Program, Vers: nlmwire.Version,
	Proc: uint32(nlmwire.ProcNotify)}

// callMonitor makes one call to the status monitor of this host. The end of a request must not end
// the call: no other request makes it.
func callMonitor(port int, proc uint32, args []byte) ([]byte, error) {
	return localCall(context.Background(), port, nlmwire.NSMProgram, nlmwire.NSMVersion, proc, args)
}

func (s *Service) state() (st serviceState) {
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		st = s.mu.serviceState
	}
	return st
}

// run listens and registers. Its error is the reason why servers cannot call.
func (s *Service) run() error {
	ctx := s.ctx
	switch port, err := s.findRegistered(ctx, nlmwire.Program, nlmwire.Version); {
	case err == nil && port != 0:
		s.mu.Lock()
		s.mu.foreign = true
		s.mu.Unlock()
		return fmt.Errorf("another lock service of this host has port %d, for example that of the kernel's NFS", port)
	case s.cfg.Listen == "":
		return errors.New("no listener for callbacks is configured")
	case err != nil:
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", s.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen for callbacks: %w", err)
	}
	tcp := l.Addr().(*net.TCPAddr)
	host, _, _ := net.SplitHostPort(s.cfg.Listen)
	packets, err := new(net.ListenConfig).ListenPacket(ctx, "udp", net.JoinHostPort(host, strconv.Itoa(tcp.Port)))
	if err != nil {
		l.Close()
		return fmt.Errorf("listen for callbacks: %w", err)
	}
	context.AfterFunc(s.ctx, func() {
		l.Close()
		packets.Close()
	})
	s.work.Go(func() { s.accept(l) })
	s.work.Go(func() { s.receive(packets) })
	port := uint32(tcp.Port)
	for _, proto := range []uint32{protoTCP, protoUDP} {
		if err := s.register(ctx, mapping{nlmwire.Program, nlmwire.Version, proto, port}); err != nil {
			return err
		}
	}
	statd, err := s.findRegistered(ctx, nlmwire.NSMProgram, nlmwire.NSMVersion)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.mu.addr, s.mu.callbacks, s.mu.statd = l.Addr(), true, int(min(statd, 1<<16-1))
	s.mu.Unlock()
	if statd == 0 { // no status monitor here: servers notify this service
		s.mu.Lock()
		s.mu.nsmState = 1 // odd: this host is up (XNFS chapter 11)
		s.mu.Unlock()
		for _, proto := range []uint32{protoTCP, protoUDP} {
			if err := s.register(ctx, mapping{nlmwire.NSMProgram, nlmwire.NSMVersion, proto, port}); err != nil {
				s.log.Warn("no notices of server restarts", "reason", err)
			}
		}
	}
	s.log.Info("receiving lock callbacks", "address", l.Addr(), "own_status_monitor", statd == 0)
	return nil
}

// findRegistered returns the port of a program of this host, 0 if there is none. It removes the
// registration of a service that has ended: its port is closed.
func (s *Service) findRegistered(ctx context.Context, prog, vers uint32) (port uint32, err error) {
	m := mapping{prog: prog, vers: vers, proto: protoTCP}
	port, err = portmap(ctx, s.cfg.portmapPort, portmapGetPort, m)
	if err != nil || port == 0 || port >= 1<<16 {
		return port, err
	}
	_, err = localCall(ctx, int(port), prog, vers, uint32(nlmwire.ProcNull), nil)
	if errors.Is(err, syscall.ECONNREFUSED) {
		_, err = portmap(ctx, s.cfg.portmapPort, portmapUnset, m)
		return 0, err
	}
	return port, nil
}

func (s *Service) register(ctx context.Context, m mapping) error {
	ok, err := portmap(ctx, s.cfg.portmapPort, portmapSet, m)
	if err == nil && ok != 1 {
		err = errors.New("refused")
	}
	if err != nil {
		return fmt.Errorf("register program %d with the port mapper: %w", m.prog, err)
	}
	s.mu.Lock()
	s.mu.registered = append(s.mu.registered, m)
	s.mu.Unlock()
	return nil
}

// monitor asks the status monitor of this host, once for each server, to report restarts of the
// server. It waits for the start of the service, and then at most localTimeout.
func (s *Service) monitor(ctx context.Context, c *Client) {
	if s == nil {
		return
	}
	select {
	case <-s.ready:
	case <-ctx.Done():
		return
	}
	s.mu.Lock()
	h, statd := s.mu.hosts[c.addr], s.mu.statd
	s.mu.Unlock()
	if h == nil || statd == 0 {
		return
	}
	h.once.Do(func() {
		// A status monitor keeps the private data of the first SM_MON, which may be that of an
		// earlier daemon: the notice would then match no server.
		_, _ = callMonitor(statd, nlmwire.NSMUnmon, nlmwire.AppendUnmon(nil, c.cfg.Host, &notifyCall))
		results, err := callMonitor(statd, nlmwire.NSMMon, nlmwire.AppendMon(nil, c.cfg.Host, &notifyCall, &h.priv))
		var ok bool
		var state uint32
		if err == nil {
			ok, state, err = nlmwire.ParseMonRes(results)
		}
		if err == nil && !ok {
			err = errors.New("refused")
		}
		if err != nil {
			s.log.Warn("no notices of server restarts: status monitor of this host", "server", c.addr, "error", err)
			return
		}
		s.mu.Lock()
		s.mu.nsmState = state
		s.mu.Unlock()
	})
}

func (s *Service) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.Warn("accept failed", "error", err)
			if !sleep(s.ctx, time.Second) {
				return
			}
			continue
		}
		from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
		if !s.admit(conn, from.Addr()) {
			conn.Close()
			continue
		}
		s.work.Go(func() {
			s.serve(conn, from)
			conn.Close()
			s.mu.Lock()
			delete(s.mu.conns, conn)
			s.mu.Unlock()
		})
	}
}

// admit adds a connection, or returns false. One peer gets only some of the connections. All
// loopback addresses are one peer, because each local user can use all of them.
func (s *Service) admit(conn net.Conn, peer netip.Addr) bool {
	if !s.knows(peer) {
		return false
	}
	if peer = peer.Unmap(); peer.IsLoopback() {
		peer = netip.IPv6Loopback()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	same := 0
	for _, other := range s.mu.conns {
		if other == peer {
			same++
		}
	}
	if len(s.mu.conns) >= maxServiceConns || same >= maxPeerConns || s.ctx.Err() != nil {
		return false
	}
	s.mu.conns[conn] = peer
	return true
}

func (s *Service) serve(conn net.Conn, from netip.AddrPort) {
	var buf []byte
	for {
		if conn.SetReadDeadline(time.Now().Add(serviceIdle)) != nil {
			return
		}
		var err error
		if buf, err = rpctcp.ReadRecord(conn, buf, nlmwire.MaxMessage); err != nil {
			return
		}
		reply := s.handle(from, buf)
		if reply == nil || conn.SetWriteDeadline(time.Now().Add(replyTimeout)) != nil ||
			rpctcp.WriteRecord(conn, reply) != nil {
			return
		}
	}
}

func (s *Service) receive(packets net.PacketConn) {
	room := make(chan struct{}, maxDatagrams)
	buf := make([]byte, nlmwire.MaxMessage)
	for {
		n, from, err := packets.ReadFrom(buf)
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		at := from.(*net.UDPAddr).AddrPort()
		if !s.knows(at.Addr()) {
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			continue // the caller sends again
		}
		message := append([]byte(nil), buf[:n]...)
		s.work.Go(func() {
			defer func() { <-room }()
			if reply := s.handle(at, message); reply != nil {
				_, _ = packets.WriteTo(reply, from)
			}
		})
	}
}

// knows reports whether an address is a server of a mount, or this host.
func (s *Service) knows(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	s.mu.Lock()
	defer s.mu.Unlock()
	return addr.IsLoopback() || s.mu.hosts[addr] != nil
}

// handle executes one call and returns the reply, or nil for a message that deserves none.
func (s *Service) handle(from netip.AddrPort, message []byte) []byte {
	from = netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port())
	h, args, err := sunrpc.ParseCall(message)
	if err != nil {
		return nil
	}
	accepted := func(stat sunrpc.AcceptStat) []byte { return sunrpc.AppendAcceptedReply(nil, h.XID, stat) }
	switch {
	case h.Prog == nlmwire.NSMProgram && h.Vers == nlmwire.NSMVersion:
		return accepted(s.handleMonitor(from, h.Proc, args))
	case h.Prog != nlmwire.Program:
		return accepted(sunrpc.ProgUnavail)
	case h.Vers != nlmwire.Version:
		return sunrpc.AppendProgMismatchReply(nil, h.XID, nlmwire.Version, nlmwire.Version)
	}
	switch proc := nlmwire.Proc(h.Proc); proc {
	case nlmwire.ProcNull:
		return accepted(sunrpc.Success)
	case nlmwire.ProcGranted, nlmwire.ProcGrantedMsg:
		var a nlmwire.Args
		if nlmwire.ParseArgs(proc, args, &a) != nil {
			return accepted(sunrpc.GarbageArgs)
		}
		c, stat := s.granted(from.Addr(), &a)
		res := &nlmwire.Res{Cookie: a.Cookie, Stat: stat}
		if proc == nlmwire.ProcGranted {
			return nlmwire.AppendRes(accepted(sunrpc.Success), proc, res)
		}
		if c != nil {
			results := nlmwire.AppendRes(nil, nlmwire.ProcGrantedRes, res) // the next call overwrites the cookie
			c.background(func() { c.sendGrantedRes(results) })
		}
		return accepted(sunrpc.Success)
	case nlmwire.ProcNotify:
		_, state, priv, err := nlmwire.ParseStatus(args)
		if err != nil || !from.Addr().IsLoopback() {
			return accepted(sunrpc.GarbageArgs)
		}
		s.notified(func(_ netip.Addr, m *monitored) bool { return m.priv == priv }, state)
		return accepted(sunrpc.Success)
	}
	return accepted(sunrpc.ProcUnavail)
}

// handleMonitor executes a call of NSM: only notices of servers.
func (s *Service) handleMonitor(from netip.AddrPort, proc uint32, args []byte) sunrpc.AcceptStat {
	switch proc {
	case nlmwire.NSMNull:
		return sunrpc.Success
	case nlmwire.NSMNotify:
		_, state, err := nlmwire.ParseNotify(args)
		if err != nil {
			return sunrpc.GarbageArgs
		}
		if from.Port() < lowestFreePort {
			s.notified(func(addr netip.Addr, _ *monitored) bool { return addr == from.Addr() }, state)
		}
		return sunrpc.Success
	}
	return sunrpc.ProcUnavail
}

// notified makes the clients of a server reclaim their locks. A monitor repeats its notice until it
// gets a reply, so that a known state number is ignored.
func (s *Service) notified(match func(netip.Addr, *monitored) bool, state uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for addr, m := range s.mu.hosts {
		if !match(addr, m) || m.state == state && state != 0 {
			continue
		}
		m.state = state
		for c := range s.mu.clients {
			if c.addr == addr {
				c.trigger(restart{reason: "notice of the server's status monitor", certain: true})
			}
		}
	}
}

// granted passes a GRANTED call to the clients of its server. It returns the client that has or
// wants the lock, or another client of the server with Denied.
func (s *Service) granted(from netip.Addr, a *nlmwire.Args) (*Client, nlmwire.Stat) {
	s.mu.Lock()
	var clients []*Client
	for c := range s.mu.clients {
		if c.addr == from {
			clients = append(clients, c)
		}
	}
	s.mu.Unlock()
	var last *Client
	for _, c := range clients {
		last = c
		if stat := c.granted(a); stat != nlmwire.Denied {
			return c, stat
		}
	}
	return last, nlmwire.Denied
}

// sendGrantedRes answers GRANTED_MSG. Some servers send no reply to this call.
func (c *Client) sendGrantedRes(results []byte) {
	ctx, cancel := context.WithTimeout(c.ctx, grantedTimeout)
	defer cancel()
	conn, err := c.link.get(ctx)
	if err == nil {
		_, _ = c.link.exchange(ctx, conn, nlmwire.ProcGrantedRes, sunrpc.AppendAuthNone(nil), results)
	}
}
