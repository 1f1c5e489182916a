package kernel

import (
	"log"
	"math"
	"sync"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
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
	fs     FileSystem
	opts   Options
	poll   bool   // answers PollFile
	init   []byte // the INIT request
	kernel fuse.InitIn
	active active
	names  *names
}

// NewHandler returns the Handler of a new connection. Negotiate must succeed before other requests.
func NewHandler(fs FileSystem, opts Options) *Handler {
	if opts.Logger == nil {
		opts.Logger = log.Default()
	}
	return &Handler{fs: fs, opts: opts, names: newNames()}
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
	// placed is the size of the data if it is in the memory of Place. All is valid until Send returns.
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
}

// A Request is one request of the kernel, from its arrival to the end of its reply. A transport uses it for
// one request after the other.
type Request struct {
	Header *fuse.InHeader
	Op     Op // OpRename also for OpRename2

	h        *Handler
	t        Transport
	op       *operation
	received ledger.Time

	// The request.
	in, payload []byte   // the fixed part, and what follows it and is not decoded yet
	name, other string   // decoded from payload
	written     [][]byte // data of a WRITE
	one         [1][]byte

	// The reply.
	status fuse.Status
	fixed  int      // bytes without data
	data   [][]byte // follows the fixed part
	placed int      // bytes of data in the memory of Place
	res    fuse.ReadResult
	reply  [smallReply / 8]uint64
	large  []byte // memory of room

	cancel      chan struct{} // closed by an INTERRUPT
	unique      uint64        // guarded by active
	index       int           // guarded by active: in requests
	interrupted bool          // guarded by active: cancel is closed
}

// NewRequest returns a Request whose replies go to t.
func (h *Handler) NewRequest(t Transport) *Request {
	return &Request{h: h, t: t, cancel: make(chan struct{})}
}

// Interrupted returns a channel that is closed when the kernel sends an INTERRUPT: the calling thread
// has a signal.
func (r *Request) Interrupted() <-chan struct{} { return r.cancel }

// Handle handles a request and sends the reply, unless the request has none.
func (r *Request) Handle(m Message) {
	r.Header, r.received = header(m.In), m.Received
	r.Op = Op(r.Header.Opcode)
	r.op = operationOf(r.Op)
	if r.Op == OpRename2 {
		r.Op = OpRename
	}
	defer r.end()
	if r.status = fuse.Status(r.decode(&m)); !r.status.Ok() {
		return
	}
	r.fixed = r.op.reply
	clear(bytesOf(&r.reply)[:r.fixed])
	if r.op.reply > 0 {
		r.h.active.begin(r)
		defer r.h.active.end(r)
	}
	if r.h.poll && r.polls() {
		return
	}
	r.status = r.op.do(r.h.fs, r)
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
		if r.status = r.h.opts.Panicked(v); r.status.Ok() {
			r.status = fuse.EIO
		}
	}
	if r.op.replies() {
		r.send()
		r.h.fs.Replied(Unique(r.Header), r.received)
	}
	if r.res != nil {
		r.res.Done()
	}
	clear(r.data)
	r.Header, r.in, r.payload, r.written, r.one[0], r.data = nil, nil, nil, nil, nil, r.data[:0]
	r.res, r.placed = nil, 0
	if len(r.large) > keepReply {
		r.large = nil
	}
}

// send sends the reply.
func (r *Request) send() {
	reply := bytesOf(&r.reply)
	if r.status != fuse.OK {
		r.t.Send(reply[:putError(reply, r.Header.Unique, syscall.Errno(r.status))], nil, 0)
		return
	}
	putHeader(reply, r.fixed+r.placed+size(r.data), 0, r.Header.Unique)
	r.t.Send(reply[:r.fixed], r.data, r.placed)
}

// PollFile is a name in the root directory of a mount. The kernel learns by a poll(2) of this file that
// it need not send POLL requests. The file system does not know the file.
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
		r.status = fuse.ENODATA
	case r.Op != OpOpen && r.Op != OpFlush && r.Op != OpRelease && r.Op != OpForget:
		r.status = fuse.ERANGE
	}
	return true
}

// active are the requests in progress.
type active struct {
	sync.Mutex
	requests []*Request
}

func (a *active) begin(r *Request) {
	a.Lock()
	defer a.Unlock()
	r.unique, r.index = r.Header.Unique, len(a.requests)
	a.requests = append(a.requests, r)
}

// end reverses begin. It renews the channel of a request that was interrupted.
func (a *active) end(r *Request) {
	a.Lock()
	defer a.Unlock()
	last := len(a.requests) - 1
	moved := a.requests[last]
	a.requests[r.index], moved.index = moved, r.index
	a.requests[last] = nil
	a.requests = a.requests[:last]
	if r.interrupted {
		r.cancel, r.interrupted = make(chan struct{}), false
	}
}

// Interrupt interrupts a request. It reports false if the request is not in progress or was
// interrupted before.
func (h *Handler) Interrupt(unique uint64) bool {
	h.active.Lock()
	defer h.active.Unlock()
	for _, r := range h.active.requests { // INTERRUPTs are rare
		if r.unique == unique && !r.interrupted {
			r.interrupted = true
			close(r.cancel)
			return true
		}
	}
	return false
}
