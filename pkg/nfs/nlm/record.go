package nlm

import (
	"encoding/binary"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Sizes of the records of a State in bytes.
const (
	maxCred = 8 + sunrpc.MaxAuthBody // flavor, length and body

	clientBytes = 8 + 2 + nlmwire.MaxName
	ownerBytes  = 4 + 8 + 1 + 1 + 2 + nfs3.FHSize + maxCred
	rangeBytes  = 4*8 + 2*4 + 3
)

var order = binary.NativeEndian

// A clientRecord is the identity of a client at the server.
type clientRecord struct {
	instance [8]byte
	caller   string
}

func (r *clientRecord) encode() []byte {
	b := append(make([]byte, 0, clientBytes), r.instance[:]...)
	b = order.AppendUint16(b, uint16(len(r.caller)))
	return append(b, r.caller...)[:clientBytes]
}

func decodeClient(b []byte) (r clientRecord, ok bool) {
	copy(r.instance[:], b)
	n := int(order.Uint16(b[8:]))
	if n > nlmwire.MaxName {
		return r, false
	}
	r.caller = string(b[10:][:n])
	return r, true
}

// An ownerRecord is an owner of a file. Its owner handle is the instance of the client and svid.
type ownerRecord struct {
	fh   nfs3.FH
	id   Owner
	svid uint32
	cred []byte
}

func (r *ownerRecord) encode() []byte {
	fh := r.fh.Bytes()
	b := order.AppendUint32(make([]byte, 0, ownerBytes), r.svid)
	b = order.AppendUint64(b, r.id.ID)
	b = append(b, byte(r.id.Kind), byte(len(fh)))
	b = order.AppendUint16(b, uint16(len(r.cred)))
	b = append(b, fh...)
	return append(b, r.cred...)[:ownerBytes]
}

func decodeOwner(b []byte) (r ownerRecord, ok bool) {
	r.svid, r.id.ID = order.Uint32(b), order.Uint64(b[4:])
	r.id.Kind = OwnerKind(b[12])
	n, creds := int(b[13]), int(order.Uint16(b[14:]))
	if r.id.Kind != Posix && r.id.Kind != Flock || n > nfs3.FHSize || creds > maxCred || r.svid>>30 != minSVID>>30 {
		return ownerRecord{}, false
	}
	r.cred = append([]byte(nil), b[16+n:][:creds]...)
	r.fh, ok = validFH(b[16:][:n])
	return r, ok
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
	open       uint64        // number of the open file
	owner      slotfile.Slot // in the table of owners
	pid        uint32
	kind       rangeKind
	exclusive  bool
	wait       bool // rangeLock: the server may have queued the request
}

func newRange(kind rangeKind, l *Lock) rangeRecord {
	return rangeRecord{kind: kind, start: l.Start, end: l.End, exclusive: l.Exclusive, pid: l.PID,
		open: l.Open}
}

func (r *rangeRecord) lock(id Owner) Lock {
	return Lock{Start: r.start, End: r.end, Exclusive: r.exclusive, Owner: id, PID: r.pid, Open: r.open}
}

func (r *rangeRecord) overlaps(o *rangeRecord) bool { return r.start <= o.end && o.start <= r.end }

// same reports whether two records mean the same.
func (r *rangeRecord) same(o *rangeRecord) bool {
	return r.start == o.start && r.end == o.end && r.pid == o.pid && r.open == o.open && r.kind == o.kind &&
		r.exclusive == o.exclusive
}

func (r *rangeRecord) encode() []byte {
	b := order.AppendUint64(make([]byte, 0, rangeBytes), r.seq)
	b = order.AppendUint64(order.AppendUint64(order.AppendUint64(b, r.start), r.end), r.open)
	b = order.AppendUint32(order.AppendUint32(b, uint32(r.owner)), r.pid)
	return append(b, byte(r.kind), asByte(r.exclusive), asByte(r.wait))
}

func asByte(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func decodeRange(b []byte) (r rangeRecord, ok bool) {
	r.seq, r.start, r.end = order.Uint64(b), order.Uint64(b[8:]), order.Uint64(b[16:])
	r.open, r.owner, r.pid = order.Uint64(b[24:]), slotfile.Slot(order.Uint32(b[32:])), order.Uint32(b[36:])
	r.kind, r.exclusive, r.wait = rangeKind(b[40]), b[41] == 1, b[42] == 1
	ok = r.seq < 1<<63 && r.kind >= rangeHeld && r.kind <= rangeUnlock && r.start <= r.end && r.end <= maxOffset &&
		b[41] <= 1 && b[42] <= 1
	return r, ok
}
