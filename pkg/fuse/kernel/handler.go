package kernel

import (
	"encoding/binary"
	"log"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
)

// A FileSystem handles the requests of one connection. Its methods are called concurrently. Init
// and OnUnmount are not called.
type FileSystem interface {
	// Read is called only for a READ with extensions, which the kernel does not send. Data of a
	// WRITE in several pieces goes to Writev, other data to Write.
	fuse.RawFileSystem
	// ReadTo handles a READ. place, if not nil, is memory for in.Size bytes, in pieces. ReadTo may
	// write the data there: it then returns the number of bytes and no result. What else it writes
	// there is lost. It must not read from place, and not write to it after it has returned.
	//
	// Otherwise ReadTo returns a result with the method Slices of fuse.ReadResultVector. The slices
	// stay valid until Done, which is called exactly once for each result.
	ReadTo(cancel <-chan struct{}, in *fuse.ReadIn, place [][]byte) (n int, res fuse.ReadResult, status fuse.Status)
	// Replied is called after the reply to a request was written, also if the write failed. unique
	// is Unique of the request, and received is the time of Handle. The kernel does not send this
	// request again, unless the write failed. Replied is not called for requests without reply
	// (FORGET, BATCH_FORGET), INIT and INTERRUPT.
	Replied(unique uint64, received ledger.Time)
	// Disconnected is called once, when the kernel has ended the connection. No program waits for
	// the requests in progress any more, so they should end.
	Disconnected()
	// Warn logs a fault of the connection, with key-value pairs. It does not block.
	Warn(msg string, args ...any)
}

// Opcodes of the FUSE protocol that this package handles or needs the sizes of
// (include/uapi/linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetAttr     = 3
	opReadlink    = 5
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opRelease     = 18
	opGetXAttr    = 22
	opListXAttr   = 23
	opFlush       = 25
	opInit        = 26
	opReadDir     = 28
	opInterrupt   = 36
	opIoctl       = 39
	opNotifyReply = 41
	opBatchForget = 42
	opReadDirPlus = 44
)

const (
	// smallReply is larger than any reply without a variable part.
	smallReply = 1024
	// keepReply bounds the memory that a Call keeps for its next reply.
	keepReply = 128 << 10
)

// A Handler handles the requests of one connection, whatever transports them. Its methods are safe
// for concurrent use, except for Negotiate.
type Handler struct {
	fs     FileSystem
	opts   Options
	proto  *fuse.ProtocolServer
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
	return &Handler{fs: fs, opts: opts, names: newNames(), proto: fuse.NewProtocolServer(fs,
		&fuse.MountOptions{Logger: opts.Logger, DisableXAttrs: !opts.XAttrs, PanicHandler: opts.Panicked})}
}

// Interrupt interrupts a request. It reports false if the request is not in progress or was
// interrupted before.
func (h *Handler) Interrupt(unique uint64) bool {
	if h.active.interrupt(unique) {
		return true
	}
	var in fuse.InterruptIn
	in.Length, in.Opcode, in.Unique = uint32(unsafe.Sizeof(in)), opInterrupt, unique
	in.InHeader.Unique = unique | interruptBit
	var out [smallReply]byte
	n, status := h.proto.HandleRequest([][]byte{bytesOf(&in)}, [][]byte{out[:]})
	return n == 0 && status.Ok()
}

// A Transport carries the replies to the requests of a Call, one at a time.
type Transport interface {
	// Place returns memory in which the data of a reply can arrive, in pieces: n bytes that follow
	// the fuse.OutHeader. It returns nil if there is no such memory. The memory stays valid until
	// the reply is sent.
	Place(n int) [][]byte
	// Send sends a reply: a message that begins with a fuse.OutHeader, and data that follows it.
	// Both are valid until Send returns.
	Send(reply []byte, data [][]byte)
	// SendPlaced sends a fuse.OutHeader and the first n bytes of the memory of Place.
	SendPlaced(header []byte, n int)
}

// A Call handles requests of a Handler, one after the other, and has the memory for their replies.
type Call struct {
	h      *Handler
	t      Transport
	direct directCall

	received ledger.Time // the request in progress

	in    [1][]byte
	out   [1][]byte
	large []byte // for replies that do not fit into reply
	reply [smallReply / 8]uint64
}

// NewCall returns a Call whose replies go to t.
func (h *Handler) NewCall(t Transport) *Call {
	c := &Call{h: h, t: t}
	c.direct.cancel = make(chan struct{})
	return c
}

// Handle handles one request, which arrived at the time received, and sends the reply unless the
// request has none. in has at least the size of a fuse.InHeader and is aligned to 8 bytes.
func (c *Call) Handle(in []byte, received ledger.Time) {
	c.received = received
	if op := directOpOf(in); op != nil {
		c.in[0] = in[op.in:]
		c.handleDirect(op, in[:op.in], c.in[:])
		return
	}
	if header(in).Opcode == opInterrupt && len(in) >= int(unsafe.Sizeof(fuse.InterruptIn{})) &&
		c.h.active.interrupt((*fuse.InterruptIn)(unsafe.Pointer(&in[0])).Unique) {
		return
	}
	c.dispatch(in)
}

// HandleWrite handles a WRITE whose data is in several pieces. in is a fuse.WriteIn, aligned to 8
// bytes, without extensions.
func (c *Call) HandleWrite(in []byte, data [][]byte, received ledger.Time) {
	c.received = received
	c.handleDirect(&directOps[opWrite], in, data)
}

// dispatch lets go-fuse handle a request.
func (c *Call) dispatch(in []byte) {
	out := bytesOf(&c.reply)
	if need := smallReply + variableReply(in); need > len(out) {
		if need > len(c.large) {
			c.large = make([]byte, need)
		}
		out = c.large[:need]
	}
	c.in[0], c.out[0] = in, out
	n, status := c.h.proto.HandleRequest(c.in[:], c.out[:])
	if n > 0 || !status.Ok() {
		if n < headerSize || n != int(binary.NativeEndian.Uint32(out)) {
			n = putError(out, header(in).Unique, unix.EIO) // the reply did not fit
		}
		c.t.Send(out[:n], nil)
		if h := header(in); h.Opcode != opInterrupt {
			c.h.fs.Replied(Unique(h), c.received)
		}
	}
	if len(c.large) > keepReply {
		c.large = nil
	}
}

// header returns the header of a request of at least the size of fuse.InHeader.
func header(in []byte) *fuse.InHeader { return (*fuse.InHeader)(unsafe.Pointer(&in[0])) }

// variableReply returns how many bytes of data the reply to a request may have.
func variableReply(in []byte) int {
	p := unsafe.Pointer(&in[0])
	switch op := header(in).Opcode; {
	case op == opReadlink:
		return unix.PathMax
	case (op == opRead || op == opReadDir || op == opReadDirPlus) && len(in) >= int(unsafe.Sizeof(fuse.ReadIn{})):
		return int((*fuse.ReadIn)(p).Size)
	case (op == opGetXAttr || op == opListXAttr) && len(in) >= int(unsafe.Sizeof(fuse.GetXAttrIn{})):
		return int((*fuse.GetXAttrIn)(p).Size)
	case op == opIoctl && len(in) >= int(unsafe.Sizeof(fuse.IoctlIn{})):
		return int((*fuse.IoctlIn)(p).OutSize)
	}
	return 0
}
