package integration

import (
	"os"
	"os/exec"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
)

// ownNetwork is the environment variable of a test program that runs in a network namespace for one
// test.
const ownNetwork = "NFSRDMAD_OWN_NETWORK"

// inOwnNetwork runs the test again in a new network namespace, in which port 111 is free. It
// returns true in that run.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownNetwork) == t.Name() {
		return true
	}
	testutil.NeedsPrograms(t, "unshare")
	args := []string{"--net", "--mount", "--propagation", "private", os.Args[0], "-test.run=^" + t.Name() + "$"}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	cmd := exec.CommandContext(t.Context(), "unshare", args...)
	cmd.Env = append(os.Environ(), ownNetwork+"="+t.Name())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a new network namespace: %v\n%s", err, out)
	} else {
		t.Logf("in a new network namespace:\n%s", out)
	}
	return false
}

// TestLocksOfGanesha runs the lock manager of NFS-Ganesha on a host of the server, with a port
// mapper and a status monitor there. The server grants blocked locks by callback.
func TestLocksOfGanesha(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	g := ganeshatest.Start(t, t.TempDir(), ganeshatest.OwnHost())
	front := serve(t, nfsserve.Config{Backend: g.Addr()})
	service := nlm.NewService(nlm.ServiceConfig{Listen: ganeshatest.ClientAddr + ":0"})
	t.Cleanup(service.Close)
	e := &lockExport{rdma: front.RDMAAddr, export: mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export},
		service: service, caller: ganeshatest.ClientAddr}
	a, b := testLocks(t, e)
	if a.locks.Counters.Callbacks.Load()+b.locks.Counters.Callbacks.Load() == 0 {
		t.Errorf("the server granted no lock by callback; %s", service.Status())
	}
}
