package kernel

import (
	"context"
	"log"
	"math"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/ledger"
)

const (
	inHeaderSize = int(unsafe.Sizeof(fuse.InHeader{}))
	// smallReply is larger than any reply without data.
	smallReply = 512
	// keepReply bounds the memory that a Request keeps for the data of its next reply.
	keepReply = 128 << 10
	// maxXAttr is XATTR_SIZE_MAX.
	maxXAttr = 64 << 10
)

// A Handler handles the requests of one connection, whatever transports them. Its methods are safe
// for concurrent use, except for Negotiate.
type Handler struct {
	fs       FileSystem
	requests *Requests // of fs
	opts     Options
	poll     bool   // answers PollFile
	init     []byte // the INIT request
	kernel   fuse.InitIn
	names    *names
}

// NewHandler returns the Handler of a new connection. Negotiate must succeed before other requests.
func NewHandler(fs FileSystem, opts Options) *Handler {
	if opts.Logger == nil {
		opts.Logger = log.Default()
	}
	return &Handler{fs: fs, requests: fs.Requests(), opts: opts, names: newNames()}
}

// A Transport carries the replies to the requests of a Request, one at a time.
type Transport interface {
	// Room returns the size of the largest reply in bytes.
	Room() int
	// Place returns memory in which the data of a reply can arrive, in pieces: n bytes that follow
	// the fuse.OutHeader. It returns nil if there is no such memory. The memory stays valid until
	// the reply is sent.
	Place(n int) [][]byte
	// Send sends a reply: a message that begins with a fuse.OutHeader, and data that follows it.
	// placed is the size of the data if it is in the memory of Place. All is valid until Send
	// returns.
	Send(reply []byte, data [][]byte, placed int)
}

// A Message is a request as a transport receives it.
type Message struct {
	// In is the request, or the fixed part of a WRITE with Data. It has at least the size of a
	// fuse.InHeader, and is aligned to 8 bytes. It is valid until the reply is sent.
	In []byte
	// Data is the data of a WRITE, unless it is in In. Others may change it.
	Data     [][]byte
	Received ledger.Time
	// Resent is set if an earlier process has received the request, and this process got it by
	// other means than from the kernel.
	Resent bool
}

// A Request is one request of the kernel, from its arrival to the end of its reply, and the context
// of the calls that are made for it. A transport uses it for one request after the other. Only the
// goroutine of the request uses it, except for the methods of context.Context and Caller. No context
// may be derived from it, because package context would use it after its end.
type Request struct {
	Header *fuse.InHeader
	Op     Op // OpRename also for OpRename2
	// Unique is the number of the request. It stays the same when the request is sent again. No
	// other request of the file system has the number.
	Unique uint64
	// Resent is set if the request was sent again: an earlier process may have executed it.
	Resent bool
	// Times are the phases since the arrival, Calls the RPCs that have ended, and Bytes the bytes
	// of a file that were read or written. Status is that of the reply.
	Times  ledger.Times
	Calls  int
	Bytes  int
	Status fuse.Status
	// Tag is what an observer keeps from the first RPC to FileSystem.Replied. It is nil at first.
	Tag any
	// FS is what the file system keeps with the Request, also for later requests.
	FS any

	h     *Handler
	t     Transport
	op    *operation
	owner atomic.Uint64 // for Caller

	// The request.
	in, payload []byte   // the fixed part, and what follows it and is not decoded yet
	name, other string   // decoded from payload
	written     [][]byte // data of a WRITE
	one         [1][]byte

	// The reply.
	fixed  int      // bytes without data
	data   [][]byte // follows the fixed part
	placed int      // bytes of data in the memory of Place
	reply  [smallReply / 8]uint64
	large  []byte // memory of room

	done chan struct{}
	// Guarded by Requests.mu.
	ended       bool // done is closed
	interrupted bool
	index       int // in Requests.active
	began       ledger.Time
}

var _ context.Context = (*Request)(nil)

// NewRequest returns a Request whose replies go to t.
func (h *Handler) NewRequest(t Transport) *Request { return &Request{h: h, t: t} }

// Transport returns the Transport of the reply.
func (r *Request) Transport() Transport { return r.t }

// Caller returns the thread and the user that made the system call. pid is 0 when the thread is in
// another PID namespace or in a virtual machine, or belongs to the kernel. Caller can return the
// caller of the next request when a request ends meanwhile.
func (r *Request) Caller() (pid, uid uint32) {
	both := r.owner.Load()
	return uint32(both), uint32(both >> 32)
}

// AddCall adds an RPC that has ended.
func (r *Request) AddCall(rpc *ledger.Times) {
	r.Calls++
	r.Times.Add(rpc)
}

// Deadline returns no deadline.
func (r *Request) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done returns a channel that is closed when no program needs the result any more: the calling
// thread has a fatal signal, the connection has ended, or the file system is aborted. A signal of
// any kind closes it for OpSetLkw.
func (r *Request) Done() <-chan struct{} { return r.done }

// Err returns context.Canceled after Done is closed.
func (r *Request) Err() error {
	select {
	case <-r.done:
		return context.Canceled
	default:
		return nil
	}
}

// requestKey is the context key of RequestOf.
type requestKey struct{}

// Value returns r for RequestOf.
func (r *Request) Value(key any) any {
	if key == (requestKey{}) {
		return r
	}
	return nil
}

// RequestOf returns the Request that is ctx or that ctx is derived from, nil if there is none.
func RequestOf(ctx context.Context) *Request {
	r, _ := ctx.Value(requestKey{}).(*Request)
	return r
}

// endEarly closes Done. The caller holds Requests.mu.
func (r *Request) endEarly() {
	if !r.ended {
		r.ended = true
		close(r.done)
	}
}

// Handle handles a request and sends the reply, unless the request has none.
func (r *Request) Handle(m Message) {
	h := header(m.In)
	r.Header, r.Op, r.op = h, Op(h.Opcode), operationOf(Op(h.Opcode))
	if r.Op == OpRename2 {
		r.Op = OpRename
	}
	r.Unique, r.Resent = h.Unique&^resent, m.Resent || h.Unique&resent != 0
	r.owner.Store(uint64(h.Uid)<<32 | uint64(h.Pid))
	r.Times.Begin(m.Received)
	r.Calls, r.Bytes, r.Tag = 0, 0, nil
	defer r.end()
	if r.Status = fuse.Status(r.decode(&m)); !r.Status.Ok() {
		return
	}
	r.fixed = r.op.reply
	clear(bytesOf(&r.reply)[:r.fixed])
	if r.op.reply > 0 {
		r.Times.Mark(ledger.PhaseQueue, ledger.Now())
		r.h.requests.begin(r)
		defer r.h.requests.end(r)
	}
	if r.h.poll && r.polls() {
		return
	}
	r.Status = r.op.do(r.h.fs, r)
}

// decode checks a request and decodes what follows its fixed part.
func (r *Request) decode(m *Message) syscall.Errno {
	op, opts, room := r.op, &r.h.opts, r.t.Room()
	if op.do == nil || r.Op >= OpSetXAttr && r.Op <= OpRemoveXAttr && !opts.XAttrs {
		return unix.ENOSYS
	}
	payload, extensions := len(m.In)-op.in, 8*int(r.Header.TotalExtlen)
	if payload < extensions || room < op.reply {
		return unix.EINVAL
	}
	r.in, r.payload, r.written = m.In[:op.in], m.In[op.in:len(m.In)-extensions], m.Data
	if op.data != nil {
		if n := uint64(op.data(r)); n > uint64(max(opts.MaxWrite, maxXAttr)) || n > uint64(room-op.reply) {
			return unix.EINVAL
		}
	}
	if op.strings != nil && !op.strings(r) {
		return unix.EINVAL
	}
	if opts.ReadOnly && (op.effect == changes || r.Op == OpOpen && opensToChange(arg[fuse.OpenIn](r).Flags)) {
		return unix.EROFS
	}
	return 0
}

// opensToChange reports whether an open with these flags changes a file or allows that.
func opensToChange(flags uint32) bool {
	return flags&syscall.O_ACCMODE != syscall.O_RDONLY || flags&syscall.O_TRUNC != 0
}

// room returns memory for n bytes of data of the reply.
func (r *Request) room(n int) []byte {
	if n > len(r.large) {
		r.large = make([]byte, n)
	}
	return r.large[:n]
}

// end sends the reply, also after a panic, and reports it to the file system.
func (r *Request) end() {
	if v := recover(); v != nil {
		if r.Status = r.h.opts.Panicked(v); r.Status.Ok() {
			r.Status = fuse.EIO
		}
	}
	if r.op.replies() {
		r.Times.Mark(ledger.PhaseLocal, ledger.Now())
		r.send()
		r.Times.Mark(ledger.PhaseReply, ledger.Now())
		r.h.fs.Replied(r)
	}
	clear(r.data)
	r.Header, r.in, r.payload, r.written, r.one[0], r.data = nil, nil, nil, nil, nil, r.data[:0]
	r.placed = 0
	if len(r.large) > keepReply {
		r.large = nil
	}
}

// send sends the reply.
func (r *Request) send() {
	reply := bytesOf(&r.reply)
	if r.Status != fuse.OK {
		r.t.Send(reply[:putError(reply, r.Header.Unique, syscall.Errno(r.Status))], nil, 0)
		return
	}
	putHeader(reply, r.fixed+r.placed+size(r.data), 0, r.Header.Unique)
	r.t.Send(reply[:r.fixed], r.data, r.placed)
}

// PollFile is a name in the root directory of a mount. The kernel learns by a poll(2) of this file
// that it need not send POLL requests. The file system does not know the file.
const PollFile = ".nfsrdmad-poll"

// pollNode is the node of PollFile.
const pollNode = math.MaxUint64

// polls handles a request for PollFile. It returns false for other requests.
func (r *Request) polls() bool {
	a := fuse.Attr{Ino: pollNode, Mode: syscall.S_IFREG | 0o644, Nlink: 1}
	switch {
	case r.Header.NodeId == fuse.FUSE_ROOT_ID && r.Op == OpLookup && r.name == PollFile:
		*result[fuse.EntryOut](r) = fuse.EntryOut{NodeId: pollNode, Attr: a}
	case r.Header.NodeId != pollNode:
		return false
	case r.Op == OpGetAttr:
		result[fuse.AttrOut](r).Attr = a
	case r.Op == OpGetXAttr:
		r.Status = fuse.ENODATA
	case r.Op != OpOpen && r.Op != OpFlush && r.Op != OpRelease && r.Op != OpForget:
		r.Status = fuse.ERANGE
	}
	return true
}
