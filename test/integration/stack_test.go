package integration

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strconv"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/lockrace"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

func TestMain(m *testing.M) {
	lockrace.Main()
	if os.Getenv(lockHelper) != "" {
		runLockHelper()
		return
	}
	if args := os.Getenv(floodHelper); args != "" {
		runFloodHelper(args)
		return
	}
	mounts.MainOwnProcess(m)
}

// serve runs a server in this process until the test ends.
func serve(t *testing.T, cfg nfsserve.Config) *nfsserve.Server {
	t.Helper()
	cfg.RDMAListen, cfg.NoRootSquash, cfg.AllowSUID, cfg.StateDir = "127.0.0.1:0", true, true, t.TempDir()
	if cfg.Provider == nil {
		cfg.Provider = softiwarp.New(softiwarp.Config{})
	}
	s, err := nfsserve.Run(context.Background(), cfg)
	kit.Must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	return s
}

// A mount is a mounted export.
type mount struct {
	dir string
	tr  *xprt.Transport
}

type mountConfig struct {
	rdma   netip.AddrPort
	export mountd.Args
	tune   func(*xprt.Config) // changes the transport's configuration; may be nil
}

// mountIt mounts an export, served by this process, until the test ends.
func mountIt(t *testing.T, c mountConfig) *mount {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	c.export.Cred = &sunrpc.AuthSys{Machine: "test"}
	root, err := mountd.Mount(ctx, c.export)
	kit.Must(t, err)
	cfg := xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: c.rdma}
	if c.tune != nil {
		c.tune(&cfg)
	}
	tr, err := xprt.New(cfg)
	kit.Must(t, err)
	t.Cleanup(func() { tr.Close() })
	err = tr.Connect(ctx)
	var injected *faults.Error
	for errors.As(err, &injected) { // a mount would fail; the tests need a connection
		err = tr.Connect(ctx)
	}
	kit.Must(t, err)
	fs, err := vfs.New(ctx, nfs3.NewServer(nfs3.NewClient(tr)), root.FH, vfs.DefaultOptions())
	kit.Must(t, err)
	return &mount{dir: mounts.Mount(t, fs, c.export.Host+":"+c.export.Export), tr: tr}
}

// run is short for [mounts.Run].
var run = mounts.Run

// embedded returns the MOUNT arguments of an embedded server.
func embedded(t *testing.T, s *nfsserve.Server) mountd.Args {
	t.Helper()
	n, err := strconv.Atoi(mounts.PortOf(t, s.TCPAddr))
	kit.Must(t, err)
	return mountd.Args{Host: "127.0.0.1", Port: n, Export: "/"}
}
