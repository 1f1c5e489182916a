package programs

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// programsEnv makes the tests of this package run. `make test-programs` sets it.
const programsEnv = "NFSRDMAD_PROGRAMS"

func TestMain(m *testing.M) {
	if os.Getenv(programsEnv) != "1" {
		fmt.Println("the tests of this package run with make test-programs")
		return
	}
	kit.MainNeedsRoot(m)
}

var run = mounts.Run

// A server exports dir.
type server struct {
	dir     string // on the server
	mount   func(t *testing.T, options ...string) string
	restart func(t *testing.T) // after SIGKILL
}

func startEmbedded(t *testing.T) *server {
	t.Helper()
	s := mounts.ServeDir(t, mounts.OpenTempDir(t), "--no-root-squash", "--allow-suid")
	return &server{
		dir: s.Dir,
		mount: func(t *testing.T, options ...string) string {
			t.Helper()
			return mounts.MountServed(t, s, options...)
		},
		restart: func(t *testing.T) { s.Restart(t, syscall.SIGKILL, nil) },
	}
}

func startGanesha(t *testing.T, options ...ganesha.Option) *server {
	t.Helper()
	g := ganesha.Start(t, mounts.OpenTempDir(t), options...)
	return &server{
		dir: g.Export,
		mount: func(t *testing.T, options ...string) string {
			t.Helper()
			return mounts.MountGanesha(t, g, options...)
		},
		restart: func(t *testing.T) { g.Restart(t, func() {}) },
	}
}

// onEachServer runs a test with the embedded server and with NFS-Ganesha.
func onEachServer(t *testing.T, test func(t *testing.T, s *server)) {
	t.Run("embedded", func(t *testing.T) { test(t, startEmbedded(t)) })
	t.Run("ganesha", func(t *testing.T) { test(t, startGanesha(t)) })
}

// makeDir makes a directory of a mount.
func makeDir(t *testing.T, mnt, name string) string {
	t.Helper()
	dir := filepath.Join(mnt, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
