package attr

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// maxGrants bounds the credentials that one object remembers.
const maxGrants = 64

// Rights are what the server allowed users to do with one object. The zero value knows nothing. It is
// safe for concurrent use.
//
// A right of one user is never used for another user: credentials are the encodings that the calls of
// one identity share, and are compared by their memory.
type Rights struct {
	mu     sync.Mutex
	grants map[*byte]grant
}

type grant struct {
	rights uint32
	ctime  nfs.Time // of the object
	start  uint64   // clock when the call was sent
	until  Instant
}

// Grant records the rights that the server gave to cred in the reply to a call sent at start. ctime is
// that of the object in the reply. The rights replace those that cred had.
func (r *Rights) Grant(cred []byte, rights uint32, ctime nfs.Time, start uint64, until Instant) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.grants == nil {
		r.grants = make(map[*byte]grant)
	}
	if _, known := r.grants[&cred[0]]; !known && len(r.grants) >= maxGrants {
		clear(r.grants)
	}
	r.grants[&cred[0]] = grant{rights, ctime, start, until}
}

// Deny forgets the rights of cred.
func (r *Rights) Deny(cred []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.grants, &cred[0])
}

// Has reports whether cred has all rights of want in an object with the View v. The rights of a file
// end with a change of its ctime. Those of a directory end with its epoch, because the entries that
// this client makes change the ctime.
func (r *Rights) Has(cred []byte, want uint32, v *View) bool {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	g, ok := r.grants[&cred[0]]
	return ok && g.rights&want == want && Now() < g.until && g.start >= v.EpochStart &&
		(v.Type == nfs.Directory || g.ctime == v.Ctime)
}
