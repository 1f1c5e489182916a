package vfs

import (
	"context"
	"errors"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// POSIX ACLs are the extended attributes system.posix_acl_access and system.posix_acl_default. The
// client gets and sets them with NFSACL. NFSv3 has no other extended attributes.

// maxCachedACL is the maximum number of entries of ACLs that are cached. It bounds the memory that
// a server can make the client use for one inode.
const maxCachedACL = 32

// nodeACLs are the ACLs of a node.
type nodeACLs struct {
	mu    sync.Mutex
	known bool
	acls  nfsacl.ACLs
	ctime nfs.Time // of the node at that time
	// changed is the clock of the last change by this mount that may change the ACLs. Replies to
	// earlier GETACLs are outdated.
	changed uint64
}

// aclsOf returns the ACLs of a node. It makes unknown ones when there are none.
func aclsOf(ino *inode) *nodeACLs {
	if c := ino.acls.Load(); c != nil {
		return c
	}
	ino.acls.CompareAndSwap(nil, new(nodeACLs))
	return ino.acls.Load()
}

// keepACLs keeps the ACLs of a node after a reply to a change by this mount that does not change them.
func (ino *inode) keepACLs(ch *nfs.Change) {
	c := ino.acls.Load()
	if c == nil || !ch.HasBefore || !ch.HasAfter {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctime == ch.Before.Ctime {
		c.ctime = ch.After.Ctime // a new entry or new data did not change the ACL
	}
}

// probeACL asks the server once whether it supports NFSACL. The error is that of the transport.
func (fs *FS) probeACL(ctx context.Context, cred []byte, client *nfsacl.Client) error {
	if client == nil {
		return nil
	}
	err := client.Null(ctx, cred)
	var accept *sunrpc.AcceptError
	var denied *sunrpc.DeniedError
	switch {
	case err == nil:
		fs.acl = client
	case errors.As(err, &accept), errors.As(err, &denied):
	default:
		return err
	}
	return nil
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
	acl := acls.Access
	if name == nfsacl.XattrDefault {
		acl = acls.Default
	}
	if len(acl) == 0 {
		return 0, syscall.ENODATA
	}
	if n = acl.XattrSize(); n > len(dest) {
		return n, syscall.ERANGE
	}
	acl.AppendXattr(dest[:0])
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
	acl, err := nfsacl.ParseXattr(value)
	if err != nil {
		return fs.end(r, syscall.EINVAL)
	}
	return fs.end(r, fs.setACL(r, ino, name, acl))
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

// acls returns the ACLs of a node. An ACL that says no more than the mode is left out.
func (fs *FS) acls(r *request, ino *inode) (nfsacl.ACLs, error) {
	acls, err := fs.sharedACLs(r, r.cred, ino)
	if err != nil {
		return acls, fs.checkStale(ino, aclError(err))
	}
	return acls, nil
}

// sharedACLs is acls, with the error of the call. It waits for a call of another goroutine, once.
func (fs *FS) sharedACLs(ctx context.Context, cred []byte, ino *inode) (nfsacl.ACLs, error) {
	if acls, ok := fs.cachedACLs(ino); ok {
		return acls, nil
	}
	done := fs.aclCalls.begin(ino)
	if done == nil {
		defer fs.aclCalls.end(ino)
		return fs.askACLs(ctx, cred, ino)
	}
	select {
	case <-done:
	case <-ctx.Done():
		return nfsacl.ACLs{}, syscall.EINTR
	}
	if acls, ok := fs.cachedACLs(ino); ok {
		return acls, nil
	}
	return fs.askACLs(ctx, cred, ino) // the other call failed, or its reply is not cacheable
}

// cachedACLs returns the ACLs of a node if they are known.
func (fs *FS) cachedACLs(ino *inode) (acls nfsacl.ACLs, ok bool) {
	c, v := ino.acls.Load(), fs.attrs.View(&ino.attr)
	if c == nil || !v.Fresh {
		return acls, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.acls, c.known && c.ctime == v.Ctime
}

// askACLs asks the server for the ACLs of a node.
func (fs *FS) askACLs(ctx context.Context, cred []byte, ino *inode) (nfsacl.ACLs, error) {
	mask := uint32(nfsacl.MaskAccess | nfsacl.MaskAccessCount)
	if ino.attr.IsDir() {
		mask = nfsacl.MaskAll
	}
	for try := 0; ; try++ {
		var attr nfs.PostOpAttr
		start := fs.attrs.Now()
		acls, err := fs.acl.Get(ctx, cred, ino.fh, mask, &attr)
		if fs.busy.Retry(ctx, err, try) {
			continue
		}
		if err != nil {
			return acls, err
		}
		if acls.Access.Minimal() {
			acls.Access = nil
		}
		if attr.Present && fs.updateAttr(ino, &attr.Attr, start) &&
			max(len(acls.Access), len(acls.Default)) <= maxCachedACL {
			c := aclsOf(ino)
			c.mu.Lock()
			if start >= c.changed {
				c.known, c.acls, c.ctime = true, acls, attr.Ctime
			}
			c.mu.Unlock()
		}
		return acls, nil
	}
}

// dropACLs drops the ACLs of a node after a reply to a call that may have changed them, and makes
// askACLs ignore replies to calls that were sent before.
func (fs *FS) dropACLs(ino *inode) {
	if fs.acl == nil {
		return
	}
	c := aclsOf(ino)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known, c.acls, c.changed = false, nfsacl.ACLs{}, fs.attrs.Tick()
}

// aclError returns EOPNOTSUPP when the server has stopped to support NFSACL.
func aclError(err error) error {
	var accept *sunrpc.AcceptError
	if errors.As(err, &accept) {
		return syscall.EOPNOTSUPP
	}
	return err
}

// setACL replaces one ACL of a node. An empty access ACL stands for that of the mode. A server
// replaces both ACLs of a directory, so the call also contains the other one.
func (fs *FS) setACL(r *request, ino *inode, name string, acl nfsacl.ACL) error {
	dir := ino.attr.IsDir()
	if name == nfsacl.XattrDefault && !dir {
		if len(acl) == 0 {
			return nil
		}
		return syscall.EACCES // as Linux's local file systems
	}
	acls := nfsacl.ACLs{Mask: nfsacl.MaskAccess, Access: acl}
	if dir {
		current, err := fs.askACLs(r, r.cred, ino) // another client may have changed the other ACL
		if err != nil {
			return fs.checkStale(ino, aclError(err))
		}
		acls.Mask |= nfsacl.MaskDefault
		if acls.Default = current.Default; name == nfsacl.XattrDefault {
			acls.Access, acls.Default = current.Access, acl
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
	return fs.setACLs(r, ino, &acls, nfsacl.Owner{UID: a.UID, GID: a.GID})
}

// setACLs sends a SETACL and stores the attributes of the reply.
func (fs *FS) setACLs(r *request, ino *inode, acls *nfsacl.ACLs, owner nfsacl.Owner) error {
	fs.invalidateAttr(ino)
	for try := 0; ; try++ {
		var attr nfs.PostOpAttr
		start := fs.attrs.Now()
		err := fs.acl.Set(r, r.cred, ino.fh, acls, owner, &attr)
		fs.dropACLs(ino)
		if fs.busy.Retry(r, err, try) {
			continue
		}
		fs.dropAttr(ino) // the mode has changed
		if err != nil {
			fs.invalidateAttr(ino)
			return fs.checkStale(ino, aclError(err))
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
