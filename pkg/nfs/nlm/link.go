package nlm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// Times of a link. Tests change them.
type linkTimes struct {
	connect    time.Duration // for one attempt to find the service and to connect
	reply      time.Duration // for one reply; the link then reconnects
	minBackoff time.Duration // limits of the random pause between attempts to connect
	maxBackoff time.Duration
	noService  time.Duration // how long a service that was there before may be missing
}

var defaultLinkTimes = linkTimes{connect: 10 * time.Second, reply: 20 * time.Second,
	minBackoff: 250 * time.Millisecond, maxBackoff: 10 * time.Second, noService: 90 * time.Second}

// A NoServiceError means that the server has no NLM service.
type NoServiceError struct {
	Host string
	Err  error
}

func (e *NoServiceError) Error() string {
	return fmt.Sprintf("locks at %s: no NLM service: %v; start lockd on the server, set nlmport=, or mount with nolock",
		e.Host, e.Err)
}

// Unwrap returns the cause.
func (e *NoServiceError) Unwrap() error { return e.Err }

// A link is the TCP connection to the NLM service of one server. It connects when a call needs it
// and sends a call again after a lost connection. NLM calls are idempotent for one owner.
type link struct {
	cfg   *Config
	times linkTimes

	mu struct {
		sync.Mutex
		conn      *rpctcp.Client // nil while not connected
		connected bool           // the service was there at some time
		lastError error          // of the last attempt; nil after a success
		losses    uint64         // lost connections
		closed    bool
	}
	dialing  chan struct{}  // holds one token: the right to connect
	watchers sync.WaitGroup // one goroutine for each connection and each call

	lost func(error) // called after each lost connection
	made func()      // called after each new connection
	// dial is resvport.Dial, or DialAny with AnySourcePort. Tests change it.
	dial func(ctx context.Context, addr string) (net.Conn, error)
}

func newLink(cfg *Config, lost func(error)) *link {
	l := &link{cfg: cfg, times: defaultLinkTimes, dialing: make(chan struct{}, 1), lost: lost,
		dial: resvport.Dial}
	if cfg.AnySourcePort {
		l.dial = resvport.DialAny
	}
	l.dialing <- struct{}{}
	return l
}

// call makes one call and decodes its results with parse. It retries until ctx ends, and returns a
// *NoServiceError when the server has no NLM. When ctx ends while the call is in flight, call
// returns a channel that is closed when the call has ended.
func (l *link) call(ctx context.Context, proc nlmwire.Proc, cred, args []byte,
	parse func([]byte) error) (late <-chan struct{}, err error) {
	pause := pace.Backoff{Min: l.times.minBackoff, Max: l.times.maxBackoff}
	var missing time.Time // since when the service is known to be missing
	for {
		late, err := l.try(ctx, proc, cred, args, parse)
		if err == nil {
			return nil, nil
		}
		if ctx.Err() != nil {
			return late, ctx.Err()
		}
		var none *NoServiceError
		if !errors.As(err, &none) {
			missing = time.Time{}
		} else if missing.IsZero() {
			missing = time.Now()
		}
		l.mu.Lock()
		l.mu.lastError = err
		before := l.mu.connected
		l.mu.Unlock()
		if none != nil && (!before || time.Since(missing) > l.times.noService) {
			return nil, err
		}
		if !sleep(ctx, pause.Next()) {
			return nil, ctx.Err()
		}
	}
}

// sleep returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *link) try(ctx context.Context, proc nlmwire.Proc, cred, args []byte,
	parse func([]byte) error) (late <-chan struct{}, err error) {
	conn, err := l.get(ctx)
	if err != nil {
		return nil, err
	}
	results, late, err := l.startExchange(ctx, conn, proc, cred, args)
	if err == nil && parse != nil {
		err = parse(results)
	}
	switch {
	case err == nil, ctx.Err() != nil:
		return late, err
	case isNoService(err):
		err = &NoServiceError{Host: l.cfg.Host, Err: err}
	}
	l.drop(conn)
	return nil, err
}

// startExchange is exchange, but when ctx ends, the exchange goes on. startExchange then returns a
// channel that is closed at the end of the exchange.
func (l *link) startExchange(ctx context.Context, conn *rpctcp.Client, proc nlmwire.Proc,
	cred, args []byte) (_ []byte, late <-chan struct{}, _ error) {
	ended := make(chan struct{})
	var results []byte
	var exchanged error
	if !l.watch(func() {
		defer close(ended)
		results, exchanged = l.exchange(context.WithoutCancel(ctx), conn, proc, cred, args)
	}) {
		return nil, nil, rpctcp.ErrClosed
	}
	select {
	case <-ended:
		return results, nil, exchanged
	case <-ctx.Done():
		return nil, ended, ctx.Err()
	}
}

// exchange makes one call on conn.
func (l *link) exchange(ctx context.Context, conn *rpctcp.Client, proc nlmwire.Proc,
	cred, args []byte) ([]byte, error) {
	ctx, cancel := running.WithTimeout(ctx, l.times.reply)
	defer cancel()
	m := sunrpc.Message{Prog: nlmwire.Program, Vers: nlmwire.Version, Proc: uint32(proc), Cred: cred, Args: args}
	err := conn.Call(ctx, &m)
	return m.Result, err
}

// isNoService reports whether the peer answers RPC but does not have the program or refuses it.
func isNoService(err error) bool {
	var accept *sunrpc.AcceptError
	var denied *sunrpc.DeniedError
	return errors.As(err, &denied) || errors.As(err, &accept) &&
		accept.Stat != sunrpc.SystemErr
}

// get returns the connection, which it makes if necessary.
func (l *link) get(ctx context.Context) (*rpctcp.Client, error) {
	select {
	case <-l.dialing:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { l.dialing <- struct{}{} }()
	if conn := l.current(); conn != nil {
		if conn.Err() == nil {
			return conn, nil
		}
		l.drop(conn)
	}
	dialCtx, cancel := context.WithTimeout(ctx, l.times.connect)
	defer cancel()
	conn, err := l.connect(dialCtx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.mu.conn, l.mu.connected, l.mu.lastError = conn, true, nil
	l.mu.Unlock()
	if !l.watch(func() {
		<-conn.Done()
		l.drop(conn)
	}) {
		l.drop(conn)
		return nil, rpctcp.ErrClosed
	}
	if l.made != nil {
		l.made()
	}
	return conn, nil
}

// watch runs do in a goroutine that ends before close returns. After close it returns false.
func (l *link) watch(do func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.closed {
		l.watchers.Go(do)
	}
	return !l.mu.closed
}

func (l *link) current() *rpctcp.Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.conn
}

// drop closes a connection that failed.
func (l *link) drop(conn *rpctcp.Client) {
	err := conn.Err()
	conn.Close()
	l.mu.Lock()
	mine := l.mu.conn == conn
	if mine {
		l.mu.conn = nil
		l.mu.losses++
	}
	l.mu.Unlock()
	if mine && l.lost != nil {
		l.lost(err)
	}
}

// close closes the connection. No call may be running.
func (l *link) close() {
	l.mu.Lock()
	conn := l.mu.conn
	l.mu.conn, l.mu.closed = nil, true
	l.mu.Unlock()
	if conn != nil {
		conn.Close()
	}
	l.watchers.Wait()
}

// losses returns the number of lost connections.
func (l *link) losses() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.losses
}

// reason returns the last error, "" if the last attempt succeeded.
func (l *link) reason() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.lastError == nil {
		return ""
	}
	return l.mu.lastError.Error()
}

// connect finds the service and connects to it. It tries nlmport=, or the port mapper and the port
// of MOUNT: a server without a port mapper may have all services on one port. A mount with
// mountport= names a server that its port mapper may not know, so that port comes first.
func (l *link) connect(ctx context.Context) (*rpctcp.Client, error) {
	switch {
	case l.cfg.Port != 0:
		return l.open(ctx, l.cfg.Port)
	case l.cfg.MountPort == 0:
		return l.openMapped(ctx)
	}
	first, second := l.openMapped, l.openMount
	if l.cfg.MountPortFirst {
		first, second = second, first
	}
	conn, err1 := first(ctx)
	if err1 == nil {
		return conn, nil
	}
	conn, err2 := second(ctx)
	if err2 == nil {
		return conn, nil
	}
	// The service is missing only if neither way is merely unreachable.
	var none *NoServiceError
	if !errors.As(err1, &none) {
		return nil, err1
	}
	return nil, err2
}

func (l *link) openMount(ctx context.Context) (*rpctcp.Client, error) {
	return l.open(ctx, l.cfg.MountPort)
}

// openMapped asks the port mapper for the port.
func (l *link) openMapped(ctx context.Context) (*rpctcp.Client, error) {
	port, err := mountd.GetPort(ctx, mountd.Args{Host: l.cfg.Host, Timeout: l.times.connect}, nlmwire.Program,
		nlmwire.Version)
	if err == nil {
		return l.open(ctx, port)
	}
	var e *mountd.Error
	refused := errors.Is(err, syscall.ECONNREFUSED) && !l.wasConnected()
	if errors.As(err, &e) && e.Kind == mountd.NotRegistered || refused {
		return nil, &NoServiceError{Host: l.cfg.Host, Err: err}
	}
	return nil, err
}

// open connects to a port and makes a NULL call.
func (l *link) open(ctx context.Context, port int) (*rpctcp.Client, error) {
	at := net.JoinHostPort(l.cfg.Host, strconv.Itoa(port))
	tcp, err := l.dial(ctx, at)
	if err != nil {
		err = fmt.Errorf("connect %s: %w", at, err)
		if errors.Is(err, syscall.ECONNREFUSED) && !l.wasConnected() {
			return nil, &NoServiceError{Host: l.cfg.Host, Err: err}
		}
		return nil, err
	}
	conn := rpctcp.New(tcp, rpctcp.Options{MaxRecord: nlmwire.MaxMessage, WriteTimeout: l.times.reply})
	if _, err = l.exchange(ctx, conn, nlmwire.ProcNull, sunrpc.AppendAuthNone(nil), nil); err == nil {
		return conn, nil
	}
	conn.Close()
	err = fmt.Errorf("NLM at %s: %w", at, err)
	if isNoService(err) {
		err = &NoServiceError{Host: l.cfg.Host, Err: err}
	}
	return nil, err
}

// CheckServer checks that the lock service of a server replies to a NULL call. It uses only Host
// and the ports of cfg. The error is a [*NoServiceError] if the server has no such service.
func CheckServer(ctx context.Context, cfg Config) error {
	l := newLink(&cfg, nil)
	defer l.close()
	_, err := l.try(ctx, nlmwire.ProcNull, sunrpc.AppendAuthNone(nil), nil, nil)
	return err
}

// expect makes the link retry as after a lost connection, for an earlier process had a connection.
func (l *link) expect() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.connected, l.mu.losses = true, 1
}

func (l *link) wasConnected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.connected
}
