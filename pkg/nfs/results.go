package nfs

// LookupResult is the result of LOOKUP (RFC 1813 §3.3.3).
type LookupResult struct {
	FH      Handle
	Attr    PostOpAttr // of the object; only on success
	DirAttr PostOpAttr
}

// AccessResult is the result of ACCESS (RFC 1813 §3.3.4).
type AccessResult struct {
	Attr   PostOpAttr
	Access uint32 // granted bits, a subset of the requested bits
}

// ReadLinkResult is the result of READLINK (RFC 1813 §3.3.5).
type ReadLinkResult struct {
	Attr PostOpAttr
	N    int // length of the path in bytes
}

// ReadResult is the result of READ (RFC 1813 §3.3.6).
type ReadResult struct {
	Attr PostOpAttr
	N    int // bytes read
	EOF  bool
}

// WriteResult is the result of WRITE (RFC 1813 §3.3.7).
type WriteResult struct {
	Change    Change
	Count     uint32 // bytes written
	Committed Stability
	Verf      Verifier
}

// CreateResult is the result of CREATE, MKDIR, SYMLINK and MKNOD (RFC 1813 §3.3.8 to §3.3.11).
type CreateResult struct {
	State     OpenState // of a file that the call has opened
	HasFH     bool      // a server may omit the handle; then use LOOKUP
	FH        Handle
	Attr      PostOpAttr
	DirChange Change
}

// CreateHow is createhow3 (RFC 1813 §3.3.8).
type CreateHow struct {
	Mode CreateMode
	Attr SetAttr  // with Unchecked and Guarded
	Verf Verifier // with Exclusive
}

// RenameResult is the result of RENAME (RFC 1813 §3.3.14).
type RenameResult struct {
	From, To Change // of the two directories
}

// LinkResult is the result of LINK (RFC 1813 §3.3.15).
type LinkResult struct {
	Attr      PostOpAttr // of the file
	DirChange Change
}

// ReadDirResult is the result of READDIR and READDIRPLUS without the entries (RFC 1813 §3.3.16,
// §3.3.17).
type ReadDirResult struct {
	DirAttr PostOpAttr
	Verf    Verifier // argument of the next call
	EOF     bool     // the reply contains the last entry of the directory
	Entries int      // number of entries in the reply
}

// DirEntry is entry3 or entryplus3 (RFC 1813 §3.3.16, §3.3.17).
type DirEntry struct {
	FileID uint64
	Cookie uint64 // argument of a call that continues after this entry
	// Name has 1 to 255 bytes without '/' and NUL. It may be "." or "..". It is a slice of the
	// reply.
	Name  []byte
	Attr  PostOpAttr // READDIRPLUS only
	HasFH bool       // READDIRPLUS only
	FH    Handle
}

// FSStatResult is the result of FSSTAT (RFC 1813 §3.3.18). Avail is the part of Free that the
// caller may use.
type FSStatResult struct {
	Attr                              PostOpAttr
	TotalBytes, FreeBytes, AvailBytes uint64
	TotalFiles, FreeFiles, AvailFiles uint64
	InvarSec                          uint32 // seconds for which the server expects no change
}

// FSInfoResult is the result of FSINFO (RFC 1813 §3.3.19). Sizes are in bytes.
type FSInfoResult struct {
	Attr                           PostOpAttr
	ReadMax, ReadPref, ReadMult    uint32
	WriteMax, WritePref, WriteMult uint32
	DirPref                        uint32
	MaxFileSize                    uint64
	TimeDelta                      Time
	Properties                     uint32 // FSF bits
}

// PathConfResult is the result of PATHCONF (RFC 1813 §3.3.20).
type PathConfResult struct {
	Attr            PostOpAttr
	LinkMax         uint32
	NameMax         uint32
	NoTrunc         bool
	ChownRestricted bool
	CaseInsensitive bool
	CasePreserving  bool
}

// CommitResult is the result of COMMIT (RFC 1813 §3.3.21).
type CommitResult struct {
	Change Change
	Verf   Verifier
}
