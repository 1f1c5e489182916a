package fusefs

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// testTimeout bounds what ends by itself.
const testTimeout = 60 * time.Second

// An export is a directory that a server serves.
type export struct {
	dir  string // on the server
	root nfs3.FH
	dial func(context.Context) (transport, error)
}

type transport interface {
	nfs3.Caller
	Close() error
}

// startExport exports by NFS-Ganesha over TCP.
func startExport(t *testing.T) *export {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := ganeshatest.Start(t, dir)
	res, err := mountd.Mount(t.Context(), mountd.Args{Host: s.Host, Port: s.MountPort, Export: s.Export,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	return &export{dir, res.FH, func(ctx context.Context) (transport, error) {
		return rpctcp.Dial(ctx, s.Addr(),
			rpctcp.Options{})
	}}
}

// startOwnExport exports by our own server, over RDMA.
func startOwnExport(t *testing.T) *export {
	t.Helper()
	dir := t.TempDir()
	s, err := nfsserve.Run(context.Background(), nfsserve.Config{Dir: dir, RDMAListen: "127.0.0.1:0",
		NoRootSquash: true, StateDir: t.TempDir(), Provider: softiwarp.New(softiwarp.Config{})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	host, port, err := net.SplitHostPort(s.TCPAddr)
	must(t, err)
	number, err := strconv.Atoi(port)
	must(t, err)
	res, err := mountd.Mount(t.Context(), mountd.Args{Host: host, Port: number, Export: dir,
		Cred: &sunrpc.AuthSys{Machine: "test"}})
	must(t, err)
	return &export{dir, res.FH, func(ctx context.Context) (transport, error) {
		tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: s.RDMAAddr})
		if err != nil {
			return nil, err
		}
		if err := tr.Connect(ctx); err != nil {
			tr.Close()
			return nil, err
		}
		return tr, nil
	}}
}

// A testMount is an FS mounted on a directory of its own.
type testMount struct {
	dir string
	fs  *FS
	srv *Server
}

// mountConfig says how a test mounts; the zero value is the usual.
type mountConfig struct {
	opts    Options
	mount   MountOptions
	buffers int                           // number of buffers; 0 is 16
	bufSize int                           // 0 is MaxIOSize
	wrap    func(nfs3.Caller) nfs3.Caller // stands between the client and the server
}

// mount mounts the export until the test ends.
func (e *export) mount(t *testing.T, cfg mountConfig) *testMount {
	t.Helper()
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
		cfg.opts.AcRegMin, cfg.opts.AcRegMax, cfg.opts.AcDirMin, cfg.opts.AcDirMax = d.AcRegMin, d.AcRegMax, d.AcDirMin, d.AcDirMax
	}
	if cfg.buffers == 0 {
		cfg.buffers = 16
	}
	if cfg.bufSize == 0 {
		cfg.bufSize = MaxIOSize
	}
	pool := membuf.NewPool(cfg.bufSize, cfg.buffers)
	cfg.opts.Buffers = pool
	fs, err := New(t.Context(), nfs3.NewClient(caller, nfs3.Options{}), e.root, cfg.opts)
	if err != nil {
		conn.Close()
		t.Fatal(err)
	}
	dir := t.TempDir()
	// other users get to the mount through it
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if cfg.mount.FsName == "" {
		cfg.mount.FsName = "127.0.0.1:" + e.dir
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
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		fs.Close(ctx)
		if n := pool.Out(); n != 0 {
			t.Errorf("%d buffers are still out", n)
		}
		pool.Close()
		conn.Close()
	})
	return m
}

func (m *testMount) unmount(t *testing.T) {
	t.Helper()
	err := m.srv.Unmount()
	for range 50 { // a process that ended lets go of its files a little later
		if err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
		err = m.srv.Unmount()
	}
	t.Errorf("%v; taking it away by force", err)
	if err := m.srv.ForceUnmount(); err != nil {
		t.Error(err)
		_ = unix.Unmount(m.dir, unix.MNT_DETACH)
	}
}

func (m *testMount) path(name string) string { return filepath.Join(m.dir, name) }
