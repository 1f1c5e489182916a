package knfsd

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// A mount is a guest's export that is mounted on a directory.
type mount struct {
	dir string
	tr  *xprt.Transport
	fs  *vfs.FS
}

// opTimeout bounds every operation that does not depend on the amount of data, on a busy machine.
const opTimeout = 2 * time.Minute

// root returns the file handle of an export from the MOUNT service.
func (b bench) root(t *testing.T, export string) nfs3.FH {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	root, err := mountd.Mount(ctx, mountd.Args{Host: b.Mount.Addr().String(), Port: int(b.Mount.Port()),
		Export: export, Cred: &sunrpc.AuthSys{Machine: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	return root.FH
}

// A logBuffer keeps a log, which is printed only if the test fails.
type logBuffer struct {
	mu  sync.Mutex
	buf strings.Builder // guarded by mu
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// transport returns a transport that is connected to the server until the test ends. change, if not
// nil, changes its configuration.
func (b bench) transport(t *testing.T, change func(*xprt.Config)) *xprt.Transport {
	t.Helper()
	var log logBuffer
	cfg := xprt.Config{Provider: b.newProvider(t), Addr: b.RDMA,
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: &log})}
	if change != nil {
		change(&cfg)
	}
	tr, err := xprt.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr.Close()
		if t.Failed() {
			t.Logf("%s%+v", log.String(), tr.Stats())
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	return tr
}

// mount mounts /export until the test ends.
func (b bench) mount(t *testing.T, change func(*xprt.Config)) *mount {
	t.Helper()
	return b.mountWith(t, change, nil)
}

// mountWith is mount with other options of the file system. options, if not nil, changes them.
func (b bench) mountWith(t *testing.T, change func(*xprt.Config), options func(*vfs.Options)) *mount {
	t.Helper()
	root := b.root(t, lab.ExportRW)
	tr := b.transport(t, change)
	ctx, cancel := context.WithTimeout(context.Background(), opTimeout)
	defer cancel()
	opts := vfs.DefaultOptions()
	opts.ACL = nfsacl.NewClient(tr)
	if options != nil {
		options(&opts)
	}
	fs, err := vfs.New(ctx, nfs3.NewServer(nfs3.NewClient(tr)), root, opts)
	if err != nil {
		t.Fatal(err)
	}
	return &mount{dir: mounts.Mount(t, fs, "lab:"+lab.ExportRW), tr: tr, fs: fs}
}

var run = mounts.Run

// sum returns the SHA-256 sum of a file on the host.
func sum(t *testing.T, file string) string {
	t.Helper()
	sum, _, _ := strings.Cut(run(t, "", "sha256sum", file), " ")
	return sum
}

// serverSum returns the SHA-256 sum of a file below /export, as the server computes it.
func (b bench) serverSum(t *testing.T, file string) string {
	t.Helper()
	out, err := b.Run("sha256sum " + lab.ExportRW + "/" + file)
	if err != nil {
		t.Fatal(err)
	}
	sum, _, _ := strings.Cut(out, " ")
	return sum
}

// goTree returns a source tree below GOROOT.
func goTree(t *testing.T, sub string) string {
	t.Helper()
	return filepath.Join(strings.TrimSpace(run(t, "", "go", "env", "GOROOT")), "src", sub)
}
