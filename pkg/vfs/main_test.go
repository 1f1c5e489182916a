package vfs

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/server"
)

func TestMain(m *testing.M) {
	server.Main()
	kit.Main(m)
}

// testTimeout bounds each wait of a test.
const testTimeout = kit.Timeout

// An export is a directory that a server exports.
type export struct {
	dir      string // on the server
	root     nfs.Handle
	dial     func(context.Context) (transport, error)
	tcpPort  int // of this project's server: MOUNT and NLM
	rdmaAddr string
}

type transport interface {
	nfs3.Caller
	Close() error
}

// startExport exports a directory with NFS-Ganesha over TCP.
func startExport(t *testing.T) *export {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := ganesha.Start(t, dir)
	res, err := mountd.Mount(t.Context(), mountd.Args{Host: s.Host, Port: s.MountPort, Export: s.Export,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	dial := func(ctx context.Context) (transport, error) { return rpctcp.Dial(ctx, s.Addr(), rpctcp.Options{}) }
	return &export{dir: dir, root: res.FH, dial: dial}
}

// startOwnExport exports a directory with this project's server over RDMA, without root squash.
func startOwnExport(t *testing.T) *export {
	t.Helper()
	return startExportOf(t, nfsserve.Config{NoRootSquash: true, AllowSUID: true})
}

// startExportOf exports a directory with this project's server, configured by cfg.
func startExportOf(t testing.TB, cfg nfsserve.Config) *export {
	t.Helper()
	dir := t.TempDir()
	cfg.Dir, cfg.RDMAListen, cfg.TCPListen, cfg.StateDir = dir, "127.0.0.1:0", "127.0.0.1:0", t.TempDir()
	cfg.Provider = softiwarp.New(softiwarp.Config{})
	s, err := nfsserve.Run(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	return exportOf(t, &server.Server{Dir: dir, RDMAAddr: s.RDMAAddr, TCPAddr: s.TCPAddr})
}

// exportOf returns the export of a server of this project.
func exportOf(t testing.TB, s *server.Server) *export {
	t.Helper()
	host, port, err := net.SplitHostPort(s.TCPAddr)
	must(t, err)
	number, err := strconv.Atoi(port)
	must(t, err)
	res, err := mountd.Mount(t.Context(), mountd.Args{Host: host, Port: number, Export: s.Dir,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	must(t, err)
	dial := func(ctx context.Context) (transport, error) { return dialRDMA(ctx, s.RDMAAddr) }
	return &export{dir: s.Dir, root: res.FH, dial: dial, tcpPort: number, rdmaAddr: s.RDMAAddr.String()}
}

// servers are the servers that mounts must work with.
var servers = []struct {
	name  string
	start func(*testing.T) *export
}{{"own server", startOwnExport}, {"NFS-Ganesha", startExport}}

// eachServer runs a test with a new export of each server.
func eachServer(t *testing.T, test func(t *testing.T, e *export)) {
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) { test(t, s.start(t)) })
	}
}

func dialRDMA(ctx context.Context, addr netip.AddrPort) (transport, error) {
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr})
	if err != nil {
		return nil, err
	}
	if err := tr.Connect(ctx); err != nil {
		tr.Close()
		return nil, err
	}
	return tr, nil
}

// A testMount is an FS mounted on a temporary directory.
type testMount struct {
	dir string
	fs  *FS
	srv *Server
}

// mountConfig configures a test mount. The zero value gives the defaults.
type mountConfig struct {
	opts    Options
	mount   MountOptions
	buffers int // number of buffers; 0 means 16
	bufSize int // bytes; 0 means MaxIOSize
	noACL   bool
	// returns a caller between the client and the server, if not nil
	wrap func(nfs3.Caller) nfs3.Caller
}

// mount mounts the export until the test ends.
func (e *export) mount(t testing.TB, cfg mountConfig) *testMount {
	t.Helper()
	kit.NeedsFUSE(t)
	conn, err := e.dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var caller nfs3.Caller = conn
	if cfg.wrap != nil {
		caller = cfg.wrap(conn)
	}
	if cfg.opts.AcDirMax == 0 {
		d := DefaultOptions()
		cfg.opts.AcRegMin, cfg.opts.AcRegMax = d.AcRegMin, d.AcRegMax
		cfg.opts.AcDirMin, cfg.opts.AcDirMax = d.AcDirMin, d.AcDirMax
	}
	if cfg.buffers == 0 {
		cfg.buffers = 16
	}
	if cfg.bufSize == 0 {
		cfg.bufSize = MaxIOSize
	}
	pool := membuf.NewPool(cfg.bufSize, cfg.buffers)
	cfg.opts.Buffers, cfg.opts.ReadInPlace = pool, true // softiwarp and TCP reach any memory
	if !cfg.noACL {
		cfg.opts.ACL = nfsacl.NewClient(caller)
	}
	fs, err := New(t.Context(), nfs3.NewServer(nfs3.NewClient(caller)), e.root, cfg.opts)
	if err != nil {
		conn.Close()
		t.Fatal(err)
	}
	dir := t.TempDir()
	// Tests access the mount as other users too.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if cfg.mount.Source == "" {
		cfg.mount.Source = "127.0.0.1:" + e.dir
	}
	srv, err := Mount(dir, fs, cfg.mount)
	if err != nil {
		fs.Close(t.Context())
		conn.Close()
		t.Fatal(err)
	}
	m := &testMount{dir, fs, srv}
	t.Cleanup(func() {
		m.unmount(t)
		fs.reopens.unpinAll() // Close waits for them
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		fs.Close(ctx)
		if n := pool.Out(); n != 0 {
			t.Errorf("buffers in use after close: got %d, want 0", n)
		}
		pool.Close()
		conn.Close()
	})
	return m
}

func (m *testMount) unmount(t testing.TB) {
	t.Helper()
	err := m.srv.Unmount()
	for range 50 { // a process that has exited may still be closing its files
		if err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
		err = m.srv.Unmount()
	}
	t.Errorf("unmount: %v; unmounting by force", err)
	if err := m.srv.ForceUnmount(); err != nil {
		t.Error(err)
		_ = unix.Unmount(m.dir, unix.MNT_DETACH)
	}
}

func (m *testMount) path(name string) string { return filepath.Join(m.dir, name) }
