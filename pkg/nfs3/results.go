package nfs3

// The results of the procedures. The caller provides the struct, the method overwrites all of it.
// When the method returns an [*Error] with the server's own status, the attributes in the struct
// are those that the server sent beside the status; after any other error the struct's content is
// undefined.

// LookupResult is what LOOKUP returns (RFC 1813 §3.3.3).
type LookupResult struct {
	FH      FH
	Attr    PostOpAttr // of the object; not with an error
	DirAttr PostOpAttr
}

// AccessResult is what ACCESS returns (RFC 1813 §3.3.4).
type AccessResult struct {
	Attr   PostOpAttr
	Access uint32 // those of the bits asked for that are granted
}

// ReadLinkResult is what READLINK returns (RFC 1813 §3.3.5).
type ReadLinkResult struct {
	Attr PostOpAttr
	N    int // octets of the path, in the caller's buffer
}

// ReadResult is what READ returns (RFC 1813 §3.3.6).
type ReadResult struct {
	Attr PostOpAttr
	N    int // octets read, in the caller's buffer
	EOF  bool
}

// WriteResult is what WRITE returns (RFC 1813 §3.3.7).
type WriteResult struct {
	Wcc       WccData
	Count     uint32 // octets written, at most those asked for
	Committed StableHow
	Verf      Verifier
}

// CreateResult is what CREATE, MKDIR, SYMLINK and MKNOD return (RFC 1813 §3.3.8 to §3.3.11).
type CreateResult struct {
	HasFH  bool // a server may leave the handle out: LOOKUP gets it
	FH     FH
	Attr   PostOpAttr
	DirWcc WccData
}

// CreateHow is createhow3 (RFC 1813 §3.3.8).
type CreateHow struct {
	Mode CreateMode
	Attr SetAttr  // with Unchecked and Guarded
	Verf Verifier // with Exclusive
}

// RenameResult is what RENAME returns (RFC 1813 §3.3.14).
type RenameResult struct {
	From, To WccData // of the two directories
}

// LinkResult is what LINK returns (RFC 1813 §3.3.15).
type LinkResult struct {
	Attr   PostOpAttr // of the file
	DirWcc WccData
}

// ReadDirResult is what READDIR and READDIRPLUS return (RFC 1813 §3.3.16, §3.3.17), beside the
// entries.
type ReadDirResult struct {
	DirAttr PostOpAttr
	Verf    Verifier // to be given with the next call
	EOF     bool     // the last entry of the directory was among these
	Entries int      // number of entries in the reply
}

// DirEntry is entry3 or entryplus3 (RFC 1813 §3.3.16, §3.3.17).
type DirEntry struct {
	FileID uint64
	Cookie uint64 // continues behind this entry
	// Name is 1 to 255 octets, without '/' and NUL; "." and ".." occur. It is a view of the reply.
	Name  []byte
	Attr  PostOpAttr // READDIRPLUS only
	HasFH bool       // READDIRPLUS only
	FH    FH
}

// FSStatResult is what FSSTAT returns (RFC 1813 §3.3.18): octets and files, in all, free, and free
// to the caller.
type FSStatResult struct {
	Attr                              PostOpAttr
	TotalBytes, FreeBytes, AvailBytes uint64
	TotalFiles, FreeFiles, AvailFiles uint64
	InvarSec                          uint32 // seconds for which these numbers hold
}

// FSInfoResult is what FSINFO returns (RFC 1813 §3.3.19). Sizes are octets.
type FSInfoResult struct {
	Attr                           PostOpAttr
	ReadMax, ReadPref, ReadMult    uint32
	WriteMax, WritePref, WriteMult uint32
	DirPref                        uint32
	MaxFileSize                    uint64
	TimeDelta                      Time3
	Properties                     uint32 // FSF bits
}

// PathConfResult is what PATHCONF returns (RFC 1813 §3.3.20).
type PathConfResult struct {
	Attr            PostOpAttr
	LinkMax         uint32
	NameMax         uint32
	NoTrunc         bool
	ChownRestricted bool
	CaseInsensitive bool
	CasePreserving  bool
}

// CommitResult is what COMMIT returns (RFC 1813 §3.3.21).
type CommitResult struct {
	Wcc  WccData
	Verf Verifier
}
