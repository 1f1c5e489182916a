package restart

import (
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfstest"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// knfsd boots a stock Linux server in a virtual machine. A second mount is the directory of the
// server.
func knfsd(t *testing.T) *export {
	t.Helper()
	g := lab.Start(t, lab.Options{KillSafe: true})
	return &export{source: "127.0.0.1:" + lab.ExportRW, options: []string{"port=" + nfstest.PortOf(t, g.RDMA.String()),
		"mountport=" + nfstest.PortOf(t, g.Mount.String()), "nlmport=" + nfstest.PortOf(t, g.NLM.String())}}
}

// TestRestartsWithKnfsd needs the images of the lab. `make test-lab` runs it.
func TestRestartsWithKnfsd(t *testing.T) {
	lab.SkipIfDisabled(t)
	if !nfstest.InOwnProcess(t) {
		return
	}
	a := mustAmount(t)
	if !a.soak {
		a.kills, a.leaves, a.pause = 3, 2, 3*time.Second
	}
	testRestarts(t, knfsd(t), a)
}

// TestSyncAfterKillWithKnfsd needs the images of the lab. `make test-lab` runs it.
func TestSyncAfterKillWithKnfsd(t *testing.T) {
	lab.SkipIfDisabled(t)
	if !nfstest.InOwnProcess(t) {
		return
	}
	a := mustAmount(t)
	if !a.soak {
		a.syncs = 8
	}
	testSyncAfterKill(t, knfsd(t), a.syncs)
}
