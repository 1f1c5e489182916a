package nlm

import (
	"errors"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxCred is the maximum size of a credential in bytes: flavor, length and body.
const maxCred = 8 + sunrpc.MaxAuthBody

// A clientRecord is the identity of a client at the server.
type clientRecord struct {
	instance [8]byte
	caller   [nlmwire.MaxName]byte // padded with NUL
}

func newClient(instance [8]byte, caller string) (*clientRecord, error) {
	r := &clientRecord{instance: instance}
	if copy(r.caller[:], caller) < len(caller) {
		return nil, errors.New("name of this host is too long")
	}
	return r, nil
}

// text returns a string of a record.
func text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// An ownerRecord is an owner of a file. Its owner handle is the instance of the client and svid.
type ownerRecord struct {
	id      uint64
	svid    uint32
	kind    OwnerKind
	fhLen   uint8
	credLen uint16
	fh      [nfs3.FHSize]byte
	cred    [maxCred]byte
}

func newOwnerRecord(key lockKey, svid uint32) ownerRecord {
	r := ownerRecord{id: key.id.ID, svid: svid, kind: key.id.Kind}
	r.fhLen = uint8(copy(r.fh[:], key.fh.Bytes()))
	return r
}

func (r *ownerRecord) valid() bool {
	return (r.kind == Posix || r.kind == Flock) && r.fhLen > 0 && int(r.fhLen) <= len(r.fh) && r.credLen <= maxCred &&
		r.svid>>30 == minSVID>>30
}

// key returns the owner and the file of a valid record.
func (r *ownerRecord) key() lockKey {
	fh, _ := nfs3.NewFH(r.fh[:r.fhLen])
	return lockKey{fh, Owner{r.kind, r.id}}
}

func (r *ownerRecord) credential() []byte { return r.cred[:r.credLen] }

func (r *ownerRecord) setCredential(cred []byte) {
	r.cred = [maxCred]byte{}
	r.credLen = uint16(copy(r.cred[:], cred))
}

// A rangeKind says what a record of a range means.
type rangeKind uint8

// Kinds of records of ranges. Records of requests stay until the result is known and recorded.
const (
	rangeHeld   rangeKind = iota + 1 // the owner has the lock
	rangeLost                        // the server no longer has the lock
	rangeLock                        // the server may have executed LOCK
	rangeUnlock                      // the server may have executed UNLOCK
)

func (k rangeKind) intent() bool { return k == rangeLock || k == rangeUnlock }

// A rangeRecord is a range of an owner.
type rangeRecord struct {
	seq        uint64 // orders the records of an owner: a later one replaces others in its range
	start, end uint64
	open       uint64       // number of the open file
	owner      slotfile.Ref // in the table of owners
	pid        uint32
	kind       rangeKind
	exclusive  uint8 // 0 or 1
	wait       uint8 // 1: rangeLock that the server may have queued
	_          [5]byte
}

func newRange(kind rangeKind, l *Lock) rangeRecord {
	return rangeRecord{kind: kind, start: l.Start, end: l.End, exclusive: asByte(l.Exclusive), pid: l.PID,
		open: l.Open}
}

func asByte(v bool) uint8 {
	if v {
		return 1
	}
	return 0
}

func (r *rangeRecord) lock(id Owner) Lock {
	return Lock{Start: r.start, End: r.end, Exclusive: r.exclusive == 1, Owner: id, PID: r.pid, Open: r.open}
}

func (r *rangeRecord) overlaps(o *rangeRecord) bool { return r.start <= o.end && o.start <= r.end }

// same reports whether two records mean the same.
func (r rangeRecord) same(o rangeRecord) bool {
	r.seq, r.owner, r.wait = o.seq, o.owner, o.wait
	return r == o
}

func (r *rangeRecord) valid() bool {
	return r.seq < 1<<63 && r.kind >= rangeHeld && r.kind <= rangeUnlock && r.start <= r.end && r.end <= maxOffset &&
		r.exclusive <= 1 && r.wait <= 1
}
