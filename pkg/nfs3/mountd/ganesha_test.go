package mountd_test

import (
	"errors"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// TestGanesha finds NFS-Ganesha through rpcbind, mounts and unmounts. All of it runs in a network namespace of its own, where port 111 is free.
func TestGanesha(t *testing.T) {
	// The thread is not unlocked: it is of no use to others, and ends with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("no network namespace (this test needs root): %v", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s := ganeshatest.Start(t, t.TempDir(), ganeshatest.SharedPortmap())
	a := mountd.Args{Host: s.Host, Export: s.Export, Cred: &sunrpc.AuthSys{Machine: "test"}}

	if port, err := mountd.GetPort(t.Context(), a, 100003, 3); err != nil || port != s.NFSPort {
		t.Errorf("NFS is at port %d, error %v; want %d", port, err, s.NFSPort)
	}
	var e *mountd.Error
	if port, err := mountd.GetPort(t.Context(), a, 100021, 4); !errors.As(err, &e) || e.Kind != mountd.NotRegistered {
		t.Errorf("NLM, which does not run, is at port %d, error %v", port, err)
	}
	res, err := mountd.Mount(t.Context(), a)
	if err != nil || res.FH.IsZero() || res.Port != s.MountPort || !slices.Contains(res.AuthFlavors, uint32(sunrpc.FlavorSys)) {
		t.Errorf("mounted %+v, error %v", res, err)
	}
	if err := mountd.Null(t.Context(), a); err != nil {
		t.Error(err)
	}
	exports, err := mountd.Exports(t.Context(), a)
	if err != nil || len(exports) != 1 || exports[0].Dir != s.Export {
		t.Errorf("exports %+v, error %v", exports, err)
	}
	if _, err := mountd.Dump(t.Context(), a); err != nil {
		t.Error(err)
	}
	if err := mountd.Unmount(t.Context(), a); err != nil {
		t.Error(err)
	}
	a.Export = "/no/such/export" // which this server does not tell from one that is for others
	if _, err := mountd.Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != mountd.Refused || !errors.Is(err, syscall.EACCES) {
		t.Errorf("an export that does not exist: %v", err)
	}
}
