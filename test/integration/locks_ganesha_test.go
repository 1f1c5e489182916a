package integration

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
)

// TestLocksOfGanesha runs the lock manager of NFS-Ganesha on a host of the server, with a port
// mapper and a status monitor there. The server grants blocked locks by callback.
func TestLocksOfGanesha(t *testing.T) {
	if !inOwnProcess(t) {
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
