package nfs3

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// Largest encoded sizes in octets of the types that results are made of (RFC 1813 §2.5, §2.6).
const (
	sizeStatus     = sunrpc.SizeUint32
	sizeFH         = sunrpc.SizeUint32 + FHSize
	sizeTime       = 2 * sunrpc.SizeUint32
	sizeAttr       = 5*sunrpc.SizeUint32 + 2*sunrpc.SizeUint64 + 2*sunrpc.SizeUint32 + 2*sunrpc.SizeUint64 + 3*sizeTime
	sizePostOpAttr = sunrpc.SizeBool + sizeAttr
	sizePostOpFH   = sunrpc.SizeBool + sizeFH
	sizeWccAttr    = sunrpc.SizeUint64 + 2*sizeTime
	sizeWccData    = sunrpc.SizeBool + sizeWccAttr + sizePostOpAttr
)

// Maximum results of each procedure in octets, status included, which transports size their replies
// by (RFC 8267 §3). The failing arms are never larger. READ and READLINK are without the octets and
// the pad of the data, which go to Message.ResultData.
const (
	MaxResultNull = 0
	// 88
	MaxResultGetAttr = sizeStatus + sizeAttr
	// 120
	MaxResultSetAttr = sizeStatus + sizeWccData
	// 248
	MaxResultLookup = sizeStatus + sizeFH + 2*sizePostOpAttr
	// 96
	MaxResultAccess = sizeStatus + sizePostOpAttr + sunrpc.SizeUint32
	// 96: the path's length word
	MaxResultReadLink = sizeStatus + sizePostOpAttr + sunrpc.SizeUint32
	// 104: count, eof, the data's length word
	MaxResultRead = sizeStatus + sizePostOpAttr + 2*sunrpc.SizeUint32 + sunrpc.SizeBool
	// 136
	MaxResultWrite = sizeStatus + sizeWccData + 2*sunrpc.SizeUint32 + WriteVerfSize
	// 280, also MKDIR, SYMLINK, MKNOD
	MaxResultCreate = sizeStatus + sizePostOpFH + sizePostOpAttr + sizeWccData
	// 120, also RMDIR
	MaxResultRemove = sizeStatus + sizeWccData
	// 236
	MaxResultRename = sizeStatus + 2*sizeWccData
	// 208
	MaxResultLink = sizeStatus + sizePostOpAttr + sizeWccData
	// 144
	MaxResultFSStat = sizeStatus + sizePostOpAttr + 6*sunrpc.SizeUint64 + sunrpc.SizeUint32
	// 140
	MaxResultFSInfo = sizeStatus + sizePostOpAttr + 8*sunrpc.SizeUint32 + sunrpc.SizeUint64 + sizeTime
	// 116
	MaxResultPathConf = sizeStatus + sizePostOpAttr + 2*sunrpc.SizeUint32 + 4*sunrpc.SizeBool
	// 128
	MaxResultCommit = sizeStatus + sizeWccData + WriteVerfSize
)

// maxResultReadDirFixed is what READDIR and READDIRPLUS may return beyond the count that was asked
// for. By RFC 1813 §3.3.16 and §3.3.17 the count bounds the whole READDIR3resok, and the maximum
// would be status + count. The Linux server bounds the entries by it and adds the directory's
// attributes and the cookie verifier on top, so room is kept for both.
const maxResultReadDirFixed = sizeStatus + sizePostOpAttr + CookieVerfSize // 100

// MaxResultReadDir is the maximum result in octets of a READDIR with this count, or of a
// READDIRPLUS with this maxcount.
func MaxResultReadDir(count uint32) int { return maxResultReadDirFixed + int(count) }

// MaxDirCount is the largest count or maxcount in octets that ReadDir and ReadDirPlus take; a
// larger one is cut to it.
const MaxDirCount = 1 << 20

// maxArgs is room in octets for the arguments of any procedure, without data: two handles and two
// names (RENAME) are the most.
const maxArgs = 2*(sizeFH+sunrpc.SizeUint32+MaxName+1) + 64
