package front

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log"
	"syscall"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A FileSystem handles the requests of one connection. Its methods are called concurrently. Init
// and OnUnmount are not called.
type FileSystem interface {
	// The results of Read must have the method Slices of fuse.ReadResultVector. The slices stay
	// valid until Done, which is called exactly once for each result. The buffer argument of Read
	// is nil.
	fuse.RawFileSystem
	// Replied is called after the reply to a request was written, also if the write failed. unique
	// is Unique of the request. The kernel does not send this request again, unless the write
	// failed. Replied is not called for requests without reply (FORGET, BATCH_FORGET), INIT and
	// INTERRUPT.
	Replied(unique uint64)
	// Disconnected is called once, when the kernel has ended the connection. No program waits for
	// the requests in progress any more, so they should end.
	Disconnected()
}

// Opcodes of the FUSE protocol that this package handles or needs the sizes of
// (include/uapi/linux/fuse.h).
const (
	opForget      = 2
	opReadlink    = 5
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opFsync       = 20
	opGetXAttr    = 22
	opListXAttr   = 23
	opFlush       = 25
	opInit        = 26
	opReadDir     = 28
	opGetLk       = 31
	opSetLk       = 32
	opSetLkw      = 33
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
	fs      FileSystem
	proto   *fuse.ProtocolServer
	logger  *log.Logger
	onPanic func(any) fuse.Status
	init    []byte // the INIT request
	kernel  fuse.InitIn
	reads   reads
}

// NewHandler returns the Handler of a new connection. opts are those of fuse.NewProtocolServer;
// PanicHandler is required. Negotiate must succeed before other requests.
func NewHandler(fs FileSystem, opts *fuse.MountOptions) *Handler {
	logger := opts.Logger
	if logger == nil {
		logger = log.Default()
	}
	return &Handler{fs: fs, proto: fuse.NewProtocolServer(fs, opts), logger: logger, onPanic: opts.PanicHandler}
}

// Negotiate handles the request INIT. It returns the reply also when the reply is an error. No
// other request may be in progress.
func (h *Handler) Negotiate(in []byte) (reply []byte, err error) {
	if len(in) < int(unsafe.Sizeof(fuse.InHeader{})) || header(in).Opcode != opInit {
		return nil, fmt.Errorf("request of %d bytes is no INIT", len(in))
	}
	h.init = bytes.Clone(in)
	copy(bytesOf(&h.kernel), in) // older kernels send a shorter request
	out := make([]byte, smallReply)
	n, status := h.proto.HandleRequest([][]byte{in}, [][]byte{out})
	if n < headerSize {
		return nil, fmt.Errorf("INIT: %v", status)
	}
	if errno := int32(binary.NativeEndian.Uint32(out[4:])); errno != 0 {
		err = fmt.Errorf("INIT of protocol %d.%d: %w", h.kernel.Major, h.kernel.Minor, syscall.Errno(-errno))
	}
	return out[:n], err
}

// Init returns the INIT request in the form of the kernel, for Resume in another process.
func (h *Handler) Init() []byte { return h.init }

// Kernel returns the INIT request: the version and the capabilities of the kernel's FUSE client.
func (h *Handler) Kernel() *fuse.InitIn { return &h.kernel }

// A Call handles requests of a Handler, one after the other, and has the memory for their replies.
type Call struct {
	h      *Handler
	send   func(reply []byte, data [][]byte)
	cancel chan struct{} // of the READ in progress

	in    [1][]byte
	out   [1][]byte
	large []byte // for replies that do not fit into reply
	reply [smallReply / 8]uint64
}

// NewCall returns a Call whose replies go to send: a message that begins with a fuse.OutHeader, and
// data that follows it. Both are valid until send returns.
func (h *Handler) NewCall(send func(reply []byte, data [][]byte)) *Call {
	return &Call{h: h, send: send, cancel: make(chan struct{})}
}

// Handle handles one request, and calls send unless the request has no reply. in has at least the
// size of a fuse.InHeader and is aligned to 8 bytes.
func (c *Call) Handle(in []byte) {
	switch h := header(in); h.Opcode {
	case opRead:
		if len(in) >= int(unsafe.Sizeof(fuse.ReadIn{})) {
			c.read((*fuse.ReadIn)(unsafe.Pointer(&in[0])))
			return
		}
	case opInterrupt:
		if len(in) >= int(unsafe.Sizeof(fuse.InterruptIn{})) &&
			c.h.reads.interrupt((*fuse.InterruptIn)(unsafe.Pointer(&in[0])).Unique) {
			return
		}
	}
	c.dispatch(in)
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
		c.send(out[:n], nil)
		if h := header(in); h.Opcode != opInterrupt {
			c.h.fs.Replied(Unique(h))
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
	case (op == opReadDir || op == opReadDirPlus) && len(in) >= int(unsafe.Sizeof(fuse.ReadIn{})):
		return int((*fuse.ReadIn)(p).Size)
	case (op == opGetXAttr || op == opListXAttr) && len(in) >= int(unsafe.Sizeof(fuse.GetXAttrIn{})):
		return int((*fuse.GetXAttrIn)(p).Size)
	case op == opIoctl && len(in) >= int(unsafe.Sizeof(fuse.IoctlIn{})):
		return int((*fuse.IoctlIn)(p).OutSize)
	}
	return 0
}
