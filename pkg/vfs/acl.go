package vfs

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/acl"
)

// POSIX ACLs are the extended attributes system.posix_acl_access and system.posix_acl_default. The
// client gets and sets them with NFSACL. NFSv3 has no other extended attributes.

// aclsOf returns what is known of the ACLs of a node.
func aclsOf(ino *inode) *acl.State {
	if s := ino.acls.Load(); s != nil {
		return s
	}
	ino.acls.CompareAndSwap(nil, new(acl.State))
	return ino.acls.Load()
}

func (fs *FS) aclNode(ino *inode) acl.Node {
	return acl.Node{Handle: ino.fh, Attr: &ino.attr, State: aclsOf(ino),
		Update: func(a *nfs.Attr, start uint64) bool { return fs.updateAttr(ino, a, start) }}
}

// setACLs prepares the cache of ACLs, if the server supports NFSACL. The error is that of the transport.
func (fs *FS) setACLs(ctx context.Context, cred []byte, client *nfsacl.Client) error {
	if client == nil {
		return nil
	}
	ok, err := acl.Supported(ctx, cred, client)
	if ok {
		fs.acl = &acl.Cache{Client: client, Attrs: &fs.attrs, Busy: &fs.busy, Spawn: fs.spawn}
	}
	return err
}

// stopACLs ends the calls that get ACLs ahead.
func (fs *FS) stopACLs() {
	if fs.acl != nil {
		fs.acl.Stop()
	}
}

// SupportsACLs reports whether the server supports NFSACL and the client uses it.
func (fs *FS) SupportsACLs() bool { return fs.acl != nil }

// isACL reports whether the name of an extended attribute is that of an ACL.
func isACL(name string) bool { return name == nfsacl.XattrAccess || name == nfsacl.XattrDefault }

// GetXAttr handles getxattr(2).
func (fs *FS) GetXAttr(k *kernel.Request, name string, dest []byte) (n int, s fuse.Status) {
	if fs.acl == nil || !isACL(name) {
		fs.Counters.Ops[kernel.OpGetXAttr].Add(1)
		return 0, fuse.Status(syscall.EOPNOTSUPP)
	}
	r, ino, err := fs.onNode(k)
	if err == nil {
		n, err = fs.getXAttr(r, ino, name, dest)
	}
	return n, fs.end(r, err)
}

func (fs *FS) getXAttr(r *request, ino *inode, name string, dest []byte) (n int, err error) {
	fs.countACL(ino, r.cred)
	acls, err := fs.acls(r, ino)
	if err != nil {
		return 0, err
	}
	value := acls.Access
	if name == nfsacl.XattrDefault {
		value = acls.Default
	}
	if len(value) == 0 {
		return 0, syscall.ENODATA
	}
	if n = value.XattrSize(); n > len(dest) {
		return n, syscall.ERANGE
	}
	value.AppendXattr(dest[:0])
	return n, nil
}

// ListXAttr handles listxattr(2).
func (fs *FS) ListXAttr(k *kernel.Request, dest []byte) (n int, s fuse.Status) {
	if fs.acl == nil {
		return 0, fuse.Status(syscall.EOPNOTSUPP)
	}
	r, ino, err := fs.onNode(k)
	if err == nil {
		n, err = fs.listXAttr(r, ino, dest)
	}
	return n, fs.end(r, err)
}

func (fs *FS) listXAttr(r *request, ino *inode, dest []byte) (n int, err error) {
	fs.countACL(ino, r.cred)
	acls, err := fs.acls(r, ino)
	if nfs.CallErrno(err) == syscall.EOPNOTSUPP {
		return 0, nil // a file system of the server without ACLs
	}
	if err != nil {
		return 0, err
	}
	var list []byte
	if len(acls.Access) > 0 {
		list = append(list, nfsacl.XattrAccess+"\x00"...)
	}
	if len(acls.Default) > 0 {
		list = append(list, nfsacl.XattrDefault+"\x00"...)
	}
	if len(list) > len(dest) {
		return len(list), syscall.ERANGE
	}
	return copy(dest, list), nil
}

// SetXAttr handles setxattr(2).
func (fs *FS) SetXAttr(k *kernel.Request, name string, value []byte) fuse.Status {
	if fs.acl == nil || !isACL(name) {
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	r, ino, err := fs.onNode(k)
	if err != nil {
		return fs.end(r, err)
	}
	list, err := nfsacl.ParseXattr(value)
	if err != nil {
		return fs.end(r, syscall.EINVAL)
	}
	return fs.end(r, fs.setACL(r, ino, name, list))
}

// RemoveXAttr handles removexattr(2).
func (fs *FS) RemoveXAttr(k *kernel.Request, name string) fuse.Status {
	if fs.acl == nil || !isACL(name) {
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	r, ino, err := fs.onNode(k)
	if err == nil {
		err = fs.setACL(r, ino, name, nil)
	}
	return fs.end(r, err)
}

// countACL records a request for the ACL of ino at the directory that listed ino.
func (fs *FS) countACL(ino *inode, cred []byte) {
	if dir := fs.inodes.get(ino.dir.Place().Dir); dir != nil {
		dir.dir.CountACL(cred)
	}
}

// acls returns the ACLs of a node. An ACL that says no more than the mode is left out.
func (fs *FS) acls(r *request, ino *inode) (nfsacl.ACLs, error) {
	acls, err := fs.acl.Get(r, r.cred, fs.aclNode(ino))
	if err != nil {
		return acls, fs.checkStale(ino, acl.Errno(err))
	}
	return acls, nil
}

// dropACLs drops the ACLs of a node after a reply to a call that may have changed them.
func (fs *FS) dropACLs(ino *inode) {
	if fs.acl != nil {
		aclsOf(ino).Drop(&fs.attrs.Clock)
	}
}

// setACL replaces one ACL of a node. An empty access ACL stands for that of the mode. A server
// replaces both ACLs of a directory, so the call also contains the other one.
func (fs *FS) setACL(r *request, ino *inode, name string, value nfsacl.ACL) error {
	dir := ino.attr.IsDir()
	if name == nfsacl.XattrDefault && !dir {
		if len(value) == 0 {
			return nil
		}
		return syscall.EACCES // as Linux's local file systems
	}
	acls := nfsacl.ACLs{Mask: nfsacl.MaskAccess, Access: value}
	if dir {
		current, err := fs.acl.Ask(r, r.cred, fs.aclNode(ino)) // another client may have changed the other ACL
		if err != nil {
			return fs.checkStale(ino, acl.Errno(err))
		}
		acls.Mask |= nfsacl.MaskDefault
		if acls.Default = current.Default; name == nfsacl.XattrDefault {
			acls.Access, acls.Default = current.Access, value
		}
	}
	if err := fs.sync(r, ino); err != nil { // the new ACL may forbid a later COMMIT
		return err
	}
	var a nfs.Attr
	if _, err := fs.fetch(r, r.cred, ino, &a); err != nil {
		return err
	}
	if len(acls.Access) == 0 {
		acls.Access = nfsacl.FromMode(a.Mode)
	}
	return fs.sendACLs(r, ino, &acls, nfsacl.Owner{UID: a.UID, GID: a.GID})
}

// sendACLs sends a SETACL and stores the attributes of the reply.
func (fs *FS) sendACLs(r *request, ino *inode, acls *nfsacl.ACLs, owner nfsacl.Owner) error {
	fs.invalidateAttr(ino)
	for try := 0; ; try++ {
		var attr nfs.PostOpAttr
		start := fs.attrs.Now()
		err := fs.acl.Client.Set(r, r.cred, ino.fh, acls, owner, &attr)
		fs.dropACLs(ino)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		fs.dropAttr(ino) // the mode has changed
		if err != nil {
			fs.invalidateAttr(ino)
			return fs.checkStale(ino, acl.Errno(err))
		}
		fs.attrs.NewEpoch(&ino.attr)
		fs.updateChange(ino, &nfs.Change{HasAfter: attr.Present, After: attr.Attr}, start, true)
		return nil
	}
}

// newMode returns the mode of a new object in dir. The umask of the caller applies only when the
// directory has no default ACL (umask(2)). The server applies the default ACL.
func (fs *FS) newMode(r *request, dir *inode, mode, umask uint32) nfs.SetAttr {
	if !fs.hasDefaultACL(r, dir) {
		mode &^= umask
	}
	return modeOnly(mode)
}

// hasDefaultACL reports whether new objects in dir inherit an ACL. When the server does not say,
// they do not.
func (fs *FS) hasDefaultACL(r *request, dir *inode) bool {
	if fs.acl == nil {
		return false
	}
	acls, err := fs.acls(r, dir)
	return err == nil && len(acls.Default) > 0
}
