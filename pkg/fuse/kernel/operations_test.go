package kernel

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// An argsFS keeps the arguments of its methods.
type argsFS struct {
	*testFS
	calls []string
}

func (fs *argsFS) call(args ...any) fuse.Status {
	fs.calls = append(fs.calls, fmt.Sprintf("%q", args))
	return fuse.OK
}

func (fs *argsFS) Forget(node, lookups uint64) { fs.call(node, lookups) }

func (fs *argsFS) Symlink(r *Request, name, target string, out *fuse.EntryOut) fuse.Status {
	out.NodeId = 5
	return fs.call(r.Op, name, target)
}

func (fs *argsFS) Mkdir(r *Request, in *fuse.MkdirIn, name string, _ *fuse.EntryOut) fuse.Status {
	return fs.call(r.Op, in.Mode, name)
}

func (fs *argsFS) Unlink(r *Request, name string) fuse.Status { return fs.call(r.Op, name) }

func (fs *argsFS) Rename(r *Request, oldName string, newDir uint64, newName string, flags uint32) fuse.Status {
	return fs.call(r.Op, oldName, newDir, newName, flags)
}

func (fs *argsFS) Write(r *Request, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	return in.Size, fs.call(r.Op, data)
}

func (fs *argsFS) ReadDir(r *Request, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	out.AddDirEntry(fuse.DirEntry{Name: "entry", Ino: 7, Off: 8})
	return fs.call(r.Op, in.Offset)
}

func (fs *argsFS) SetXAttr(r *Request, name string, value []byte) fuse.Status {
	return fs.call(r.Op, name, value)
}

func (fs *argsFS) GetXAttr(_ *Request, name string, dest []byte) (int, fuse.Status) {
	if len(name) > len(dest) {
		return len(name), fuse.ERANGE
	}
	return copy(dest, name), fuse.OK
}

func (fs *argsFS) ListXAttr(r *Request, dest []byte) (int, fuse.Status) {
	return fs.GetXAttr(r, "a list", dest)
}

// A recorder keeps replies.
type recorder struct {
	place []byte // memory of Place, or nil
	room  int
	sent  []byte
}

func (r *recorder) Room() int { return r.room }

func (r *recorder) Place(n int) [][]byte {
	if r.place == nil {
		return nil
	}
	return [][]byte{r.place[:n]}
}

func (r *recorder) Send(reply []byte, data [][]byte, placed int) {
	r.sent = append(append(append(r.sent, reply...), bytes.Join(data, nil)...), r.place[:placed]...)
}

// message returns a request: a structure that begins with a fuse.InHeader, and what follows it.
func message[T any](op Op, body T, payload string) Message {
	h := (*fuse.InHeader)(unsafe.Pointer(&body))
	h.Opcode, h.Unique = uint32(op), 8
	if h.NodeId == 0 {
		h.NodeId = fileNode
	}
	in := append(bytesOf(&body), payload...)
	h.Length = uint32(len(in))
	return Message{In: append(bytesOfWords(make([]uint64, len(in)/8+1))[:0], in...), Received: ledger.Now()}
}

// text returns a value in the memory of a reply.
func text[T any](v T) string { return string(bytesOf(&v)) }

func TestOperations(t *testing.T) {
	rename, xattr := renameIn{dir: 3}, setXAttrIn{size: 1}
	write := fuse.WriteIn{Size: 4}
	pieces := message(OpWrite, write, "")
	pieces.Data = [][]byte{[]byte("dat"), []byte("a")}
	extended := setXAttrIn{InHeader: fuse.InHeader{TotalExtlen: 1}}
	entry := fuse.EntryOut{NodeId: 5}
	for _, c := range []struct {
		name  string
		m     Message
		call  string
		reply string // after its header
	}{
		{"FORGET", message(OpForget, fuse.ForgetIn{Nlookup: 3}, ""), `['\x02' '\x03']`, ""},
		{"BATCH_FORGET", message(OpBatchForget, batchForgetIn{count: 1}, text(forgetOne{4, 5})), `['\x04' '\x05']`, ""},
		{"BATCH_FORGET, short", message(OpBatchForget, batchForgetIn{count: 2}, text(forgetOne{4, 5})[:15]), "", ""},
		{"SYMLINK", message(OpSymlink, fuse.InHeader{}, "name\x00../to\x00"), `["symlink" "name" "../to"]`,
			text(entry)},
		{"MKDIR", message(OpMkdir, fuse.MkdirIn{Mode: '7'}, "name\x00"), `["mkdir" '7' "name"]`, text(fuse.EntryOut{})},
		{"UNLINK", message(OpUnlink, fuse.InHeader{}, "name\x00"), `["unlink" "name"]`, ""},
		{"SETXATTR, extended", message(OpSetXAttr, extended, "name\x00vextended"), `["setxattr" "name" "v"]`, ""},
		{"RENAME", message(OpRename, rename, "from\x00to\x00"), `["rename" "from" '\x03' "to" '\x00']`, ""},
		{"RENAME2", message(OpRename2, fuse.RenameIn{Newdir: 3, Flags: 1}, "from\x00to\x00"),
			`["rename" "from" '\x03' "to" '\x01']`, ""},
		{"WRITE", message(OpWrite, write, "data"), `["write" ["data"]]`, text(fuse.WriteOut{Size: 4})},
		{"WRITE, pieces", pieces, `["write" ["dat" "a"]]`, text(fuse.WriteOut{Size: 4})},
		{"READDIR", message(OpReadDir, fuse.ReadIn{Size: 64, Offset: 'o'}, ""), `["readdir" 'o']`,
			text([4]uint64{7, 8, 5, 0x7972746e65})},
		{"SETXATTR", message(OpSetXAttr, xattr, "name\x00v\x00"), `["setxattr" "name" "v\x00"]`, ""},
		{"GETXATTR", message(OpGetXAttr, fuse.GetXAttrIn{Size: 9}, "name\x00"), "", "name"},
		{"GETXATTR, size", message(OpGetXAttr, fuse.GetXAttrIn{}, "name\x00"), "", text(fuse.GetXAttrOut{Size: 4})},
		{"LISTXATTR", message(OpListXAttr, fuse.GetXAttrIn{Size: 9}, ""), "", "a list"},
		{"poll file", message(OpLookup, fuse.InHeader{NodeId: fuse.FUSE_ROOT_ID}, PollFile+"\x00"), "",
			text(fuse.EntryOut{NodeId: pollNode, Attr: fuse.Attr{Ino: pollNode, Mode: 0o100644, Nlink: 1}})},
		{"poll file, RELEASE", message(OpRelease, fuse.ReleaseIn{InHeader: fuse.InHeader{NodeId: pollNode}}, ""), "",
			""},
		{"poll file, FORGET", message(OpForget, fuse.ForgetIn{InHeader: fuse.InHeader{NodeId: pollNode}}, ""), "", ""},
	} {
		fs, r := &argsFS{testFS: newTestFS()}, &recorder{room: 1 << 20}
		h := NewHandler(fs, options(&logBuffer{}))
		h.poll = true
		q := h.NewRequest(r)
		for i := range q.reply {
			q.reply[i] = 0x0123456789abcdef // of another reply
		}
		op := header(c.m.In).Opcode
		q.Handle(c.m)
		calls := fs.calls
		if c.call == "" && len(calls) == 0 {
			calls = []string{""}
		}
		want := text(fuse.OutHeader{Length: uint32(headerSize + len(c.reply)), Unique: 8}) + c.reply
		if !operationOf(Op(op)).replies() {
			want = ""
		}
		if len(calls) != 1 || calls[0] != c.call || string(r.sent) != want {
			t.Errorf("%s: got the calls %q and the reply\n% x, want %q and\n% x", c.name, calls, r.sent, c.call, want)
		}
	}
}

func TestInvalidRequests(t *testing.T) {
	link, read := fuse.LinkIn{}, fuse.ReadIn{Size: 200}
	rename := renameIn{dir: 3}
	type test struct {
		name string
		m    Message
		want syscall.Errno
	}
	tests := []test{
		{"unknown", message(99, fuse.InHeader{}, ""), unix.ENOSYS},
		{"IOCTL", message(39, fuse.IoctlIn{OutSize: 1 << 31}, ""), unix.ENOSYS},
		{"no NUL", message(OpUnlink, fuse.InHeader{}, "name"), unix.EINVAL},
		{"one name", message(OpRename, rename, "name\x00"), unix.EINVAL},
		{"no target", message(OpSymlink, fuse.InHeader{}, "name\x00\x00"), unix.EINVAL},
		{"extensions", message(OpGetAttr, fuse.GetAttrIn{InHeader: fuse.InHeader{TotalExtlen: 9}}, ""), unix.EINVAL},
		{"no room for the reply", message(OpRead, read, ""), unix.EINVAL},
		{"READ offset", message(OpRead, fuse.ReadIn{Size: 9, Offset: 1<<63 - 5}, ""), unix.EFBIG},
		{"READDIR too large", message(OpReadDir, fuse.ReadIn{Size: 2 << 20}, ""), unix.EINVAL},
		{"WRITE size", message(OpWrite, fuse.WriteIn{Size: 9}, "x"), unix.EINVAL},
		{"WRITE offset", message(OpWrite, fuse.WriteIn{Size: 1, Offset: 1<<64 - 1}, "x"), unix.EFBIG},
		{"read-only, LINK", message(OpLink, link, "x\x00"), unix.EROFS},
		{"read-only, OPEN", message(OpOpen, fuse.OpenIn{Flags: unix.O_TRUNC}, ""), unix.EROFS},
	}
	for _, name := range []string{"", ".", "..", "sub/x", "/"} {
		tests = append(tests, test{"rename to " + name, message(OpRename, rename, "a\x00"+name+"\x00"), unix.EINVAL})
		for _, op := range []Op{OpLookup, OpMknod, OpMkdir, OpSymlink, OpUnlink, OpRmdir, OpRename, OpRename2, OpLink,
			OpCreate} {
			m := message(op, [30]uint64{}, "")
			m.In = append(m.In[:operationOf(op).in], name+"\x00name\x00"...)
			tests = append(tests, test{op.String() + " " + name, m, unix.EINVAL})
		}
	}
	for op := range NumOps { // one byte less than the fixed part
		if o := operationOf(op); o.reply > 0 && o.in > inHeaderSize {
			m := message(op, [30]uint64{}, "")
			m.In = m.In[:o.in-1]
			tests = append(tests, test{"short " + op.String(), m, unix.EINVAL})
		}
	}
	for _, c := range tests {
		opts, r := options(&logBuffer{}), &recorder{room: 150}
		opts.ReadOnly = c.want == unix.EROFS
		NewHandler(&testFS{}, opts).NewRequest(r).Handle(c.m)
		want := text(fuse.OutHeader{Length: uint32(headerSize), Status: -int32(c.want), Unique: 8})
		if string(r.sent) != want {
			t.Errorf("%s: got % x, want % x", c.name, r.sent, want)
		}
	}
}

// TestRequestsDoNotAllocate counts the allocations of this package.
func TestRequestsDoNotAllocate(t *testing.T) {
	kit.CountsAllocations(t)
	fs := newTestFS()
	data := [][]byte{make([]byte, 4096)}
	fs.read = func(*Request, *fuse.ReadIn) ([][]byte, fuse.Status) { return data, fuse.OK }
	h := NewHandler(&quietFS{fs}, options(&logBuffer{}))
	w := (&DevFuse{Handler: h, fd: open(t, "/dev/null", unix.O_WRONLY)}).newWorker()
	for _, m := range []Message{message(OpLookup, fuse.InHeader{}, "name\x00"), message(OpGetAttr, fuse.GetAttrIn{},
		""),
		message(OpOpen, fuse.OpenIn{}, ""), message(OpRead, fuse.ReadIn{Size: 4096}, ""),
		message(OpWrite, fuse.WriteIn{Size: 4}, "data"), message(OpRelease, fuse.ReleaseIn{}, ""),
		message(OpFlush, fuse.FlushIn{}, ""), message(OpForget, fuse.ForgetIn{}, "")} {
		if n := testing.AllocsPerRun(1000, func() { w.request.Handle(m) }); n != 0 {
			t.Errorf("allocations of %v: got %v, want 0", Op(header(m.In).Opcode), n)
		}
	}
}

// A quietFS does not keep the data of WRITEs.
type quietFS struct{ *testFS }

func (*quietFS) Write(_ *Request, in *fuse.WriteIn, _ [][]byte) (uint32, fuse.Status) {
	return in.Size, fuse.OK
}

func (*quietFS) Lookup(*Request, string, *fuse.EntryOut) fuse.Status { return fuse.ENOENT }
