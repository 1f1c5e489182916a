package knfsd

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/verbstest"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { verbstest.Main(m) }

// A mount is an export of a guest on a directory.
type mount struct {
	dir string
	tr  *xprt.Transport
}

type mountConfig struct {
	export string
	crc    bool
}

// mountIt mounts until the test ends.
func mountIt(t *testing.T, g *lab.Guest, c mountConfig) *mount {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	root, err := mountd.Mount(ctx, mountd.Args{Host: g.Mount.Addr().String(), Port: int(g.Mount.Port()), Export: c.export, Cred: &sunrpc.AuthSys{Machine: "test"}})
	if err != nil {
		t.Fatal(err)
	}
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: t.Output()})
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{CRC: c.crc}), Addr: g.RDMA, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr.Close()
		t.Logf("%+v", tr.Stats())
	})
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
	}
	fs, err := fusefs.New(ctx, nfs3.NewClient(tr, nfs3.Options{}), root.FH, fusefs.DefaultOptions())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	srv, err := fusefs.Mount(dir, fs, fusefs.MountOptions{FsName: "lab:" + c.export})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Unmount(); err != nil {
			t.Errorf("unmount: %v", err)
			srv.ForceUnmount()
		}
		srv.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		fs.Close(ctx)
	})
	return &mount{dir: dir, tr: tr}
}

// run runs a program and fails the test, with its output, when it fails.
func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestFirstLight copies a file in and out, and has the server itself look at it.
func TestFirstLight(t *testing.T) {
	for _, kernel := range lab.Kernels {
		t.Run(kernel, func(t *testing.T) {
			g := lab.Start(t, lab.Options{Kernel: kernel})
			m := mountIt(t, g, mountConfig{export: lab.ExportRW})
			local := t.TempDir()
			src := filepath.Join(local, "src")
			run(t, "", "dd", "if=/dev/urandom", "of="+src, "bs=1000001", "count=9", "status=none")
			sum, _, _ := strings.Cut(run(t, "", "sha256sum", src), " ")
			run(t, "", "cp", src, filepath.Join(m.dir, "file"))
			if got, _, _ := strings.Cut(g.MustRun("sha256sum /export/file"), " "); got != sum {
				t.Errorf("the server has a file with sum %s, sent was one with %s", got, sum)
			}
			cold := mountIt(t, g, mountConfig{export: lab.ExportRW})
			run(t, "", "cmp", src, filepath.Join(cold.dir, "file"))
			if err := os.Remove(filepath.Join(m.dir, "file")); err != nil {
				t.Error(err)
			}
		})
	}
}
