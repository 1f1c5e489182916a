package nfsd

import (
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

var (
	extendedACL = nfsacl.ACL{
		{Tag: nfsacl.TagUserObj, Perm: 6, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagUser, Perm: 4, ID: 2000},
		{Tag: nfsacl.TagGroupObj, Perm: 4, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagMask, Perm: 6, ID: nfsacl.UndefinedID},
		{Tag: nfsacl.TagOther, Perm: 0, ID: nfsacl.UndefinedID}}
	maskBoth = uint32(nfsacl.MaskAccess | nfsacl.MaskDefault)
)

func (c *client) acls() *nfsacl.Client { return nfsacl.NewClient(&caller{s: c.s, peer: peer}) }

func (c *client) getACL(fh nfs3.FH, mask uint32) nfsacl.ACLs {
	c.T.Helper()
	var attr nfs3.PostOpAttr
	got, err := c.acls().Get(c.Ctx, c.Cred, fh, mask, &attr)
	c.OK(err)
	return got
}

func TestSetAndGetACL(t *testing.T) {
	kit.NeedsRoot(t)
	both(t, func(t *testing.T, change func(*Config)) {
		c := start(t, change)
		fh := c.MustCreate(user, c.Root, "f", 0o640)
		var attr nfs3.PostOpAttr
		set := &nfsacl.ACLs{Mask: nfsacl.MaskAccess, Access: extendedACL}
		c.OK(c.acls().Set(c.Ctx, user, fh, set, nfsacl.Owner{UID: 1000, GID: 1000}, &attr))
		if !attr.Present || attr.Mode != 0o660 {
			t.Errorf("attributes after SETACL: got %+v, want mode 660, which includes the mask", attr)
		}
		value := make([]byte, 1000)
		n, err := unix.Getxattr(filepath.Join(c.dir, "f"), nfsacl.XattrAccess, value)
		c.OK(err)
		if local, err := nfsacl.ParseXattr(value[:n]); err != nil || !slices.Equal(local, extendedACL) {
			t.Errorf("ACL on the server: got %v, %v, want %v", local, err, extendedACL)
		}
		if got := c.getACL(fh, maskBoth); !slices.Equal(got.Access, extendedACL) || len(got.Default) != 0 {
			t.Errorf("GETACL: got %+v, want %v", got, extendedACL)
		}
		var access nfs3.AccessResult
		c.OK(c.Access(c.Ctx, mounts.Credential(2000, 2000), fh, nfs3.AccessRead|nfs3.AccessModify, &access))
		if access.Access != nfs3.AccessRead {
			t.Errorf("ACCESS of the named user: got %#x, want read", access.Access)
		}
		set.Access = nfsacl.FromMode(0o600)
		c.OK(c.acls().Set(c.Ctx, user, fh, set, nfsacl.Owner{}, &attr))
		if got := c.getACL(fh, nfsacl.MaskAccess); !reflect.DeepEqual(got.Access, set.Access) {
			t.Errorf("GETACL after a minimal ACL: got %v, want %v", got.Access, set.Access)
		}
	})
}

func TestDefaultACLIsInherited(t *testing.T) {
	c := start(t, nil)
	dir := c.mkdir(user, c.Root, "d", 0o770)
	var attr nfs3.PostOpAttr
	set := &nfsacl.ACLs{Mask: maskBoth, Access: nfsacl.FromMode(0o770), Default: extendedACL}
	c.OK(c.acls().Set(c.Ctx, user, dir, set, nfsacl.Owner{UID: 1000, GID: 1000}, &attr))
	if got := c.getACL(dir, nfsacl.MaskAll); !slices.Equal(got.Default, extendedACL) {
		t.Errorf("default ACL: got %v, want %v", got.Default, extendedACL)
	}
	fh := c.MustCreate(user, dir, "f", 0o660)
	if got := c.getACL(fh, nfsacl.MaskAccess); !slices.Equal(got.Access, extendedACL) {
		t.Errorf("ACL of a new file: got %v, want %v", got.Access, extendedACL)
	}
	set.Default = nil
	c.OK(c.acls().Set(c.Ctx, user, dir, set, nfsacl.Owner{}, &attr))
	if got := c.getACL(dir, nfsacl.MaskDefault); len(got.Default) != 0 {
		t.Errorf("default ACL after its removal: got %v, want none", got.Default)
	}
}

func TestSetACLChecksPermission(t *testing.T) {
	kit.NeedsRoot(t)
	c := start(t, nil)
	fh := c.MustCreate(user, c.Root, "f", 0o666)
	set := &nfsacl.ACLs{Mask: nfsacl.MaskAccess, Access: extendedACL}
	var attr nfs3.PostOpAttr
	c.Want(c.acls().Set(c.Ctx, mounts.Credential(2000, 2000), fh, set, nfsacl.Owner{}, &attr), syscall.EPERM)
	bad := &nfsacl.ACLs{Mask: nfsacl.MaskDefault, Default: extendedACL}
	c.Want(c.acls().Set(c.Ctx, user, fh, bad, nfsacl.Owner{}, &attr), syscall.EACCES) // as setxattr(2) of a file

	ro := start(t, func(cfg *Config) { cfg.Dir, cfg.ReadOnly = c.dir, true })
	found := ro.MustLookup(ro.Root, "f")
	ro.Want(ro.acls().Set(ro.Ctx, user, found.FH, set, nfsacl.Owner{}, &attr), syscall.EROFS)
	if got := ro.getACL(found.FH, nfsacl.MaskAccess); !slices.Equal(got.Access, nfsacl.FromMode(0o666)) {
		t.Errorf("ACL after refused calls: got %v, want that of the mode", got.Access)
	}
	_, err := ro.acls().Get(ro.Ctx, user, nfs3.FH{}, nfsacl.MaskAccess, &attr)
	ro.Want(err, syscall.ESTALE)
}
