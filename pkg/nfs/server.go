package nfs

import "context"

// A Server is what the file system needs of a server, in the terms of no version of NFS. It is safe
// for concurrent use.
//
// Each method makes one call, or with NFSv4 one COMPOUND. It takes an encoded credential (see
// sunrpc.AppendAuthSys). After an [*Error] with a status from the server, the result has the
// attributes of the reply. After any other error the result is undefined. Errors:
//   - [*Error]: the status from the server, or arguments that are invalid;
//   - an error that wraps [ErrMalformed]: the reply is not valid;
//   - the wrapped error of the transport.
//
// [Errno] converts each of them to an error number. A method does not retry a status. It returns soon
// after ctx ends.
type Server interface {
	// GetAttr gets the attributes of an object.
	GetAttr(ctx context.Context, cred []byte, h Handle) (Attr, error)
	// SetAttr sets attributes of an object.
	SetAttr(ctx context.Context, cred []byte, h Handle, set SetAttr) (Change, error)
	// Lookup looks up a name in a directory.
	Lookup(ctx context.Context, cred []byte, dir Handle, name string) (LookupResult, error)
	// Access asks which rights of mask, AccessRead to AccessExecute, the user of cred has.
	Access(ctx context.Context, cred []byte, h Handle, mask uint32) (AccessResult, error)
	// ReadLink stores the path of a symbolic link in buf.
	ReadLink(ctx context.Context, cred []byte, h Handle, buf []byte) (ReadLinkResult, error)

	// Open opens a file with the rights of mask. If the server denies one of them, the result lacks
	// it, and no state remains at the server.
	Open(ctx context.Context, cred []byte, h Handle, mask uint32) (OpenResult, error)
	// Close ends the state of an open file.
	Close(ctx context.Context, cred []byte, h Handle, state OpenState) error
	// Read reads from a file at offset off into pieces of memory, none of which is empty, in their
	// order. A server may return fewer bytes without EOF, even none.
	Read(ctx context.Context, cred []byte, h Handle, state OpenState, off uint64, pieces [][]byte) (ReadResult, error)
	// Write writes data at offset off. A server may write less, but at least one byte.
	Write(ctx context.Context, cred []byte, h Handle, state OpenState, off uint64, data []byte,
		stable Stability) (WriteResult, error)
	// Commit makes written data of a file stable. Offset and count 0 stand for the whole file.
	Commit(ctx context.Context, cred []byte, h Handle, off uint64, count uint32) (CommitResult, error)

	// Create creates a file.
	Create(ctx context.Context, cred []byte, dir Handle, name string, how CreateHow) (CreateResult, error)
	// Mkdir creates a directory.
	Mkdir(ctx context.Context, cred []byte, dir Handle, name string, set SetAttr) (CreateResult, error)
	// Symlink creates a symbolic link.
	Symlink(ctx context.Context, cred []byte, dir Handle, name, target string, set SetAttr) (CreateResult, error)
	// Mknod creates a device file, a FIFO or a socket.
	Mknod(ctx context.Context, cred []byte, dir Handle, name string, typ FileType, set SetAttr,
		dev Device) (CreateResult, error)
	// Remove removes a name that is not of a directory.
	Remove(ctx context.Context, cred []byte, dir Handle, name string) (Change, error)
	// Rmdir removes an empty directory.
	Rmdir(ctx context.Context, cred []byte, dir Handle, name string) (Change, error)
	// Rename renames an object, and replaces another object with the new name.
	Rename(ctx context.Context, cred []byte, fromDir Handle, fromName string, toDir Handle,
		toName string) (RenameResult, error)
	// Link gives a file another name.
	Link(ctx context.Context, cred []byte, h, dir Handle, name string) (LinkResult, error)

	// ReadDir lists a directory from a cookie on, which is 0 at the start. It calls each for the
	// entries until each returns false. count bounds the reply in bytes. With plus the entries have
	// handles and attributes.
	ReadDir(ctx context.Context, cred []byte, dir Handle, cookie uint64, verf Verifier, count uint32, plus bool,
		each func(*DirEntry) bool) (ReadDirResult, error)

	// FSStat gets the room on the file system of an object.
	FSStat(ctx context.Context, cred []byte, h Handle) (FSStatResult, error)
	// FSInfo gets the limits of the server.
	FSInfo(ctx context.Context, cred []byte, h Handle) (FSInfoResult, error)
}

// An OpenState is the state of an open file at the server: a stateid4 (RFC 8881 §3.3.12). NFSv3 has
// no open files, so its states are zero.
type OpenState [16]byte

// OpenResult is the result of Open.
type OpenResult struct {
	AccessResult
	State OpenState
}
