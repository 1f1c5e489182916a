package nfsserve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsd"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// DefaultRDMAListen is the port of NFS over RDMA (RFC 8267 §4.2) on the loopback address.
const DefaultRDMAListen = "127.0.0.1:20049"

// DefaultTCPListen is the port that IANA assigned to MOUNT, on the loopback address. Clients that
// find no MOUNT service at the port mapper try this port.
const DefaultTCPListen = "127.0.0.1:20048"

// Config says what a Server serves and where. Exactly one of Dir and Backend is set.
type Config struct {
	// Dir is a directory to export.
	Dir string
	// Backend is "host:port" of an NFSv3 server on TCP.
	Backend string

	// RDMAListen is "host:port", default DefaultRDMAListen. Port 0 takes a free one.
	RDMAListen string
	// TCPListen is the "host:port" of Dir's MOUNT, NFS and port mapper, all on that one port.
	// Default DefaultTCPListen. Port 0 takes a free one.
	TCPListen string

	// Provider provides the RDMA port.
	Provider verbs.Provider
	// Allow lists the client addresses that may use either port; empty means all. It is the only
	// access rule of a relay: the backend sees every call from the relay's own address.
	Allow []netip.Prefix
	// ReadOnly refuses every change of Dir. A backend has its own rules.
	ReadOnly bool
	// NoRootSquash runs calls of uid 0 as root. By default uid 0 and gid 0 become 65534.
	NoRootSquash bool
	// AllowSUID lets clients set the set-user-ID and set-group-ID bits of files in Dir.
	AllowSUID bool
	// Insecure serves calls from any source port. By default calls other than NULL need a source
	// port below 1024, which only a privileged process can use: AUTH_SYS proves nothing else, so any
	// local user could act as any other.
	Insecure bool
	// StateDir keeps the key of Dir's file handles, so that they survive a restart. The default is
	// $STATE_DIRECTORY, else /var/lib/nfsrdmad for root, else the user's state directory.
	StateDir string

	// LockGrace is the time after a restart in which the clients of Dir may reclaim their locks; 0
	// means nlmd.DefaultGrace.
	LockGrace time.Duration

	// NoRemoteInv stops the server from offering Send With Invalidate; clients then invalidate
	// their keys themselves.
	NoRemoteInv bool
	// RDMA configures svcrdma. Run sets Handler, Logger, RemoteInv and Allow. The zero value is
	// valid.
	RDMA   svcrdma.Config
	Logger hclog.Logger

	// For tests.
	drainTimeout time.Duration // 0 means defaultDrainTimeout
}

// defaultDrainTimeout bounds the time that a server waits for its running calls when it ends.
const defaultDrainTimeout = 3 * time.Second

// A ConfigError describes an invalid Config.
type ConfigError struct{ Text string }

func (e *ConfigError) Error() string { return e.Text }

// A Server runs until its context ends or Close is called. It then accepts no more connections and
// executes no more calls. It sends the replies of the running calls, for which it waits at most
// 3 seconds, and closes the connections.
type Server struct {
	// RDMAAddr is the address of the RDMA port.
	RDMAAddr netip.AddrPort
	// TCPAddr is the address of MOUNT and NFS over TCP: that of Dir, or Config.Backend.
	TCPAddr string

	stop context.CancelFunc
	done chan struct{}
	err  error // after done
}

// Run starts a server and returns when both ports are open. The end of ctx ends the server. A
// backend must reply to a NULL call within 10 seconds. Errors are *ConfigError, *BackendError, or
// those of the system.
func Run(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	raddr, err := resolve(cfg.RDMAListen)
	if err != nil {
		return nil, &ConfigError{fmt.Sprintf("RDMA address %q: %v; give --rdma-listen as ADDRESS:PORT",
			cfg.RDMAListen, err)}
	}
	if cfg.Backend != "" {
		if err := checkBackend(ctx, cfg.Backend); err != nil {
			return nil, err
		}
	}
	stop, cancelStop := context.WithCancel(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Server{stop: cancelStop, done: make(chan struct{}), TCPAddr: cfg.Backend}
	var parts sync.WaitGroup // the TCP port
	var export *nfsd.Server
	end := func() {
		cancelStop()
		cancel()
		parts.Wait()
		if export != nil {
			export.Close()
		}
	}
	rdma := cfg.RDMA
	if cfg.Dir != "" {
		if export, err = s.startExport(stop, ctx, &cfg, &parts); err != nil {
			end()
			return nil, err
		}
		rdma.Handler = export
	} else {
		rdma.Handler = newProxy(s.TCPAddr, cfg.Insecure, cfg.Logger.Named("backend"))
	}
	rl, err := cfg.Provider.Listen(stop, raddr)
	if err != nil {
		end()
		return nil, fmt.Errorf("%w; choose another --rdma-listen", err) // it names the address
	}
	s.RDMAAddr = rl.Addr()
	rdma.Logger = cfg.Logger.Named("rdma")
	rdma.RemoteInv = !cfg.NoRemoteInv
	rdma.Allow = cfg.Allow
	rdma.DrainTimeout = cfg.drainTimeout
	closeListener := sync.OnceFunc(func() { _ = rl.Close() })
	rdma.Draining = closeListener // not earlier: who sees it closed expects no call to be executed
	context.AfterFunc(stop, func() {
		time.AfterFunc(cfg.drainTimeout, cancel) // bounds parts.Wait
	})
	go func() {
		defer close(s.done)
		s.err = svcrdma.Serve(stop, rl, rdma)
		cancelStop()
		closeListener()
		parts.Wait()
		end()
	}()
	return s, nil
}

// Close ends the server and waits until it has released everything.
func (s *Server) Close() error {
	s.stop()
	return s.Wait()
}

// Wait returns when the server has ended.
func (s *Server) Wait() error {
	<-s.done
	return s.err
}

func (c *Config) complete() error {
	if c.RDMAListen == "" {
		c.RDMAListen = DefaultRDMAListen
	}
	if c.TCPListen == "" {
		c.TCPListen = DefaultTCPListen
	}
	if c.StateDir == "" {
		c.StateDir = stateDir()
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.drainTimeout == 0 {
		c.drainTimeout = defaultDrainTimeout
	}
	switch {
	case c.Provider == nil:
		return errors.New("nfsserve: no RDMA provider")
	case (c.Dir == "") == (c.Backend == ""):
		return &ConfigError{"serve either a directory or a backend: give exactly one of them"}
	}
	if c.Backend != "" {
		if _, _, err := net.SplitHostPort(c.Backend); err != nil {
			return &ConfigError{fmt.Sprintf("backend %q: %v; give it as HOST:PORT", c.Backend, err)}
		}
	}
	return nil
}

func resolve(addr string) (netip.AddrPort, error) {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	ap := a.AddrPort()
	if !ap.Addr().IsValid() { // no host: every address
		ap = netip.AddrPortFrom(netip.IPv6Unspecified(), ap.Port())
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

// startExport opens the directory and its TCP port, and returns the handler of its calls. The TCP
// port ends its calls in order when stop ends, and at once when ctx ends.
func (s *Server) startExport(stop, ctx context.Context, cfg *Config, parts *sync.WaitGroup) (*nfsd.Server, error) {
	d, err := nfsd.New(nfsd.Config{Dir: cfg.Dir, ReadOnly: cfg.ReadOnly, NoRootSquash: cfg.NoRootSquash,
		AllowSUID: cfg.AllowSUID, Allow: cfg.Allow, Insecure: cfg.Insecure, StateDir: cfg.StateDir,
		LockGrace: cfg.LockGrace, MaxReply: cfg.RDMA.MaxMessage, Logger: cfg.Logger.Named("nfs")})
	if err != nil {
		return nil, fmt.Errorf("export %s: %w; name a directory", cfg.Dir, err)
	}
	l, err := new(net.ListenConfig).Listen(stop, "tcp", cfg.TCPListen)
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("listen for NFS over TCP: %w; choose another --tcp-listen", err)
	}
	s.TCPAddr = l.Addr().String()
	d.SetPort(uint16(l.Addr().(*net.TCPAddr).Port))
	tcp := newTCPServer(d, cfg.Logger.Named("tcp"))
	parts.Go(func() { tcp.run(stop, ctx, l) })
	return d, nil
}

// stateDir is where the server keeps the key of its file handles: systemd's choice, or the usual
// directory of root or of another user.
func stateDir() string {
	if dir, _, _ := strings.Cut(os.Getenv("STATE_DIRECTORY"), ":"); dir != "" {
		return dir
	}
	if os.Geteuid() == 0 {
		return "/var/lib/nfsrdmad"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "nfsrdmad")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local/state/nfsrdmad")
	}
	return ""
}
