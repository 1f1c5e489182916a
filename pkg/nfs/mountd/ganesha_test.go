package mountd_test

import (
	"errors"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// TestGanesha makes every call to NFS-Ganesha and to rpcbind. It runs in a separate network
// namespace, in which port 111 is free.
func TestGanesha(t *testing.T) {
	kit.NeedsRoot(t)
	// The thread stays locked, so that the runtime ends it with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("create network namespace: %v; run as root", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link set lo up: %v: %s", err, out)
	}
	s := ganesha.Start(t, t.TempDir(), ganesha.SharedPortmap())
	a := mountd.Args{Host: s.Host, Export: s.Export, Cred: &sunrpc.AuthSys{Machine: "test"}}

	if port, err := mountd.GetPort(t.Context(), a, 100003, 3); err != nil || port != s.NFSPort {
		t.Errorf("GetPort of NFS: got port %d, error %v; want %d", port, err, s.NFSPort)
	}
	var e *mountd.Error
	if port, err := mountd.GetPort(t.Context(), a, 100021, 4); !errors.As(err, &e) || e.Kind != mountd.NotRegistered {
		t.Errorf("GetPort of NLM: got port %d, error %v; want %v", port, err, mountd.NotRegistered)
	}
	res, err := mountd.Mount(t.Context(), a)
	if err != nil || res.FH.IsZero() || res.Port != s.MountPort ||
		!slices.Contains(res.AuthFlavors, uint32(sunrpc.FlavorSys)) {
		t.Errorf("Mount: got %+v, error %v; want port %d and AUTH_SYS", res, err, s.MountPort)
	}
	if err := mountd.Null(t.Context(), a); err != nil {
		t.Errorf("Null: %v", err)
	}
	if list, err := mountd.Exports(t.Context(), a); err != nil ||
		!slices.ContainsFunc(list, func(e mountd.Export) bool { return e.Dir == s.Export }) {
		t.Errorf("Exports: got %v, error %v; want %s", list, err, s.Export)
	}
	if err := mountd.Unmount(t.Context(), a); err != nil {
		t.Errorf("Unmount: %v", err)
	}
	a.Export = "/no/such/export" // NFS-Ganesha returns the status of an export for other clients
	if _, err := mountd.Mount(t.Context(), a); !errors.As(err, &e) || e.Kind != mountd.Refused ||
		!errors.Is(err, syscall.EACCES) {
		t.Errorf("Mount of an unknown export: got error %v, want %v", err, mountd.Refused)
	}
}
