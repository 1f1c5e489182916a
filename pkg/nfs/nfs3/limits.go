package nfs3

import "github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"

// Maximum encoded sizes in bytes of the types in results (RFC 1813 §2.5, §2.6).
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

// Maximum size in bytes of the results of each procedure, including the status (RFC 8267 §3).
// Transports size their reply buffers by it. The results of a failed call are never larger. The
// sizes of READ and READLINK exclude the data and its pad, which go to Message.ResultData.
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
	// 96: includes the length of the path
	MaxResultReadLink = sizeStatus + sizePostOpAttr + sunrpc.SizeUint32
	// 104: includes count, eof and the length of the data
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

// maxResultReadDirFixed is the size in bytes that READDIR and READDIRPLUS may return in addition to
// the requested count. RFC 1813 §3.3.16 and §3.3.17 limit the complete READDIR3resok to count,
// which gives a maximum of status + count. The Linux server limits only the entries to count, and
// adds the attributes of the directory and the cookie verifier.
const maxResultReadDirFixed = sizeStatus + sizePostOpAttr + CookieVerfSize // 100

// MaxResultReadDir returns the maximum size in bytes of the results of a READDIR with this count,
// or of a READDIRPLUS with this maxcount.
func MaxResultReadDir(count uint32) int { return maxResultReadDirFixed + int(count) }

// MaxDirCount is the maximum count in bytes of ReadDir and ReadDirPlus. They reduce a larger count
// to this value.
const MaxDirCount = 1 << 20

// maxArgs is the maximum size in bytes of the arguments of any procedure, without data. RENAME has
// the largest: two handles and two names.
const maxArgs = 2*(sizeFH+sunrpc.SizeUint32+MaxName+1) + 64
