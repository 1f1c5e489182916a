package nfs3

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// The functions in this file append the types of which a server's results consist (RFC 1813 §2.5,
// §2.6). They allocate only when b has no room.

// Sizes of results in bytes that a server needs in order to keep within a client's count.
const (
	SizePostOpAttr = sizePostOpAttr // post_op_attr with attributes
	SizeAttr       = sizeAttr       // fattr3
)

// AppendFH appends an nfs_fh3.
func AppendFH(b []byte, h *FH) []byte { return appendFH(b, h) }

// AppendPostOpFH appends a post_op_fh3 with a handle.
func AppendPostOpFH(b []byte, h *FH) []byte { return appendFH(sunrpc.AppendBool(b, true), h) }

// AppendAttr appends a fattr3.
func AppendAttr(b []byte, a *Attr) []byte {
	b = sunrpc.AppendUint32(b, uint32(a.Type))
	b = sunrpc.AppendUint32(b, a.Mode)
	b = sunrpc.AppendUint32(b, a.Nlink)
	b = sunrpc.AppendUint32(b, a.UID)
	b = sunrpc.AppendUint32(b, a.GID)
	b = sunrpc.AppendUint64(b, a.Size)
	b = sunrpc.AppendUint64(b, a.Used)
	b = sunrpc.AppendUint32(b, a.Rdev.Major)
	b = sunrpc.AppendUint32(b, a.Rdev.Minor)
	b = sunrpc.AppendUint64(b, a.FSID)
	b = sunrpc.AppendUint64(b, a.FileID)
	b = appendTime(b, a.Atime)
	b = appendTime(b, a.Mtime)
	return appendTime(b, a.Ctime)
}

// AppendPostOpAttr appends a post_op_attr; nil means that the attributes are left out.
func AppendPostOpAttr(b []byte, a *Attr) []byte {
	b = sunrpc.AppendBool(b, a != nil)
	if a != nil {
		b = AppendAttr(b, a)
	}
	return b
}

// AppendWcc appends a wcc_data; nil means that the attributes before or after are left out.
func AppendWcc(b []byte, before *WccAttr, after *Attr) []byte {
	b = sunrpc.AppendBool(b, before != nil)
	if before != nil {
		b = sunrpc.AppendUint64(b, before.Size)
		b = appendTime(b, before.Mtime)
		b = appendTime(b, before.Ctime)
	}
	return AppendPostOpAttr(b, after)
}

// AppendFSStat appends the FSSTAT3resok behind its attributes.
func AppendFSStat(b []byte, r *FSStatResult) []byte {
	for _, v := range [...]uint64{r.TotalBytes, r.FreeBytes, r.AvailBytes, r.TotalFiles, r.FreeFiles, r.AvailFiles} {
		b = sunrpc.AppendUint64(b, v)
	}
	return sunrpc.AppendUint32(b, r.InvarSec)
}

// AppendFSInfo appends the FSINFO3resok behind its attributes.
func AppendFSInfo(b []byte, r *FSInfoResult) []byte {
	for _, v := range [...]uint32{r.ReadMax, r.ReadPref, r.ReadMult, r.WriteMax, r.WritePref, r.WriteMult, r.DirPref} {
		b = sunrpc.AppendUint32(b, v)
	}
	b = sunrpc.AppendUint64(b, r.MaxFileSize)
	b = appendTime(b, r.TimeDelta)
	return sunrpc.AppendUint32(b, r.Properties)
}

// AppendPathConf appends the PATHCONF3resok behind its attributes.
func AppendPathConf(b []byte, r *PathConfResult) []byte {
	b = sunrpc.AppendUint32(sunrpc.AppendUint32(b, r.LinkMax), r.NameMax)
	for _, v := range [...]bool{r.NoTrunc, r.ChownRestricted, r.CaseInsensitive, r.CasePreserving} {
		b = sunrpc.AppendBool(b, v)
	}
	return b
}
