package integration

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

func TestMain(m *testing.M) {
	if os.Getenv(lockHelper) != "" {
		runLockHelper()
		return
	}
	mounts.MainOwnProcess(m)
}

// serve runs a server in this process until the test ends.
func serve(t *testing.T, cfg nfsserve.Config) *nfsserve.Server {
	t.Helper()
	cfg.RDMAListen, cfg.NoRootSquash, cfg.StateDir = "127.0.0.1:0", true, t.TempDir()
	if cfg.Provider == nil {
		cfg.Provider = softiwarp.New(softiwarp.Config{})
	}
	s, err := nfsserve.Run(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
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
	crc    bool
	tune   func(*xprt.Config) // changes the transport's configuration; may be nil
}

// mountIt mounts an export, served by this process, until the test ends.
func mountIt(t *testing.T, c mountConfig) *mount {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c.export.Cred = &sunrpc.AuthSys{Machine: "test"}
	root, err := mountd.Mount(ctx, c.export)
	if err != nil {
		t.Fatal(err)
	}
	cfg := xprt.Config{Provider: softiwarp.New(softiwarp.Config{CRC: c.crc}), Addr: c.rdma}
	if c.tune != nil {
		c.tune(&cfg)
	}
	tr, err := xprt.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	err = tr.Connect(ctx)
	var injected *faults.Error
	for errors.As(err, &injected) { // a mount would fail; the tests need a connection
		err = tr.Connect(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	fs, err := fusefs.New(ctx, nfs3.NewClient(tr, nfs3.Options{}), root.FH, fusefs.DefaultOptions())
	if err != nil {
		t.Fatal(err)
	}
	return &mount{dir: mounts.Mount(t, fs, c.export.Host+":"+c.export.Export), tr: tr}
}

var run = mounts.Run

// goTree returns the path of a directory below GOROOT/src.
func goTree(t *testing.T, sub string) string {
	t.Helper()
	return filepath.Join(strings.TrimSpace(run(t, "", "go", "env", "GOROOT")), "src", sub)
}

func countFiles(t *testing.T, dir string) int {
	t.Helper()
	n := 0
	err := filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// checkTransports checks the counters of two transports without errors. One wrote, the other read.
func checkTransports(t *testing.T, wrote, read xprt.Stats) {
	t.Helper()
	for _, s := range []xprt.Stats{wrote, read} {
		if s.Connects != 1 || s.BadXIDs != 0 || s.BadReply != 0 || s.FailedMarshal != 0 ||
			s.RemoteAccessErrors != 0 || s.MRsOrphaned != 0 || s.MRsRecycled != 0 {
			t.Errorf("got counters %+v, want one connection and no errors", s)
		}
		t.Logf("%d RPCs, %d read, %d write, %d reply segments, %d MRs", s.Sends, s.ReadChunks, s.WriteChunks,
			s.ReplyChunks, s.MRsAllocated)
		t.Logf("%d keys invalidated by the server, %d by LOCAL_INV", s.RemoteInvalidations, s.LocalInvNeeded)
	}
	if wrote.ReadChunks == 0 || read.WriteChunks == 0 || read.RemoteInvalidations == 0 {
		t.Errorf("got %d read chunks, %d write chunks and %d remote invalidations, want some of each", wrote.ReadChunks,
			read.WriteChunks, read.RemoteInvalidations)
	}
}
