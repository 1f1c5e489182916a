// Package mounts has what tests of NFS servers and of mounts share: a client, and the program
// nfsrdmad as a server and as a mount in other processes. Only tests import it.
package mounts

import (
	"context"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A Client calls an NFS server as Cred. The methods that have no error result fail the test.
type Client struct {
	*nfs3.Client
	T    testing.TB
	Root nfs3.FH // of the export
	Ctx  context.Context
	Cred []byte
}

// Credential returns an AUTH_SYS credential.
func Credential(uid, gid uint32, gids ...uint32) []byte {
	return sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test", UID: uid, GID: gid, GIDs: gids})
}

// OK ends the test if err is not nil.
func (c *Client) OK(err error) {
	c.T.Helper()
	if err != nil {
		c.T.Fatal(err)
	}
}

// Want checks that err has the error number of an NFS status.
func (c *Client) Want(err error, errno syscall.Errno) {
	c.T.Helper()
	if got := nfs3.Errno(err); err == nil || got != errno {
		c.T.Errorf("got %v (%v), want %v", err, got, errno)
	}
}

// MustCreate creates a file that must not exist.
func (c *Client) MustCreate(cred []byte, dir nfs3.FH, name string, mode uint32) nfs3.FH {
	c.T.Helper()
	var res nfs3.CreateResult
	c.OK(c.Create(c.Ctx, cred, dir, name,
		&nfs3.CreateHow{Mode: nfs3.Guarded, Attr: nfs3.SetAttr{HasMode: true, Mode: mode}}, &res))
	return res.FH
}

// MustLookup looks up a name that must exist.
func (c *Client) MustLookup(dir nfs3.FH, name string) nfs3.LookupResult {
	c.T.Helper()
	var res nfs3.LookupResult
	c.OK(c.Lookup(c.Ctx, c.Cred, dir, name, &res))
	return res
}
