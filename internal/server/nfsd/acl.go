package nfsd

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxXattrACL is the size in bytes of an extended attribute with the largest ACL.
var maxXattrACL = make(nfsacl.ACL, nfsacl.MaxEntries).XattrSize()

// nfsACL answers NFSACL version 3. The file system checks the caller's permissions.
func (s *Server) nfsACL(ctx context.Context, peer netip.AddrPort, h *sunrpc.CallHeader,
	args, reply []byte) ([]byte, error) {
	switch {
	case h.Vers != nfsacl.Version:
		return sunrpc.AppendProgMismatchReply(reply, h.XID, nfsacl.Version, nfsacl.Version), nil
	case h.Proc == nfsacl.ProcNull:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
	case h.Proc > nfsacl.ProcSetACL:
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.ProcUnavail), nil
	case !s.allows(peer):
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthTooWeak), nil
	}
	var a nfsacl.Args
	if nfsacl.ParseArgs(h.Proc, args, &a) != nil {
		return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.GarbageArgs), nil
	}
	who, ok := credOf(h, s.cfg.NoRootSquash)
	if !ok {
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthBadCred), nil
	}
	if !s.id.switches {
		who = cred{uid: s.id.uid, gid: s.id.gid}
	}
	release, err := s.slot(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	o, status := s.object(&a.FH)
	if status != nfs3.OK {
		return nfsacl.AppendStatus(reply, status, nil), nil
	}
	defer s.objects.release(o)
	var attr nfs3.Attr
	var acls nfsacl.ACLs
	switch {
	case s.leftExport(o):
		err = unix.ESTALE
	case h.Proc == nfsacl.ProcGetACL:
		acls, err = s.getACLs(o, a.Mask)
	case s.cfg.ReadOnly:
		err = unix.EROFS
	default:
		err = s.setACLs(o, &who, &a.ACLs)
	}
	var st unix.Stat_t
	if err == nil {
		err = o.stat(&st)
	}
	if err != nil {
		return nfsacl.AppendStatus(reply, statusOf(err), nil), nil
	}
	attr = s.attrOf(&st)
	if h.Proc == nfsacl.ProcSetACL {
		return nfsacl.AppendStatus(reply, nfs3.OK, &attr), nil
	}
	if a.Mask&(nfsacl.MaskAccess|nfsacl.MaskAccessCount) != 0 && len(acls.Access) == 0 {
		acls.Access = nfsacl.FromMode(attr.Mode)
	}
	return nfsacl.AppendGetResult(reply, &attr, &acls), nil
}

// getACLs reads the ACLs that mask selects. An ACL that the object does not have is empty.
func (s *Server) getACLs(o *object, mask uint32) (acls nfsacl.ACLs, err error) {
	if mask&^nfsacl.MaskAll != 0 {
		return acls, unix.EINVAL
	}
	acls.Mask = mask
	if mask&(nfsacl.MaskAccess|nfsacl.MaskAccessCount) != 0 {
		if acls.Access, err = getACL(o, nfsacl.XattrAccess); err != nil {
			return acls, err
		}
	}
	if mask&(nfsacl.MaskDefault|nfsacl.MaskDefaultCount) != 0 && o.kind == unix.S_IFDIR {
		acls.Default, err = getACL(o, nfsacl.XattrDefault)
	}
	return acls, err
}

// getACL reads an ACL. The ACL is empty when the object has none, and when its file system has no
// ACLs.
func getACL(o *object, attribute string) (nfsacl.ACL, error) {
	if o.kind == unix.S_IFLNK {
		return nil, nil
	}
	value := make([]byte, maxXattrACL)
	var n int
	err := retry(func() (err error) {
		n, err = unix.Getxattr(o.proc, attribute, value)
		return err
	})
	switch err {
	case nil:
		return nfsacl.ParseXattr(value[:n])
	case unix.ENODATA, unix.EOPNOTSUPP:
		return nil, nil
	case unix.ERANGE: // more entries than the protocol has room for
		return nil, unix.EIO
	}
	return nil, err
}

// setACLs sets the ACLs of an object as the caller and makes them stable. The access ACL comes
// first: it also changes the mode.
func (s *Server) setACLs(o *object, who *cred, acls *nfsacl.ACLs) error {
	if o.kind == unix.S_IFLNK {
		return unix.EOPNOTSUPP
	}
	o.setting.Lock()
	defer o.setting.Unlock()
	var w wcc
	w.obj = o
	w.ticket, w.alone = o.changes.begin()
	defer w.done()
	err := s.id.as(who, func() error {
		if acls.Mask&nfsacl.MaskAccess != 0 {
			if err := setACL(o, nfsacl.XattrAccess, acls.Access); err != nil {
				return err
			}
		}
		if acls.Mask&nfsacl.MaskDefault != 0 && (o.kind == unix.S_IFDIR || len(acls.Default) > 0) {
			return setACL(o, nfsacl.XattrDefault, acls.Default)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.syncAny(o)
}

// setACL replaces an ACL. An empty ACL removes it.
func setACL(o *object, attribute string, acl nfsacl.ACL) error {
	if len(acl) > 0 {
		value := acl.AppendXattr(nil)
		return retry(func() error { return unix.Setxattr(o.proc, attribute, value, 0) })
	}
	err := retry(func() error { return unix.Removexattr(o.proc, attribute) })
	if err == unix.ENODATA {
		err = nil
	}
	return err
}
