package integration

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nlm"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// TestLocksOfGanesha runs the lock manager of NFS-Ganesha on a host of the server, with a port
// mapper and a status monitor there. The server grants blocked locks by callback.
func TestLocksOfGanesha(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	g := ganesha.Start(t, t.TempDir(), ganesha.OwnHost())
	front := serve(t, nfsserve.Config{Backend: g.Addr()})
	service := nlm.NewService(nlm.ServiceConfig{Listen: ganesha.ClientAddr + ":0"})
	t.Cleanup(service.Close)
	e := &lockExport{rdma: front.RDMAAddr, export: mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export},
		service: service, caller: ganesha.ClientAddr}
	a, b := testLocks(t, e)
	if a.locks.Counters.Callbacks.Load()+b.locks.Counters.Callbacks.Load() == 0 {
		t.Errorf("the server granted no lock by callback; %s", service.Status())
	}
}
