package vfs

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// With Options.NoCTO, an open asks the server only when the cached attributes of the file have
// expired, or when the server has not told the rights of the opening user. A right of one user is
// never used for another user.

// openRights are the rights that opens need.
const openRights = nfs.AccessRead | nfs.AccessModify | nfs.AccessExtend | nfs.AccessExecute

// openCached returns the cached attributes of a file. ok is false when they have expired, or when
// cred is not known to have the rights want.
func (fs *FS) openCached(ino *inode, cred []byte, want uint32) (a nfs.Attr, ok bool) {
	v := fs.attrs.View(&ino.attr)
	if v.Pending || !v.Fresh || !ino.rights.Load().Has(cred, want, &v) {
		return a, false
	}
	return v.Attr, true
}

// keepOpener stores the rights of cred, from the reply to an ACCESS sent at start. a holds the
// attributes of the reply.
func (fs *FS) keepOpener(ino *inode, cred []byte, rights uint32, a *nfs.Attr, start uint64) {
	if v := fs.attrs.View(&ino.attr); v.Valid {
		ino.grants().Grant(cred, rights, a.Ctime, start, attr.Now().Add(v.TTL))
	}
}
