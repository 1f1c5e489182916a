package nfsd

import (
	"net/netip"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// lock sends LOCK for a whole file.
func (c *client) lock(from netip.AddrPort, cred []byte, fh nfs3.FH) (nlm.Stat, error) {
	a := nlm.Args{Region: nlm.Region{Caller: "client", FH: fh.Bytes(), OH: cred}}
	m := &sunrpc.Message{Prog: nlm.Program, Vers: nlm.Version, Proc: uint32(nlm.ProcLock), Cred: cred,
		Args: nlm.AppendArgs(nil, nlm.ProcLock, &a)}
	if err := (&caller{s: c.s, peer: from, try: true}).Call(c.Ctx, m); err != nil {
		return 0, err
	}
	var res nlm.Res
	err := nlm.ParseRes(nlm.ProcLock, m.Result, &res)
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
		want nlm.Stat
	}{
		{"owner", user, private, nlm.Granted},
		{"reader", other, read, nlm.Granted},
		{"writer", other, write, nlm.Granted},
		{"neither reader nor writer", other, private, nlm.Failed},
		{"squashed root", root, private, nlm.Failed},
		{"unknown flavor", []byte{0, 0, 0, 6, 0, 0, 0, 0}, read, nlm.Failed},
		{"directory", user, dir, nlm.Failed},
		{"removed file", user, removed, nlm.StaleFH},
	} {
		if got, err := c.lock(peer, tt.cred, tt.fh); err != nil || got != tt.want {
			t.Errorf("%s: got %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
}
