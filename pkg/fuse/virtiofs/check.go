package virtiofs

import (
	"math"
	"strings"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// Opcodes of the FUSE protocol (include/uapi/linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetAttr     = 3
	opSetAttr     = 4
	opReadlink    = 5
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opRmdir       = 11
	opRename      = 12
	opLink        = 13
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatFs      = 17
	opRelease     = 18
	opFsync       = 20
	opSetXAttr    = 21
	opGetXAttr    = 22
	opListXAttr   = 23
	opRemoveXAttr = 24
	opFlush       = 25
	opInit        = 26
	opOpenDir     = 27
	opReadDir     = 28
	opReleaseDir  = 29
	opFsyncDir    = 30
	opGetLk       = 31
	opSetLk       = 32
	opSetLkw      = 33
	opAccess      = 34
	opCreate      = 35
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opReadDirPlus = 44
	opRename2     = 45
)

const (
	headerSize = int(unsafe.Sizeof(fuse.InHeader{}))
	replySize  = int(unsafe.Sizeof(fuse.OutHeader{}))
	// smallReply is larger than any reply without a variable part.
	smallReply = 1024
	// renameSize is the size of struct fuse_rename_in with its header. fuse.RenameIn has more.
	renameSize = headerSize + 8
	writeSize  = int(unsafe.Sizeof(fuse.WriteIn{}))
	// pollNode is a node that go-fuse answers without the file system.
	pollNode = math.MaxUint64
)

// A rule is what a request must have.
type rule struct {
	size  int // of the fixed part, with the header
	reply int // bytes of the reply without its data, with its header; 0 for no reply
}

const (
	entry    = replySize + int(unsafe.Sizeof(fuse.EntryOut{}))
	attr     = replySize + int(unsafe.Sizeof(fuse.AttrOut{}))
	openOut  = replySize + int(unsafe.Sizeof(fuse.OpenOut{}))
	initSize = headerSize + 16 // major, minor, max_readahead and flags
)

// rules has the requests that a file system over NFSv3 supports. Other requests get ENOSYS.
var rules = map[uint32]rule{
	opLookup:      {headerSize, entry},
	opForget:      {int(unsafe.Sizeof(fuse.ForgetIn{})), 0},
	opGetAttr:     {int(unsafe.Sizeof(fuse.GetAttrIn{})), attr},
	opSetAttr:     {int(unsafe.Sizeof(fuse.SetAttrIn{})), attr},
	opReadlink:    {headerSize, replySize},
	opSymlink:     {headerSize, entry},
	opMknod:       {int(unsafe.Sizeof(fuse.MknodIn{})), entry},
	opMkdir:       {int(unsafe.Sizeof(fuse.MkdirIn{})), entry},
	opUnlink:      {headerSize, replySize},
	opRmdir:       {headerSize, replySize},
	opRename:      {renameSize, replySize},
	opLink:        {int(unsafe.Sizeof(fuse.LinkIn{})), entry},
	opOpen:        {int(unsafe.Sizeof(fuse.OpenIn{})), openOut},
	opRead:        {int(unsafe.Sizeof(fuse.ReadIn{})), replySize},
	opWrite:       {writeSize, replySize + int(unsafe.Sizeof(fuse.WriteOut{}))},
	opStatFs:      {headerSize, replySize + int(unsafe.Sizeof(fuse.StatfsOut{}))},
	opRelease:     {int(unsafe.Sizeof(fuse.ReleaseIn{})), replySize},
	opFsync:       {int(unsafe.Sizeof(fuse.FsyncIn{})), replySize},
	opSetXAttr:    {headerSize + 8, replySize},
	opGetXAttr:    {int(unsafe.Sizeof(fuse.GetXAttrIn{})), replySize},
	opListXAttr:   {int(unsafe.Sizeof(fuse.GetXAttrIn{})), replySize},
	opRemoveXAttr: {headerSize, replySize},
	opFlush:       {int(unsafe.Sizeof(fuse.FlushIn{})), replySize},
	opInit:        {initSize, replySize},
	opOpenDir:     {int(unsafe.Sizeof(fuse.OpenIn{})), openOut},
	opReadDir:     {int(unsafe.Sizeof(fuse.ReadIn{})), replySize},
	opReleaseDir:  {int(unsafe.Sizeof(fuse.ReleaseIn{})), replySize},
	opFsyncDir:    {int(unsafe.Sizeof(fuse.FsyncIn{})), replySize},
	opGetLk:       {int(unsafe.Sizeof(fuse.LkIn{})), replySize + int(unsafe.Sizeof(fuse.LkOut{}))},
	opSetLk:       {int(unsafe.Sizeof(fuse.LkIn{})), replySize},
	opSetLkw:      {int(unsafe.Sizeof(fuse.LkIn{})), replySize},
	opAccess:      {int(unsafe.Sizeof(fuse.AccessIn{})), replySize},
	opCreate:      {int(unsafe.Sizeof(fuse.CreateIn{})), replySize + int(unsafe.Sizeof(fuse.CreateOut{}))},
	opInterrupt:   {int(unsafe.Sizeof(fuse.InterruptIn{})), 0},
	opDestroy:     {headerSize, replySize},
	opBatchForget: {headerSize + 8, 0},
	opReadDirPlus: {int(unsafe.Sizeof(fuse.ReadIn{})), replySize},
	opRename2:     {int(unsafe.Sizeof(fuse.RenameIn{})), replySize},
}

// check returns the error of a request that the kernel would not send through /dev/fuse, or 0. in
// has at least a header and is aligned to 8 bytes. size is the size of the request, which is larger
// than in if the data of a WRITE is elsewhere. room is the size of the buffers for the reply, and
// maxData the largest READ or WRITE.
func check(in []byte, size, room, maxData int) syscall.Errno {
	h := (*fuse.InHeader)(unsafe.Pointer(&in[0]))
	r, ok := rules[h.Opcode]
	switch {
	case !ok:
		return syscall.ENOSYS
	case len(in) < r.size || room < r.reply:
		return syscall.EINVAL
	case h.NodeId == pollNode:
		return syscall.ESTALE
	}
	payload, extensions := size-r.size, 8*int(h.TotalExtlen)
	if extensions > payload {
		return syscall.EINVAL
	}
	return checkSizes(in, payload-extensions, room, maxData)
}

// changes reports whether a checked request changes the file system.
func changes(in []byte) bool {
	switch (*fuse.InHeader)(unsafe.Pointer(&in[0])).Opcode {
	case opSetAttr, opSymlink, opMknod, opMkdir, opUnlink, opRmdir, opRename, opRename2, opLink, opWrite, opSetXAttr,
		opRemoveXAttr, opCreate:
		return true
	case opOpen:
		flags := (*fuse.OpenIn)(unsafe.Pointer(&in[0])).Flags
		return flags&syscall.O_ACCMODE != syscall.O_RDONLY || flags&syscall.O_TRUNC != 0
	}
	return false
}

// checkSizes checks sizes and offsets of data.
func checkSizes(in []byte, payload, room, maxData int) syscall.Errno {
	p := unsafe.Pointer(&in[0])
	var size, off uint64
	switch (*fuse.InHeader)(p).Opcode {
	case opRead, opReadDir, opReadDirPlus:
		r := (*fuse.ReadIn)(p)
		size = uint64(r.Size)
		if (*fuse.InHeader)(p).Opcode == opRead { // the offsets of directories are cookies
			off = r.Offset
		}
	case opGetXAttr, opListXAttr:
		size = uint64((*fuse.GetXAttrIn)(p).Size)
	case opWrite:
		w := (*fuse.WriteIn)(p)
		if uint64(w.Size) != uint64(payload) || payload > maxData {
			return syscall.EINVAL
		}
		return checkRange(w.Offset, uint64(w.Size))
	}
	if size > uint64(maxData) || size > uint64(room-min(room, replySize)) {
		return syscall.EINVAL
	}
	return checkRange(off, size)
}

// checkRange returns EFBIG for a range that does not end at an offset of the type loff_t.
func checkRange(off, size uint64) syscall.Errno {
	if off > math.MaxInt64-size {
		return syscall.EFBIG
	}
	return 0
}

// A checkedFS is a file system that gets no names of directory entries that the kernel would not
// send. They would name other directories, or break the server's rules.
type checkedFS struct{ FileSystem }

func invalid(names ...string) bool {
	for _, name := range names {
		if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
			return true
		}
	}
	return false
}

func (f checkedFS) Lookup(c <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Lookup(c, h, name, out)
}

func (f checkedFS) Mknod(c <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Mknod(c, in, name, out)
}

func (f checkedFS) Mkdir(c <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Mkdir(c, in, name, out)
}

func (f checkedFS) Symlink(c <-chan struct{}, h *fuse.InHeader, to, name string, out *fuse.EntryOut) fuse.Status {
	if invalid(name) || to == "" {
		return fuse.EINVAL
	}
	return f.FileSystem.Symlink(c, h, to, name, out)
}

func (f checkedFS) Unlink(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Unlink(c, h, name)
}

func (f checkedFS) Rmdir(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Rmdir(c, h, name)
}

func (f checkedFS) Rename(c <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	if invalid(from, to) {
		return fuse.EINVAL
	}
	return f.FileSystem.Rename(c, in, from, to)
}

func (f checkedFS) Link(c <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Link(c, in, name, out)
}

func (f checkedFS) Create(c <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if invalid(name) {
		return fuse.EINVAL
	}
	return f.FileSystem.Create(c, in, name, out)
}
