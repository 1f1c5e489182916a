package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// An echoFS answers a request by what is in it, and keeps the arguments. It panics for some
// requests.
type echoFS struct {
	*testFS
	seen []byte
}

// answer returns the status of a request, and random bits that depend only on the request.
func (fs *echoFS) answer(method string, args ...any) (fuse.Status, uint64) {
	call := fmt.Appendf(nil, "%s %+v", method, args)
	fs.seen = append(fs.seen, call...)
	sum := fnv.New64a()
	_, _ = sum.Write(call)
	bits := sum.Sum64()
	switch bits >> 8 % 8 {
	case 0:
		return fuse.Status(1 + bits>>16%133), bits
	case 1:
		panic(method)
	case 2:
		return fuse.EINTR, bits
	}
	return fuse.OK, bits
}

func (fs *echoFS) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	status, bits := fs.answer("lookup", *h, name)
	out.NodeId, out.EntryValid, out.Attr.Mode = bits%3, bits, uint32(bits) // also a name that does not exist
	return status
}

func (fs *echoFS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	status, bits := fs.answer("getattr", *in)
	out.AttrValid, out.Attr.Size = bits, bits
	return status
}

func (fs *echoFS) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	status, bits := fs.answer("open", *in)
	out.Fh, out.OpenFlags = bits, uint32(bits>>7)
	return status
}

func (fs *echoFS) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	status, bits := fs.answer("write", *in, data)
	return uint32(bits), status
}

func (fs *echoFS) Release(_ <-chan struct{}, in *fuse.ReleaseIn) { fs.answer("release", *in) }

func (fs *echoFS) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	status, _ := fs.answer("flush", *in)
	return status
}

// result returns at most as many bytes as the request asks for.
func (fs *echoFS) result(in *fuse.ReadIn) (*constResult, fuse.Status) {
	status, bits := fs.answer("read", *in)
	return &constResult{vecs: [][]byte{bytes.Repeat([]byte{byte(bits)}, int(bits>>20%(uint64(in.Size)+1)))}}, status
}

func (fs *echoFS) ReadTo(_ <-chan struct{}, in *fuse.ReadIn, place [][]byte) (int, fuse.ReadResult, fuse.Status) {
	res, status := fs.result(in)
	if place == nil {
		return 0, res, status
	}
	return copy(place[0], res.vecs[0]), nil, status
}

func (fs *echoFS) Read(_ <-chan struct{}, in *fuse.ReadIn, _ []byte) (fuse.ReadResult, fuse.Status) {
	res, status := fs.result(in)
	if !status.Ok() {
		return nil, status
	}
	return res, status
}

// A recorder keeps replies.
type recorder struct {
	place []byte // memory of Place, or nil
	sent  []byte
}

func (r *recorder) Place(n int) [][]byte {
	if r.place == nil {
		return nil
	}
	return [][]byte{r.place[:n]}
}

func (r *recorder) Send(reply []byte, data [][]byte) {
	r.sent = append(append(r.sent, reply...), bytes.Join(data, nil)...)
}

func (r *recorder) SendPlaced(header []byte, n int) {
	r.sent = append(append(r.sent, header...), r.place[:n]...)
}

// maxEchoRead bounds the READs of an echoFS.
const maxEchoRead = 1 << 16

// compareWithGoFUSE handles a request with and without go-fuse. Replies, calls of the file system
// and calls of Replied must be the same.
func compareWithGoFUSE(t *testing.T, request []byte) {
	t.Helper()
	// Aligned to 8 bytes, with the bytes of another request behind it.
	memory := make([]uint64, len(request)/8+2)
	in := bytesOfWords(memory)[:len(request):len(request)]
	handle := func(f func(*Call, []byte), place []byte) (reply, seen []byte, replied []uint64) {
		fs := &echoFS{testFS: newTestFS()}
		fs.keepReplied = true
		copy(in, request)
		r := &recorder{place: place}
		c := NewHandler(fs, options(&logBuffer{})).NewCall(r)
		for i := range c.reply {
			c.reply[i] = 0x0123456789abcdef // of another reply
		}
		f(c, in)
		return r.sent, fs.seen, fs.replied
	}
	wantReply, wantSeen, wantReplied := handle((*Call).dispatch, nil)
	for name, place := range map[string][]byte{"": nil, " with a place": make([]byte, maxEchoRead)} {
		reply, seen, replied := handle(func(c *Call, in []byte) { c.Handle(in, ledger.Now()) }, place)
		if !bytes.Equal(reply, wantReply) {
			t.Errorf("reply%s to % x:\ngot  % x\nwant % x", name, request, reply, wantReply)
		}
		if !bytes.Equal(seen, wantSeen) {
			t.Errorf("the file system got%s %q, want %q", name, seen, wantSeen)
		}
		if fmt.Sprint(replied) != fmt.Sprint(wantReplied) {
			t.Errorf("calls of Replied%s: got %v, want %v", name, replied, wantReplied)
		}
	}
}

// limitRead bounds the size of a READ.
func limitRead(request []byte) {
	const at = unsafe.Offsetof(fuse.ReadIn{}.Size)
	if binary.NativeEndian.Uint32(request[4:]) == opRead && len(request) >= int(at)+4 {
		size := binary.NativeEndian.Uint32(request[at:])
		binary.NativeEndian.PutUint32(request[at:], size%maxEchoRead)
	}
}

var directOpcodes = []uint32{opLookup, opGetAttr, opOpen, opRead, opWrite, opRelease, opFlush}

// directRequest returns a request with a payload. Its fixed part depends on seed.
func directRequest(op uint32, node uint64, seed byte, payload string) []byte {
	b := make([]byte, directOps[op].in)
	for i := inHeaderSize; i < len(b); i++ {
		b[i] = seed * byte(i)
	}
	h := fuse.InHeader{Length: uint32(len(b) + len(payload)), Opcode: op, Unique: 8 + uint64(seed), NodeId: node}
	copy(b, bytesOf(&h))
	b = append(b, payload...)
	limitRead(b)
	return b
}

func TestDirectRepliesAreThoseOfGoFUSE(t *testing.T) {
	for _, op := range directOpcodes {
		for seed := range byte(40) { // until each kind of answer has come
			compareWithGoFUSE(t, directRequest(op, fuse.FUSE_ROOT_ID, seed, "name\x00"))
		}
		whole := directRequest(op, 2, 1, "name\x00")
		for n := inHeaderSize; n < len(whole); n++ {
			compareWithGoFUSE(t, whole[:n])
		}
		for _, payload := range []string{"", "\x00", "a", "a\x00b\x00", pollName, pollName + "\x00", pollName + "x\x00",
			string(make([]byte, 300)), "a\x00\x08\x00\x00\x00\x20\x00\x00\x00"} {
			for _, node := range []uint64{0, fuse.FUSE_ROOT_ID, 2, pollNode} {
				request := directRequest(op, node, 1, payload)
				compareWithGoFUSE(t, request)
				header(request).Unique |= resent
				compareWithGoFUSE(t, request)
				for _, extensions := range []uint16{1, 2, 0xffff} {
					header(request).TotalExtlen = extensions
					compareWithGoFUSE(t, request)
				}
			}
		}
	}
}

func FuzzDirectRepliesAreThoseOfGoFUSE(f *testing.F) {
	for _, op := range directOpcodes {
		f.Add(directRequest(op, 2, 3, "name\x00"))
	}
	f.Fuzz(func(t *testing.T, request []byte) {
		if len(request) < inHeaderSize || len(request) > 4096 {
			return
		}
		h := header(append(make([]byte, 0, len(request)), request...))
		request = unsafe.Slice((*byte)(unsafe.Pointer(h)), len(request))
		h.Opcode = directOpcodes[h.Opcode%uint32(len(directOpcodes))]
		limitRead(request)
		compareWithGoFUSE(t, request)
	})
}

// TestDirectRequestsDoNotAllocate counts the allocations of this package.
func TestDirectRequestsDoNotAllocate(t *testing.T) {
	kit.CountsAllocations(t)
	fs := newTestFS()
	res := &constResult{vecs: [][]byte{make([]byte, 4096)}}
	fs.read = func(<-chan struct{}, *fuse.ReadIn) (fuse.ReadResult, fuse.Status) { return res, fuse.OK }
	h := NewHandler(&quietFS{fs}, options(&logBuffer{}))
	null := open(t, "/dev/null", unix.O_WRONLY)
	w := (&DevFuse{Handler: h, fd: null}).newWorker()
	for _, op := range directOpcodes {
		request := directRequest(op, 2, 0, "name\x00")
		if op == opRead {
			(*fuse.ReadIn)(unsafe.Pointer(&request[0])).Size = 4096
		}
		if n := testing.AllocsPerRun(1000, func() { w.call.Handle(request, ledger.Now()) }); n != 0 {
			t.Errorf("allocations of opcode %d: got %v, want 0", op, n)
		}
	}
}

// A quietFS does not keep the data of WRITEs.
type quietFS struct{ *testFS }

func (*quietFS) Write(_ <-chan struct{}, _ *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	return uint32(len(data)), fuse.OK
}

func (*quietFS) Lookup(<-chan struct{}, *fuse.InHeader, string, *fuse.EntryOut) fuse.Status {
	return fuse.ENOENT
}
