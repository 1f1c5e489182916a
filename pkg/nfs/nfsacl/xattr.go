package nfsacl

import (
	"encoding/binary"
	"errors"
)

// Names of the extended attributes that contain ACLs (acl(5)).
const (
	XattrAccess  = "system.posix_acl_access"
	XattrDefault = "system.posix_acl_default"
)

// The value of the attributes: a version and the entries, in little-endian order
// (include/uapi/linux/posix_acl_xattr.h).
const (
	xattrVersion   = 2
	xattrHeader    = 4 // bytes
	xattrEntrySize = 8 // bytes: tag, permissions, identifier
)

// ErrXattr is the error of a value that is not an ACL of version 2.
var ErrXattr = errors.New("value is not a POSIX ACL of version 2")

// XattrSize returns the size of the attribute's value in bytes.
func (a ACL) XattrSize() int { return xattrHeader + len(a)*xattrEntrySize }

// AppendXattr appends the value of the extended attribute for the ACL.
func (a ACL) AppendXattr(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, xattrVersion)
	for _, e := range a {
		b = binary.LittleEndian.AppendUint16(b, uint16(e.Tag))
		b = binary.LittleEndian.AppendUint16(b, e.Perm)
		b = binary.LittleEndian.AppendUint32(b, e.ID)
	}
	return b
}

// ParseXattr returns the ACL in the value of an extended attribute. The error is ErrXattr, or says
// that the ACL has too many entries.
func ParseXattr(value []byte) (ACL, error) {
	if len(value) < xattrHeader || (len(value)-xattrHeader)%xattrEntrySize != 0 ||
		binary.LittleEndian.Uint32(value) != xattrVersion {
		return nil, ErrXattr
	}
	value = value[xattrHeader:]
	if len(value)/xattrEntrySize > MaxEntries {
		return nil, errTooMany
	}
	a := make(ACL, 0, len(value)/xattrEntrySize)
	for ; len(value) > 0; value = value[xattrEntrySize:] {
		e := Entry{Tag(binary.LittleEndian.Uint16(value)), binary.LittleEndian.Uint16(value[2:]),
			binary.LittleEndian.Uint32(value[4:])}
		if !e.Tag.valid() || e.Perm&^PermMask != 0 {
			return nil, ErrXattr
		}
		if !e.Tag.named() {
			e.ID = UndefinedID
		}
		a = append(a, e)
	}
	a.sort()
	return a, nil
}
