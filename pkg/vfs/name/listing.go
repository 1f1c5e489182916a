package name

import (
	"bytes"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A program that walks a large directory, for example find(1), du(1) or rsync(1), uses the
// attributes of each file some time after it has listed the directory. They have then expired. A
// GETATTR or LOOKUP for each file costs one round trip to the server, while one READDIRPLUS returns
// the attributes of some hundred files.
//
// The listing of a directory therefore records where the server continues: the cookie before each
// Chunk-th entry, and the index of the entry in each object. When requests need attributes of several
// files of one directory soon after each other, a READDIRPLUS from the recorded cookie renews the
// attributes of the needed file and of those that follow.
//
// A renewal does not weaken the consistency: it makes the same changes to a node as a GETATTR that
// is sent at the same time. Attributes expire as before, a change by this mount after the call was
// sent wins, and an open still asks the server. A wrong cookie or index only makes the renewal
// useless, because replies are matched by file handle.
//
// Programs use the files in the order of the listing, or sort them first. So the walk is detected
// by credit: a request that needs the server earns walkMiss, or walkNext when its file follows that
// of the request before. A request that is answered by a renewal earns walkHit. A renewal needs
// walkStart and costs walkCost. Random accesses that a renewal does not help therefore cause at
// most one READDIRPLUS for walkCost of them.
const (
	walkMiss  = 1
	walkHit   = 1
	walkNext  = 8
	walkStart = 24
	walkCost  = 8
	walkMax   = 64 // credit that a directory can have

	// walkGap is how far the next file may be in the listing. Files between are still valid, or the
	// program does not need them.
	walkGap = 64
	// walkPause is the time without request after which the credit is lost.
	walkPause = time.Second
	// Chunk is the number of entries for each recorded cookie. A reply of 64 KiB has more entries than
	// two chunks.
	Chunk = 128
	// maxUseless is the number of consecutive useless renewals after which the cookies are dropped.
	maxUseless = 2
	// maxCookies bounds the recorded cookies of a directory, 8 bytes each.
	maxCookies = 1 << 16
)

// ACLsStart is the number of requests for ACLs of entries from which a program is expected to ask for
// those of further entries.
const ACLsStart = 16

// A Place is where a listing found an object.
type Place struct {
	Dir   uint64 // node number of the directory; 0 if unknown
	Index uint32 // of the entry
}

// A listing is what a directory records for renewals. Dir.mu guards it.
type listing struct {
	cookies []uint64 // before the entries with the indexes 0, Chunk, 2*Chunk, ...
	verf    nfs.Verifier
	credit  int
	last    uint32    // index in the last request
	at      time.Time // time of the last request
	busy    bool      // a renewal is in progress
	useless int       // consecutive renewals that did not return the needed file

	acls    int       // requests for ACLs of entries, without a pause of walkPause
	aclAt   time.Time // time of the last of them
	aclCred []byte    // its credential
}

// SetPlace records that a listing of the directory dir found the object at an index, unless the index
// is negative or too large.
func (d *Dir) SetPlace(dir uint64, index int) {
	if index < 0 || index/Chunk >= maxCookies {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.place = Place{dir, uint32(index)}
}

// Place returns the place of SetPlace.
func (d *Dir) Place() Place {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.place
}

// KeepCookie records the cookie before the entry with an index, if the entry begins a chunk.
func (d *Dir) KeepCookie(index int, cookie uint64, verf nfs.Verifier) {
	chunk := index / Chunk
	if index < 0 || index%Chunk != 0 || chunk >= maxCookies {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listing == nil {
		d.listing = new(listing)
	}
	l := d.listing
	l.verf = verf
	switch {
	case chunk < len(l.cookies):
		l.cookies[chunk] = cookie
	case chunk == len(l.cookies):
		l.cookies = append(l.cookies, cookie)
	}
}

// earn adds credit for a request that needs the file at index, and reports whether a renewal may
// begin.
func (l *listing) earn(index uint32, now time.Time) bool {
	if now.Sub(l.at) > walkPause {
		l.credit = 0
	}
	credit := walkMiss
	if l.credit > 0 && index > l.last && index-l.last <= walkGap {
		credit = walkNext
	}
	l.credit = min(l.credit+credit, walkMax)
	l.last, l.at = index, now
	return l.credit >= walkStart
}

// Renewed records that attributes of a renewal have answered a request for the entry with an index.
func (d *Dir) Renewed(index uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.listing; l != nil {
		l.credit = min(l.credit+walkHit, walkMax)
		l.last, l.at = index, time.Now()
	}
}

// BeginRenewal is called for a request that needs the attributes of the entry with an index. It returns
// the position from which a READDIRPLUS returns them. ok is false if there is no walk, or if another
// request renews the directory. If ok is true, the caller must call EndRenewal.
func (d *Dir) BeginRenewal(index uint32) (cookie uint64, verf nfs.Verifier, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, chunk := d.listing, int(index/Chunk)
	if l == nil || !l.earn(index, time.Now()) || l.busy || chunk >= len(l.cookies) {
		return 0, verf, false
	}
	l.credit -= walkCost
	l.busy = true
	if cookie = l.cookies[chunk]; cookie != 0 {
		verf = l.verf // RFC 1813 §3.3.17: the verifier is 0 at the start
	}
	return cookie, verf, true
}

// EndRenewal ends a renewal. useful is false if it did not return the needed file: the server returns
// fewer entries than a chunk, or has numbered them again. failed means that the server returned an
// error. There are then no further renewals until the next listing.
func (d *Dir) EndRenewal(useful, failed bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.listing
	if l == nil { // forgotten meanwhile
		return
	}
	l.busy = false
	if useful {
		l.useless = 0
		return
	}
	l.credit = 0
	if l.useless++; failed || l.useless >= maxUseless {
		l.useless, l.cookies = 0, nil
	}
}

// CountACL records a request for the ACL of an entry.
func (d *Dir) CountACL(cred []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, now := d.listing, time.Now()
	if l == nil {
		return
	}
	if now.Sub(l.aclAt) > walkPause {
		l.acls = 0
	}
	l.acls++
	l.aclAt, l.aclCred = now, cred
}

// WantsACLs reports whether a program with a credential asks for the ACLs of the entries.
func (d *Dir) WantsACLs(cred []byte) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.listing
	return l != nil && l.acls >= ACLsStart && time.Since(l.aclAt) <= walkPause && bytes.Equal(l.aclCred, cred)
}
