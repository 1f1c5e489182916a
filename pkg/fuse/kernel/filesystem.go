package kernel

import "github.com/hanwen/go-fuse/v2/fuse"

// A FileSystem handles the requests of one connection. Its methods are called concurrently. The
// arguments are valid until the method returns, and strings for longer.
//
// Names are those of directory entries: not empty, not "." or "..", and without slash. Sizes are
// within Options.MaxWrite, and ranges end at an offset of the type loff_t.
type FileSystem interface {
	Lookup(r *Request, name string, out *fuse.EntryOut) fuse.Status
	// Forget releases references of the kernel to a node. The kernel does not wait for it.
	Forget(node, lookups uint64)
	GetAttr(r *Request, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status
	SetAttr(r *Request, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status
	Readlink(r *Request) ([]byte, fuse.Status)
	Symlink(r *Request, name, target string, out *fuse.EntryOut) fuse.Status
	Mknod(r *Request, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status
	Mkdir(r *Request, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status
	Unlink(r *Request, name string) fuse.Status
	Rmdir(r *Request, name string) fuse.Status
	Rename(r *Request, oldName string, newDir uint64, newName string, flags uint32) fuse.Status
	Link(r *Request, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status
	Open(r *Request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status
	Create(r *Request, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status
	// Read handles a READ. place, if not nil, is memory for in.Size bytes, in pieces. Read may
	// write the data there: it then returns the number of bytes and no other data. What else it
	// writes there is lost. It must not read from place, and not write to it after it has returned.
	// The data that Read returns otherwise stays valid until Replied.
	Read(r *Request, in *fuse.ReadIn, place [][]byte) (placed int, data [][]byte, status fuse.Status)
	// Write takes the data, which can change meanwhile, and returns the number of bytes.
	Write(r *Request, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status)
	Flush(r *Request, in *fuse.FlushIn) fuse.Status
	Fsync(r *Request, in *fuse.FsyncIn) fuse.Status
	Release(r *Request, in *fuse.ReleaseIn) fuse.Status
	OpenDir(r *Request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status
	ReadDir(r *Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status
	ReadDirPlus(r *Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status
	FsyncDir(r *Request, in *fuse.FsyncIn) fuse.Status
	ReleaseDir(r *Request, in *fuse.ReleaseIn) fuse.Status
	StatFs(r *Request, out *fuse.StatfsOut) fuse.Status
	Access(r *Request, in *fuse.AccessIn) fuse.Status
	// GetXAttr and ListXAttr fill dest and return the number of bytes. They return ERANGE and the
	// number if it is larger than dest.
	GetXAttr(r *Request, name string, dest []byte) (int, fuse.Status)
	ListXAttr(r *Request, dest []byte) (int, fuse.Status)
	SetXAttr(r *Request, name string, value []byte) fuse.Status
	RemoveXAttr(r *Request, name string) fuse.Status
	GetLk(r *Request, in *fuse.LkIn, out *fuse.LkOut) fuse.Status
	SetLk(r *Request, in *fuse.LkIn) fuse.Status
	SetLkw(r *Request, in *fuse.LkIn) fuse.Status

	// Replied is called after the reply to a request was written, also if the write failed. The
	// kernel does not send this request again, unless the write failed. Replied is not called for
	// requests without reply (FORGET, BATCH_FORGET, INTERRUPT) and for INIT.
	Replied(r *Request)
	// Requests returns the requests in progress. It always returns the same.
	Requests() *Requests
	// Warn logs a fault of the connection, with key-value pairs. It does not block.
	Warn(msg string, args ...any)
}
