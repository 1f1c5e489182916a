package nfsserve

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"github.com/hashicorp/go-hclog"
	nfs "github.com/willscott/go-nfs"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// DefaultRDMAListen is the port of NFS over RDMA (RFC 8267 §4.2) on every address.
const DefaultRDMAListen = ":20049"

// DefaultTCPListen is where a directory's TCP port is when Config says nothing: any free port of
// this host's own.
const DefaultTCPListen = "127.0.0.1:0"

// Config says what is served and where. Exactly one of Dir and Backend is given.
type Config struct {
	// Dir is a directory to export.
	Dir string
	// Backend is "host:port" of an NFSv3 server on TCP.
	Backend string

	// RDMAListen is "host:port", default DefaultRDMAListen. Port 0 takes a free one.
	RDMAListen string
	// TCPListen is the "host:port" of Dir's MOUNT, NFS and port mapper, all on that one port.
	// Default DefaultTCPListen.
	TCPListen string

	// Provider carries the RDMA side.
	Provider verbs.Provider
	// ReadOnly refuses every change of Dir. A backend decides for itself.
	ReadOnly bool

	// NoRemoteInv leaves it to the clients to invalidate their keys; else Send With Invalidate is
	// offered.
	NoRemoteInv bool
	// RDMA is passed to svcrdma with Handler, Logger and RemoteInv set here. The zero value is
	// good.
	RDMA   svcrdma.Config
	Logger hclog.Logger
}

// A ConfigError says what of a Config makes no sense.
type ConfigError struct{ Text string }

func (e *ConfigError) Error() string { return e.Text }

// A Server runs until its context ends or Close is called.
type Server struct {
	// RDMAAddr is where RDMA connections are accepted.
	RDMAAddr netip.AddrPort
	// TCPAddr is the TCP port of MOUNT and NFS: Dir's own, or the backend's as it was given.
	TCPAddr string

	cancel context.CancelFunc
	done   chan struct{}
	err    error // after done
}

// Run starts a server and returns when both ports are open. ctx ends it. A backend must answer: it
// is asked once, with a bound. Errors are *ConfigError where cfg makes no sense, *BackendError, or
// the system's.
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
	ctx, cancel := context.WithCancel(ctx)
	s := &Server{cancel: cancel, done: make(chan struct{}), TCPAddr: cfg.Backend}
	var parts sync.WaitGroup
	if cfg.Dir != "" {
		if err := s.startExport(ctx, &cfg, &parts); err != nil {
			cancel()
			parts.Wait()
			return nil, err
		}
	}
	rl, err := cfg.Provider.Listen(ctx, raddr)
	if err != nil {
		cancel()
		parts.Wait()
		return nil, fmt.Errorf("%w; choose another --rdma-listen", err) // it names the address
	}
	s.RDMAAddr = rl.Addr()
	rdma := cfg.RDMA
	rdma.Handler = newProxy(s.TCPAddr, cfg.Logger.Named("backend"))
	rdma.Logger = cfg.Logger.Named("rdma")
	rdma.RemoteInv = !cfg.NoRemoteInv
	go func() {
		defer close(s.done)
		s.err = svcrdma.Serve(ctx, rl, rdma)
		_ = rl.Close()
		cancel()
		parts.Wait()
	}()
	return s, nil
}

// Close ends the server and waits until all that it used is released.
func (s *Server) Close() error {
	s.cancel()
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
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
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

// startExport opens the directory and its TCP port.
func (s *Server) startExport(ctx context.Context, cfg *Config, parts *sync.WaitGroup) error {
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return fmt.Errorf("export %s: %w; name a directory", cfg.Dir, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return fmt.Errorf("export %s: %w; name a directory", dir, err)
	}
	e, err := newExport(ctx, dir, root, cfg.ReadOnly, parts)
	if err != nil {
		root.Close()
		return fmt.Errorf("export %s: %w", dir, err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.TCPListen)
	if err != nil {
		root.Close()
		return fmt.Errorf("listen for NFS over TCP: %w; choose another --tcp-listen", err)
	}
	s.TCPAddr = l.Addr().String()
	e.port = uint16(l.Addr().(*net.TCPAddr).Port)
	tcp := &tcpServer{serve: e.serve, maxConns: maxTCPConns + connsPerPeer*cmp.Or(cfg.RDMA.MaxConns,
		svcrdma.DefaultMaxConns), log: cfg.Logger.Named("tcp")}
	parts.Go(func() {
		tcp.run(ctx, l)
		root.Close()
	})
	return nil
}

var quietLibrary = sync.OnceFunc(func() { nfs.Log.SetLevel(nfs.PanicLevel) })

// newExport starts the workers of a directory. They end with ctx.
func newExport(ctx context.Context, dir string, root *os.Root, readOnly bool, parts *sync.WaitGroup) (*export, error) {
	quietLibrary() // it logs every failed call, which the client is told
	t, err := newTree(root)
	if err != nil {
		return nil, err
	}
	e := &export{dir: dir, readOnly: readOnly, tree: t, workers: make(chan *worker, numWorkers)}
	e.listings.seed = maphash.MakeSeed()
	if _, err := rand.Read(e.verifier[:]); err != nil {
		return nil, err
	}
	var all []*worker
	for range numWorkers {
		w := newWorker(ctx, e, e.verifier, parts)
		all = append(all, w)
		e.workers <- w
	}
	context.AfterFunc(ctx, func() {
		for _, w := range all {
			w.pipe.Close()
		}
	})
	return e, nil
}
