package kernel

import (
	"bytes"
	"math"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// An Op is an operation of the FUSE protocol. Its number is the opcode (include/uapi/linux/fuse.h).
type Op uint32

// The operations that this package knows. The kernel gets ENOSYS for others.
const (
	OpLookup      Op = 1
	OpForget      Op = 2
	OpGetAttr     Op = 3
	OpSetAttr     Op = 4
	OpReadlink    Op = 5
	OpSymlink     Op = 6
	OpMknod       Op = 8
	OpMkdir       Op = 9
	OpUnlink      Op = 10
	OpRmdir       Op = 11
	OpRename      Op = 12
	OpLink        Op = 13
	OpOpen        Op = 14
	OpRead        Op = 15
	OpWrite       Op = 16
	OpStatFs      Op = 17
	OpRelease     Op = 18
	OpFsync       Op = 20
	OpSetXAttr    Op = 21
	OpGetXAttr    Op = 22
	OpListXAttr   Op = 23
	OpRemoveXAttr Op = 24
	OpFlush       Op = 25
	OpInit        Op = 26
	OpOpenDir     Op = 27
	OpReadDir     Op = 28
	OpReleaseDir  Op = 29
	OpFsyncDir    Op = 30
	OpGetLk       Op = 31
	OpSetLk       Op = 32
	OpSetLkw      Op = 33
	OpAccess      Op = 34
	OpCreate      Op = 35
	OpInterrupt   Op = 36
	OpDestroy     Op = 38
	OpBatchForget Op = 42
	OpReadDirPlus Op = 44
	OpRename2     Op = 45
	// NumOps is larger than the number of each operation.
	NumOps Op = 46
)

// String returns the name of an operation.
func (o Op) String() string {
	if op := operationOf(o); op.name != "" {
		return op.name
	}
	return "unknown"
}

// RepliesData reports whether the reply to an operation has data of a size that the request tells,
// in memory of a Request.
func (o Op) RepliesData() bool { return o != OpRead && operationOf(o).data != nil }

// An operation is what this package knows about an Op.
type operation struct {
	name    string
	in      int                                    // bytes of the fixed part of the request, with its header
	reply   int                                    // bytes of the reply without data, with its header; 0 for no reply
	strings func(*Request) bool                    // decodes the names behind the fixed part; nil for none
	data    func(*Request) uint32                  // bytes of data that the request asks for; nil for none
	effect  effect                                 // on the file system
	do      func(FileSystem, *Request) fuse.Status // nil if the operation is not supported
}

// An effect says whether an operation changes the file system. OPEN does with some flags.
type effect bool

const reads, changes effect = false, true

const (
	entryReply = headerSize + int(unsafe.Sizeof(fuse.EntryOut{}))
	writeReply = headerSize + int(unsafe.Sizeof(fuse.WriteOut{}))
)

var operations = [NumOps]operation{
	OpLookup:      {"lookup", inHeaderSize, entryReply, oneName, nil, reads, lookup},
	OpForget:      {"forget", sizeOf[fuse.ForgetIn](), 0, nil, nil, reads, forget},
	OpBatchForget: {"forget", sizeOf[batchForgetIn](), 0, nil, nil, reads, batchForget},
	OpGetAttr:     inOut("getattr", reads, FileSystem.GetAttr),
	OpSetAttr:     inOut("setattr", changes, FileSystem.SetAttr),
	OpReadlink:    {"readlink", inHeaderSize, headerSize, nil, nil, reads, readlink},
	OpSymlink:     {"symlink", inHeaderSize, entryReply, nameAndTarget, nil, changes, symlink},
	OpMknod:       inNameOut("mknod", FileSystem.Mknod),
	OpMkdir:       inNameOut("mkdir", FileSystem.Mkdir),
	OpUnlink:      named("unlink", oneName, FileSystem.Unlink),
	OpRmdir:       named("rmdir", oneName, FileSystem.Rmdir),
	OpRename:      {"rename", sizeOf[renameIn](), headerSize, twoNames, nil, changes, rename},
	OpRename2:     {"rename", sizeOf[fuse.RenameIn](), headerSize, twoNames, nil, changes, rename2},
	OpLink:        inNameOut("link", FileSystem.Link),
	OpOpen:        inOut("open", reads, FileSystem.Open),
	OpCreate:      inNameOut("create", FileSystem.Create),
	OpRead:        {"read", sizeOf[fuse.ReadIn](), headerSize, nil, readSize, reads, read},
	OpWrite:       {"write", sizeOf[fuse.WriteIn](), writeReply, nil, nil, changes, write},
	OpFlush:       in("flush", FileSystem.Flush),
	OpFsync:       in("fsync", FileSystem.Fsync),
	OpRelease:     in("release", FileSystem.Release),
	OpOpenDir:     inOut("opendir", reads, FileSystem.OpenDir),
	OpReadDir:     list("readdir", FileSystem.ReadDir),
	OpReadDirPlus: list("readdirplus", FileSystem.ReadDirPlus),
	OpFsyncDir:    in("fsyncdir", FileSystem.FsyncDir),
	OpReleaseDir:  in("releasedir", FileSystem.ReleaseDir),
	OpStatFs:      {"statfs", inHeaderSize, replyOf[fuse.StatfsOut](), nil, nil, reads, statFs},
	OpAccess:      in("access", FileSystem.Access),
	OpGetXAttr:    {"getxattr", sizeOf[fuse.GetXAttrIn](), headerSize, attribute, xattrSize, reads, getXAttr},
	OpListXAttr:   {"listxattr", sizeOf[fuse.GetXAttrIn](), headerSize, nil, xattrSize, reads, getXAttr},
	OpSetXAttr:    {"setxattr", sizeOf[setXAttrIn](), headerSize, attribute, nil, changes, setXAttr},
	OpRemoveXAttr: named("removexattr", attribute, FileSystem.RemoveXAttr),
	OpGetLk:       inOut("getlk", reads, FileSystem.GetLk),
	OpSetLk:       in("setlk", FileSystem.SetLk),
	OpSetLkw:      in("setlkw", FileSystem.SetLkw),
	OpInterrupt:   {"interrupt", sizeOf[fuse.InterruptIn](), 0, nil, nil, reads, interrupt},
}

// operationOf returns what this package knows about an operation: nothing for an unknown one.
func operationOf(o Op) *operation {
	if o >= NumOps {
		o = 0
	}
	return &operations[o]
}

// replies reports whether the kernel waits for a reply. It waits for that to an unknown operation.
func (op *operation) replies() bool { return op.reply > 0 || op.do == nil }

// The forms of requests of which the kernel sends less than the types of go-fuse have, and of those
// that go-fuse has no types for.
type (
	renameIn struct {
		fuse.InHeader
		dir uint64
	}
	setXAttrIn struct {
		fuse.InHeader
		size, _ uint32
	}
	batchForgetIn struct {
		fuse.InHeader
		count, _ uint32
	}
	forgetOne struct{ node, lookups uint64 }
)

// sizeOf returns the size of a type, and replyOf that of a reply with a value of the type.
func sizeOf[T any]() int  { return int(unsafe.Sizeof(*new(T))) }
func replyOf[T any]() int { return headerSize + sizeOf[T]() }

// arg returns the fixed part of a request, and result that of its reply.
func arg[T any](r *Request) *T    { return (*T)(unsafe.Pointer(&r.in[0])) }
func result[T any](r *Request) *T { return (*T)(unsafe.Add(unsafe.Pointer(&r.reply), headerSize)) }

// in, inOut, inNameOut, named and list return operations whose methods have these arguments.
func in[I any](name string, do func(FileSystem, *Request, *I) fuse.Status) operation {
	return operation{name, sizeOf[I](), headerSize, nil, nil, reads, func(fs FileSystem, r *Request) fuse.Status {
		return do(fs, r, arg[I](r))
	}}
}

func inOut[I, O any](name string, e effect, do func(FileSystem, *Request, *I, *O) fuse.Status) operation {
	return operation{name, sizeOf[I](), replyOf[O](), nil, nil, e, func(fs FileSystem, r *Request) fuse.Status {
		return do(fs, r, arg[I](r), result[O](r))
	}}
}

func inNameOut[I, O any](name string, do func(FileSystem, *Request, *I, string, *O) fuse.Status) operation {
	return operation{name, sizeOf[I](), replyOf[O](), oneName, nil, changes,
		func(fs FileSystem, r *Request) fuse.Status {
			return do(fs, r, arg[I](r), r.name, result[O](r))
		}}
}

func named(name string, strings func(*Request) bool, do func(FileSystem, *Request, string) fuse.Status) operation {
	return operation{name, inHeaderSize, headerSize, strings, nil, changes,
		func(fs FileSystem, r *Request) fuse.Status {
			return do(fs, r, r.name)
		}}
}

func list(name string, do func(FileSystem, *Request, *fuse.ReadIn, *fuse.DirEntryList) fuse.Status) operation {
	read := func(fs FileSystem, r *Request) fuse.Status {
		in := arg[fuse.ReadIn](r)
		entries := fuse.NewDirEntryList(r.room(int(in.Size)), in.Offset)
		status := do(fs, r, in, entries)
		r.data = append(r.data, entries.Bytes())
		return status
	}
	return operation{name, sizeOf[fuse.ReadIn](), headerSize, nil, readSize, reads, read}
}

func lookup(fs FileSystem, r *Request) fuse.Status {
	return fs.Lookup(r, r.name, result[fuse.EntryOut](r))
}
func statFs(fs FileSystem, r *Request) fuse.Status   { return fs.StatFs(r, result[fuse.StatfsOut](r)) }
func setXAttr(fs FileSystem, r *Request) fuse.Status { return fs.SetXAttr(r, r.name, r.payload) }

func interrupt(_ FileSystem, r *Request) fuse.Status {
	r.h.requests.interruptNumber(arg[fuse.InterruptIn](r).Unique&^resent, r.Times.Start())
	return fuse.OK
}

func forget(fs FileSystem, r *Request) fuse.Status {
	fs.Forget(r.Header.NodeId, arg[fuse.ForgetIn](r).Nlookup)
	return fuse.OK
}

func batchForget(fs FileSystem, r *Request) fuse.Status {
	n := min(int(arg[batchForgetIn](r).count), len(r.payload)/sizeOf[forgetOne]())
	for _, f := range unsafe.Slice((*forgetOne)(unsafe.Pointer(unsafe.SliceData(r.payload))), n) {
		fs.Forget(f.node, f.lookups)
	}
	return fuse.OK
}

func readlink(fs FileSystem, r *Request) fuse.Status {
	target, status := fs.Readlink(r)
	r.data = append(r.data, target)
	return status
}

func symlink(fs FileSystem, r *Request) fuse.Status {
	return fs.Symlink(r, r.name, r.other, result[fuse.EntryOut](r))
}

func rename(fs FileSystem, r *Request) fuse.Status {
	return fs.Rename(r, r.name, arg[renameIn](r).dir, r.other, 0)
}

func rename2(fs FileSystem, r *Request) fuse.Status {
	in := arg[fuse.RenameIn](r)
	return fs.Rename(r, r.name, in.Newdir, r.other, in.Flags)
}

func readSize(r *Request) uint32 { return arg[fuse.ReadIn](r).Size }

func read(fs FileSystem, r *Request) fuse.Status {
	in := arg[fuse.ReadIn](r)
	if !isRange(in.Offset, in.Size) {
		return fuse.Status(unix.EFBIG)
	}
	placed, data, status := fs.Read(r, in, r.t.Place(int(in.Size)))
	if n := placed + size(data); status.Ok() && n > int(in.Size) {
		r.h.opts.Logger.Printf("READ of %d bytes returned %d", in.Size, n)
		return fuse.EIO
	}
	r.placed, r.data = placed, append(r.data, data...)
	return status
}

func write(fs FileSystem, r *Request) (status fuse.Status) {
	in, out := arg[fuse.WriteIn](r), result[fuse.WriteOut](r)
	if len(r.written) == 0 {
		r.one[0] = r.payload
		r.written = r.one[:]
	}
	if n := size(r.written); n != int(in.Size) || n > r.h.opts.MaxWrite {
		return fuse.EINVAL
	}
	if !isRange(in.Offset, in.Size) {
		return fuse.Status(unix.EFBIG)
	}
	out.Size, status = fs.Write(r, in, r.written)
	return status
}

// isRange reports whether a range ends at an offset of the type loff_t.
func isRange(off uint64, size uint32) bool { return off <= math.MaxInt64-uint64(size) }

func size(pieces [][]byte) (n int) {
	for _, b := range pieces {
		n += len(b)
	}
	return n
}

func xattrSize(r *Request) uint32 { return arg[fuse.GetXAttrIn](r).Size }

// getXAttr handles GETXATTR and LISTXATTR. A request for no data gets the size.
func getXAttr(fs FileSystem, r *Request) (status fuse.Status) {
	dest := r.room(int(xattrSize(r)))
	var n int
	if r.Op == OpListXAttr {
		n, status = fs.ListXAttr(r, dest)
	} else {
		n, status = fs.GetXAttr(r, r.name, dest)
	}
	if len(dest) == 0 && (status.Ok() || status == fuse.ERANGE) {
		*result[fuse.GetXAttrOut](r) = fuse.GetXAttrOut{Size: uint32(n)}
		r.fixed = replyOf[fuse.GetXAttrOut]()
		return fuse.OK
	}
	r.data = append(r.data, dest[:min(n, len(dest))])
	return status
}

// next returns the next string of the payload, which ends with a NUL.
func (r *Request) next() (s []byte, ok bool) {
	s, r.payload, ok = bytes.Cut(r.payload, []byte{0})
	return s, ok
}

// isName reports whether a directory can have an entry with the name.
func isName(b []byte) bool {
	return len(b) > 0 && string(b) != "." && string(b) != ".." && bytes.IndexByte(b, '/') < 0
}

// oneName, twoNames, nameAndTarget and attribute decode strings. They return false for invalid
// ones.
func oneName(r *Request) bool {
	b, ok := r.next()
	r.name = r.h.names.get(b)
	return ok && isName(b)
}

func twoNames(r *Request) bool {
	first := oneName(r)
	b, ok := r.next()
	r.other = string(b)
	return first && ok && isName(b)
}

func nameAndTarget(r *Request) bool {
	first := oneName(r)
	b, ok := r.next()
	r.other = string(b)
	return first && ok && len(b) > 0
}

func attribute(r *Request) bool {
	b, ok := r.next()
	r.name = r.h.names.get(b)
	return ok
}
