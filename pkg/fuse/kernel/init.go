package kernel

import (
	"bytes"
	"fmt"
	"log"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Options configures a connection.
type Options struct {
	// MaxWrite bounds the data of one READ or WRITE in bytes, and MaxReadAhead what the kernel
	// reads before a program asks for it.
	MaxWrite, MaxReadAhead int
	// MaxBackground bounds the requests in flight that no program waits for.
	MaxBackground int
	// Capabilities are what the file system uses of the kernel's FUSE client (fuse.CAP_READDIRPLUS
	// and the like), besides what each connection uses.
	Capabilities uint64
	// XAttrs forwards the requests for extended attributes. Without it they get ENOSYS.
	XAttrs bool
	// ReadOnly refuses requests that change the file system, with EROFS.
	ReadOnly bool
	// Logger receives messages about requests. The default is the standard logger.
	Logger *log.Logger
	// Panicked is called with the panic of a request, and returns the status of the request.
	Panicked func(v any) fuse.Status
}

// What each connection uses, and the versions of the protocol (include/uapi/linux/fuse.h).
const (
	commonCapabilities = fuse.CAP_ASYNC_READ | fuse.CAP_BIG_WRITES | fuse.CAP_FILE_OPS | fuse.CAP_READDIRPLUS |
		fuse.CAP_NO_OPEN_SUPPORT | fuse.CAP_PARALLEL_DIROPS | fuse.CAP_MAX_PAGES | fuse.CAP_PASSTHROUGH
	protocolMajor = 7
	oldestMinor   = 12
	newestMinor   = 28
	// shortInitMinor is the last version whose reply to INIT ends after max_write.
	shortInitMinor = 22
	maxStackDepth  = 1
)

// CanWriteback reports whether a connection with the INIT request can have CAP_WRITEBACK_CACHE.
// Direct I/O must write the kernel's pages first, which Linux does with CAP_DIRECT_IO_ALLOW_MMAP
// (since 6.6). Otherwise it would read old data, and the pages would later replace its new data.
func CanWriteback(init []byte) bool {
	var in fuse.InitIn
	copy(bytesOf(&in), init)
	return in.Flags64()&fuse.CAP_DIRECT_IO_ALLOW_MMAP != 0
}

// Negotiate handles the request INIT. It refuses CAP_WRITEBACK_CACHE unless CanWriteback. It
// returns the reply also when the reply is an error. No other request may be in progress.
func (h *Handler) Negotiate(in []byte) (reply []byte, err error) {
	if len(in) < inHeaderSize || Op(header(in).Opcode) != OpInit {
		return nil, fmt.Errorf("request of %d bytes is no INIT", len(in))
	}
	h.init = bytes.Clone(in)
	k := &h.kernel
	copy(bytesOf(k), in) // older kernels send a shorter request
	reply = make([]byte, headerSize+int(unsafe.Sizeof(fuse.InitOut{})))
	if k.Major != protocolMajor || k.Minor < oldestMinor {
		return reply[:putError(reply, k.Unique, unix.EIO)],
			fmt.Errorf("INIT of protocol %d.%d: %w", k.Major, k.Minor, unix.EIO)
	}
	use := h.opts.Capabilities | commonCapabilities
	if !CanWriteback(in) {
		use &^= fuse.CAP_WRITEBACK_CACHE
	}
	use &= k.Flags64()
	out := (*fuse.InitOut)(unsafe.Pointer(&reply[headerSize]))
	out.Major, out.Minor = protocolMajor, min(newestMinor, k.Minor)
	out.Flags, out.Flags2 = uint32(use)|fuse.CAP_INIT_EXT, uint32(use>>32)
	out.MaxReadAhead = min(uint32(h.opts.MaxReadAhead), k.MaxReadAhead)
	out.MaxWrite = uint32(h.opts.MaxWrite)
	out.MaxPages = uint16((h.opts.MaxWrite-1)/unix.Getpagesize() + 1)
	out.MaxBackground = uint16(h.opts.MaxBackground)
	out.CongestionThreshold = uint16(h.opts.MaxBackground * 3 / 4)
	out.MaxStackDepth = maxStackDepth
	if out.Minor <= shortInitMinor {
		reply = reply[:headerSize+int(unsafe.Offsetof(out.TimeGran))]
	}
	putHeader(reply, len(reply), 0, k.Unique)
	return reply, nil
}

// Init returns the INIT request in the form of the kernel, for Resume in another process.
func (h *Handler) Init() []byte { return h.init }

// Kernel returns the INIT request: the version and the capabilities of the kernel's FUSE client.
func (h *Handler) Kernel() *fuse.InitIn { return &h.kernel }
