package nfs3

import (
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// Types of package nfs under the names of RFC 1813.
type (
	FH         = nfs.Handle
	Time3      = nfs.Time
	Device     = nfs.Device
	Attr       = nfs.Attr
	PostOpAttr = nfs.PostOpAttr
	WccAttr    = nfs.Stamp
	WccData    = nfs.Change
	SetAttr    = nfs.SetAttr
	Verifier   = nfs.Verifier
	FileType   = nfs.FileType
	StableHow  = nfs.Stability
	CreateMode = nfs.CreateMode
	TimeHow    = nfs.TimeHow
	Status     = nfs.Status
	Error      = nfs.Error

	LookupResult   = nfs.LookupResult
	AccessResult   = nfs.AccessResult
	ReadLinkResult = nfs.ReadLinkResult
	ReadResult     = nfs.ReadResult
	WriteResult    = nfs.WriteResult
	CreateResult   = nfs.CreateResult
	CreateHow      = nfs.CreateHow
	RenameResult   = nfs.RenameResult
	LinkResult     = nfs.LinkResult
	ReadDirResult  = nfs.ReadDirResult
	DirEntry       = nfs.DirEntry
	FSStatResult   = nfs.FSStatResult
	FSInfoResult   = nfs.FSInfoResult
	PathConfResult = nfs.PathConfResult
	CommitResult   = nfs.CommitResult
)

// Constants of RFC 1813.
const (
	NF3REG  = nfs.Regular
	NF3DIR  = nfs.Directory
	NF3BLK  = nfs.BlockDevice
	NF3CHR  = nfs.CharDevice
	NF3LNK  = nfs.Symlink
	NF3SOCK = nfs.Socket
	NF3FIFO = nfs.FIFO

	MaxName = nfs.MaxName
	MaxPath = nfs.MaxPath

	Unstable = nfs.Unstable
	DataSync = nfs.DataSync
	FileSync = nfs.FileSync

	Unchecked = nfs.Unchecked
	Guarded   = nfs.Guarded
	Exclusive = nfs.Exclusive

	DontChange      = nfs.DontChange
	SetToServerTime = nfs.SetToServerTime
	SetToClientTime = nfs.SetToClientTime

	AccessRead    = nfs.AccessRead
	AccessLookup  = nfs.AccessLookup
	AccessModify  = nfs.AccessModify
	AccessExtend  = nfs.AccessExtend
	AccessDelete  = nfs.AccessDelete
	AccessExecute = nfs.AccessExecute

	ModeMask = nfs.ModeMask

	OK             = nfs.OK
	ErrPerm        = nfs.ErrPerm
	ErrNoEnt       = nfs.ErrNoEnt
	ErrIO          = nfs.ErrIO
	ErrNXIO        = nfs.ErrNXIO
	ErrAcces       = nfs.ErrAcces
	ErrExist       = nfs.ErrExist
	ErrXDev        = nfs.ErrXDev
	ErrNoDev       = nfs.ErrNoDev
	ErrNotDir      = nfs.ErrNotDir
	ErrIsDir       = nfs.ErrIsDir
	ErrInval       = nfs.ErrInval
	ErrFBig        = nfs.ErrFBig
	ErrNoSpc       = nfs.ErrNoSpc
	ErrROFS        = nfs.ErrROFS
	ErrMLink       = nfs.ErrMLink
	ErrNameTooLong = nfs.ErrNameTooLong
	ErrNotEmpty    = nfs.ErrNotEmpty
	ErrDQuot       = nfs.ErrDQuot
	ErrStale       = nfs.ErrStale
	ErrRemote      = nfs.ErrRemote
	ErrBadHandle   = nfs.ErrBadHandle
	ErrNotSync     = nfs.ErrNotSync
	ErrBadCookie   = nfs.ErrBadCookie
	ErrNotSupp     = nfs.ErrNotSupp
	ErrTooSmall    = nfs.ErrTooSmall
	ErrServerFault = nfs.ErrServerFault
	ErrBadType     = nfs.ErrBadType
	ErrJukebox     = nfs.ErrJukebox
)

// ErrMalformed is nfs.ErrMalformed.
var ErrMalformed = nfs.ErrMalformed

// Errno is nfs.Errno.
func Errno(err error) syscall.Errno { return nfs.Errno(err) }

// NewFH is nfs.NewHandle.
func NewFH(b []byte) (FH, error) { return nfs.NewHandle(b) }
