package restart

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// knfsd boots a stock Linux server in a virtual machine. A second mount is the directory of the
// server.
func knfsd(t *testing.T) *export {
	t.Helper()
	g := lab.Start(t, lab.Options{KillSafe: true, ExpectedKernelErrors: []string{lostReads}})
	return &export{source: "127.0.0.1:" + lab.ExportRW, options: []string{"port=" + mounts.PortOf(t, g.RDMA.String()),
		"mountport=" + mounts.PortOf(t, g.Mount.String()), "nlmport=" + mounts.PortOf(t, g.NLM.String())}}
}

// lostReads is what ib_destroy_qp_user of Linux 6.12 reports when a connection ends during the RDMA
// Reads of the server: it does not put their memory regions back.
const lostReads = `WARNING: .*drivers/infiniband/core/verbs\.c:\d+ ib_destroy_qp_user`

// soakOnly skips a routine run. A connection that ends with RDMA in progress can damage the memory
// of a server with siw ("Bad page state", Linux 6.12), so a run can fail without a fault of the
// client.
func soakOnly(t *testing.T) amount {
	t.Helper()
	a := mustAmount(t)
	if !a.soak {
		t.Skipf("part of `make soak`: %s is not set", restartsEnv)
	}
	return a
}

// TestRestartsWithKnfsd needs the images of the lab.
func TestRestartsWithKnfsd(t *testing.T) {
	a := soakOnly(t)
	if !mounts.InOwnProcess(t) {
		return
	}
	testRestarts(t, knfsd(t), a)
}

// TestSyncAfterKillWithKnfsd needs the images of the lab.
func TestSyncAfterKillWithKnfsd(t *testing.T) {
	a := soakOnly(t)
	if !mounts.InOwnProcess(t) {
		return
	}
	testSyncAfterKill(t, knfsd(t), a.syncs)
}
