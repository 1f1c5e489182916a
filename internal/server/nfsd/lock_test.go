package nfsd

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// lock sends LOCK for a whole file.
func (c *client) lock(from netip.AddrPort, cred []byte, fh nfs3.FH) (nlmwire.Stat, error) {
	a := nlmwire.Args{Region: nlmwire.Region{Caller: "client", FH: fh.Bytes(), OH: cred}}
	m := &sunrpc.Message{Prog: nlmwire.Program, Vers: nlmwire.Version, Proc: uint32(nlmwire.ProcLock), Cred: cred,
		Args: nlmwire.AppendArgs(nil, nlmwire.ProcLock, &a)}
	if err := (&caller{s: c.s, peer: from, try: true}).Call(c.Ctx, m); err != nil {
		return 0, err
	}
	var res nlmwire.Res
	err := nlmwire.ParseRes(nlmwire.ProcLock, m.Result, &res)
	return res.Stat, err
}

func TestLockNeedsAccess(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, func(cfg *Config) { cfg.NoRootSquash = false })
	other := mounts.Credential(2000, 2000)
	read := c.MustCreate(user, c.Root, "read", 0o644)
	write := c.MustCreate(user, c.Root, "write", 0o622)
	private := c.MustCreate(user, c.Root, "private", 0)
	dir := c.mkdir(user, c.Root, "dir", 0o777)
	removed := c.MustCreate(user, c.Root, "removed", 0o666)
	c.OK(c.Remove(c.Ctx, user, c.Root, "removed", new(nfs3.WccData)))
	for _, tt := range []struct {
		name string
		cred []byte
		fh   nfs3.FH
		want nlmwire.Stat
	}{
		{"owner", user, private, nlmwire.Granted},
		{"reader", other, read, nlmwire.Granted},
		{"writer", other, write, nlmwire.Granted},
		{"neither reader nor writer", other, private, nlmwire.Failed},
		{"squashed root", root, private, nlmwire.Failed},
		{"unknown flavor", []byte{0, 0, 0, 6, 0, 0, 0, 0}, read, nlmwire.Failed},
		{"directory", user, dir, nlmwire.Failed},
		{"removed file", user, removed, nlmwire.StaleFH},
	} {
		if got, err := c.lock(peer, tt.cred, tt.fh); err != nil || got != tt.want {
			t.Errorf("%s: got %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
}
