package nfsacl

import (
	"strconv"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Program and Version identify the protocol in RPC calls.
const (
	Program = 100227
	Version = 3
)

// A Proc is a procedure number of version 3.
type Proc uint32

// Procedures of version 3.
const (
	ProcNull   = 0
	ProcGetACL = 1
	ProcSetACL = 2

	// NumProcs is the number of procedures.
	NumProcs = 3
)

var procNames = [NumProcs]string{ProcNull: "NULL", ProcGetACL: "GETACL", ProcSetACL: "SETACL"}

// String returns the name of the procedure, such as GETACL.
func (p Proc) String() string {
	if p < NumProcs {
		return procNames[p]
	}
	return "procedure " + strconv.FormatUint(uint64(p), 10)
}

// Bits of the mask that selects ACLs. A count is the number of entries of an ACL.
const (
	MaskAccess       = 1
	MaskAccessCount  = 2
	MaskDefault      = 4
	MaskDefaultCount = 8
	MaskAll          = 15
)

const (
	sizeACL = 2*sunrpc.SizeUint32 + MaxEntries*sizeEntry
	// maxResultGet and maxResultSet are the maximum sizes of results in bytes.
	maxResultGet = 2*sunrpc.SizeUint32 + nfs3.SizePostOpAttr + 2*sizeACL
	maxResultSet = sunrpc.SizeUint32 + nfs3.SizePostOpAttr
)

// ACLs are the ACLs of one object.
type ACLs struct {
	Mask    uint32 // which of the ACLs are present: MaskAccess, MaskDefault
	Access  ACL
	Default ACL // of a directory; empty when new files inherit no ACL
}

func (a *ACLs) append(b []byte, owner Owner) []byte {
	b = sunrpc.AppendUint32(b, a.Mask)
	b = appendACL(b, a.Access, a.Mask&MaskAccess != 0, owner, 0)
	return appendACL(b, a.Default, a.Mask&MaskDefault != 0, owner, tagDefault)
}

func (a *ACLs) decode(d *sunrpc.Decoder) {
	*a = ACLs{Mask: d.Uint32()}
	if a.Mask&^MaskAll != 0 {
		d.Fail(errMask)
	}
	a.Access = decodeACL(d, a.Mask&MaskAccess != 0)
	a.Default = decodeACL(d, a.Mask&MaskDefault != 0)
}

// Args holds the arguments of one call as a server sees them.
type Args struct {
	FH   nfs3.FH
	ACLs // GETACL sets Mask alone
}

// ParseArgs decodes the arguments of GETACL or SETACL. It accepts b only when b holds exactly the
// arguments; otherwise the server answers GARBAGE_ARGS.
func ParseArgs(proc uint32, b []byte, a *Args) error {
	*a = Args{}
	d := sunrpc.NewDecoder(b)
	nfs3.DecodeFH(&d, &a.FH)
	switch proc {
	case ProcGetACL:
		a.Mask = d.Uint32()
	case ProcSetACL:
		a.decode(&d)
	}
	if d.Err() == nil && d.Remaining() != 0 {
		d.Fail(errTrailing)
	}
	return d.Err()
}

// AppendGetResult appends the results of a successful GETACL of an object with these attributes.
func AppendGetResult(b []byte, attr *nfs3.Attr, acls *ACLs) []byte {
	b = sunrpc.AppendUint32(b, uint32(nfs3.OK))
	b = nfs3.AppendPostOpAttr(b, attr)
	return acls.append(b, Owner{attr.UID, attr.GID})
}

// AppendStatus appends the results of a failed GETACL, or of a SETACL. attr may be nil.
func AppendStatus(b []byte, status nfs3.Status, attr *nfs3.Attr) []byte {
	return nfs3.AppendPostOpAttr(sunrpc.AppendUint32(b, uint32(status)), attr)
}
