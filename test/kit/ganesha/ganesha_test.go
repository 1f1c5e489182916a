package ganesha

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestServersStopWithTest runs two servers at the same time, mounts from both, and checks that
// neither answers after the test that started it.
func TestServersStopWithTest(t *testing.T) {
	var stopped []*Server
	t.Run("running", func(t *testing.T) {
		for range 2 {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644); err != nil {
				t.Fatal(err)
			}
			s := Start(t, dir)
			args := mountd.Args{Host: s.Host, Port: s.MountPort, Export: s.Export,
				Cred: &sunrpc.AuthSys{Machine: "test"}}
			res, err := mountd.Mount(t.Context(), args)
			if err != nil {
				t.Fatal(err)
			}
			if res.FH.IsZero() {
				t.Error("got an empty file handle")
			}
			stopped = append(stopped, s)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, s := range stopped {
		if err := null(ctx, s.Addr()); err == nil {
			t.Errorf("server at %s still answers", s.Addr())
		}
	}
}

// TestStopAfterFailedStart stops a program twice, as launch and the end of the test do when the
// program does not become ready.
func TestStopAfterFailedStart(t *testing.T) {
	r, err := startProgram(exec.Command("cat"))
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	r.stop()
}
