package nfsacl

import (
	"cmp"
	"errors"
	"slices"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A Tag is the kind of an Entry (acl(5)).
type Tag uint16

// Tags of ACL entries, with the values of acl(5) and of the protocol.
const (
	TagUserObj  Tag = 0x01 // owner
	TagUser     Tag = 0x02
	TagGroupObj Tag = 0x04 // owning group
	TagGroup    Tag = 0x08
	TagMask     Tag = 0x10
	TagOther    Tag = 0x20
)

// UndefinedID is the ID of entries other than TagUser and TagGroup.
const UndefinedID = ^uint32(0)

// PermMask are the bits of Entry.Perm: read 4, write 2, execute 1.
const PermMask = 7

// MaxEntries is the maximum number of entries of one ACL on the wire.
const MaxEntries = 1024

// minimalEntries is the number of entries of a minimal ACL: owner, owning group and others.
const minimalEntries = 3

// tagDefault marks the entries of a default ACL on the wire.
const tagDefault = 0x1000

// sizeEntry is the size of an entry on the wire in bytes.
const sizeEntry = 3 * sunrpc.SizeUint32

// An Entry is one entry of an ACL.
type Entry struct {
	Tag  Tag
	Perm uint16
	ID   uint32 // uid of TagUser, gid of TagGroup, else UndefinedID
}

// An ACL is a POSIX ACL, sorted by tag and ID. An empty ACL stands for no ACL.
type ACL []Entry

// Errors of invalid ACLs. They are variables so that invalid input causes no allocation.
var (
	errTooMany  = errors.New("ACL has more than 1024 entries")
	errCounts   = errors.New("the two entry counts of the ACL differ")
	errTag      = errors.New("tag of an ACL entry is unknown")
	errPerm     = errors.New("permissions of an ACL entry are out of range")
	errTrailing = errors.New("bytes follow the ACLs")
)

func (t Tag) named() bool { return t == TagUser || t == TagGroup }

func (t Tag) valid() bool {
	switch t {
	case TagUserObj, TagUser, TagGroupObj, TagGroup, TagMask, TagOther:
		return true
	}
	return false
}

func (a ACL) sort() {
	slices.SortFunc(a, func(x, y Entry) int {
		return cmp.Or(cmp.Compare(x.Tag, y.Tag), cmp.Compare(x.ID, y.ID), cmp.Compare(x.Perm, y.Perm))
	})
}

// find returns the entry with an unnamed tag, or nil.
func (a ACL) find(t Tag) *Entry {
	for i := range a {
		if a[i].Tag == t {
			return &a[i]
		}
	}
	return nil
}

// Minimal reports whether the ACL says no more than the mode of the file.
func (a ACL) Minimal() bool {
	return !slices.ContainsFunc(a, func(e Entry) bool {
		return e.Tag != TagUserObj && e.Tag != TagGroupObj && e.Tag != TagOther
	})
}

// FromMode returns the minimal ACL of a file with these mode bits.
func FromMode(mode uint32) ACL {
	return ACL{
		{TagUserObj, uint16(mode >> 6 & PermMask), UndefinedID},
		{TagGroupObj, uint16(mode >> 3 & PermMask), UndefinedID},
		{TagOther, uint16(mode & PermMask), UndefinedID},
	}
}

// An Owner is the uid and gid of a file.
type Owner struct{ UID, GID uint32 }

// appendACL appends an ACL of a file of the owner (secattr of the protocol). Without entries, it
// appends the count alone. flag is 0 or tagDefault.
func appendACL(b []byte, a ACL, entries bool, owner Owner, flag Tag) []byte {
	if group := a.find(TagGroupObj); group != nil && len(a) == minimalEntries && a.Minimal() {
		a = append(slices.Clone(a), Entry{TagMask, group.Perm, UndefinedID})
		a.sort()
	}
	b = sunrpc.AppendUint32(b, uint32(len(a)))
	if !entries {
		return sunrpc.AppendUint32(b, 0)
	}
	b = sunrpc.AppendUint32(b, uint32(len(a)))
	for _, e := range a {
		id := uint32(0) // Solaris depends on 0
		switch e.Tag {
		case TagUserObj:
			id = owner.UID
		case TagGroupObj:
			id = owner.GID
		case TagUser, TagGroup:
			id = e.ID
		}
		b = sunrpc.AppendUint32(b, uint32(e.Tag|flag))
		b = sunrpc.AppendUint32(b, id)
		b = sunrpc.AppendUint32(b, uint32(e.Perm))
	}
	return b
}

// decodeACL decodes what appendACL appends. When entries is false, decodeACL ignores entries and
// returns nil.
func decodeACL(d *sunrpc.Decoder, entries bool) ACL {
	count, n := d.Uint32(), d.Uint32()
	switch {
	case d.Err() != nil:
		return nil
	case count > MaxEntries || n > MaxEntries:
		d.Fail(errTooMany)
		return nil
	case entries && count != n:
		d.Fail(errCounts)
		return nil
	}
	raw := sunrpc.NewDecoder(d.Fixed(int(n) * sizeEntry))
	if d.Err() != nil || !entries || n == 0 {
		return nil
	}
	a := make(ACL, n) // d.Fixed has checked that the entries are there
	for i := range a {
		tag, id, perm := Tag(raw.Uint32()&^tagDefault), raw.Uint32(), raw.Uint32()
		if tag == TagMask {
			perm &= PermMask // Solaris sets more bits
		}
		switch {
		case !tag.valid():
			d.Fail(errTag)
			return nil
		case perm&^PermMask != 0:
			d.Fail(errPerm)
			return nil
		case !tag.named():
			id = UndefinedID
		}
		a[i] = Entry{tag, uint16(perm), id}
	}
	a.sort()
	return a.withoutBogusMask()
}

// withoutBogusMask removes the mask of an ACL that is minimal without the mask.
func (a ACL) withoutBogusMask() ACL {
	if len(a) != minimalEntries+1 {
		return a
	}
	group, mask := a.find(TagGroupObj), a.find(TagMask)
	if group == nil || mask == nil || group.Perm != mask.Perm {
		return a
	}
	return slices.DeleteFunc(a, func(e Entry) bool { return e.Tag == TagMask })
}
