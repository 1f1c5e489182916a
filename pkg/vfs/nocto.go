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

// maxOpeners bounds the credentials that one file remembers.
const maxOpeners = 64

// An opener is the reply of the server to the ACCESS of one credential.
type opener struct {
	rights  uint32
	ctime   nfs.Time // of the file; a later change of rights changes it
	expires attr.Instant
}

// openCached returns the cached attributes of a file. ok is false when they have expired, or when
// cred is not known to have the rights want.
func (fs *FS) openCached(ino *inode, cred []byte, want uint32) (a nfs.Attr, ok bool) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	o := ino.openers[&cred[0]]
	if o.rights&want != want || o.ctime != ino.attr.Ctime || attr.Now() >= o.expires || ino.pending > 0 ||
		!fs.freshLocked(ino) {
		return a, false
	}
	return ino.attr, true
}

// keepOpener stores the rights of cred, from the reply to an ACCESS sent at start. a holds the
// attributes of the reply.
func (fs *FS) keepOpener(ino *inode, cred []byte, rights uint32, a *nfs.Attr, start uint64) {
	ino.mu.Lock()
	defer ino.mu.Unlock()
	if start < ino.lookups.epochClock || !ino.valid {
		return // the rights may have changed since
	}
	if ino.openers == nil {
		ino.openers = make(map[*byte]opener)
	}
	if len(ino.openers) >= maxOpeners {
		clear(ino.openers)
	}
	ino.openers[&cred[0]] = opener{rights, a.Ctime, attr.Now().Add(ino.ttl)}
}
