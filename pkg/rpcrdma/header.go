package rpcrdma

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Version is the supported protocol version (RFC 8166 §4.2.2).
const Version = 1

// Proc is the rdma_proc field (RFC 8166 §4.2.4).
type Proc uint32

// Values of rdma_proc. MSGP and DONE are obsolete and never sent. A receiver discards DONE. A
// requester discards MSGP, and a responder replies to MSGP with ERR_CHUNK (RFC 8166 §4.6).
const (
	ProcMsg   Proc = 0
	ProcNoMsg Proc = 1
	ProcMsgP  Proc = 2
	ProcDone  Proc = 3
	ProcError Proc = 4
)

func (p Proc) String() string {
	switch p {
	case ProcMsg:
		return "RDMA_MSG"
	case ProcNoMsg:
		return "RDMA_NOMSG"
	case ProcMsgP:
		return "RDMA_MSGP"
	case ProcDone:
		return "RDMA_DONE"
	case ProcError:
		return "RDMA_ERROR"
	}
	return fmt.Sprintf("rdma_proc %d", uint32(p))
}

// ErrCode is the rdma_err field of an RDMA_ERROR message (RFC 8166 §4.5).
type ErrCode uint32

// Error codes.
const (
	ErrVers  ErrCode = 1
	ErrChunk ErrCode = 2
)

// Sizes in bytes of the parts of a transport header (RFC 8166 §4.1.2).
const (
	FixedSize       = 16 // xid, vers, credit, proc
	MinHeaderSize   = 28 // fixed part and three empty lists
	ErrChunkSize    = 20 // RDMA_ERROR with ERR_CHUNK
	ErrVersSize     = 28 // RDMA_ERROR with ERR_VERS
	SegmentSize     = 16 // handle, length, offset
	ReadSegmentSize = 24 // discriminator, position, segment
	ChunkHeadSize   = 8  // discriminator, segment count
)

// DefaultInline is the inline threshold in bytes of a connection without private data (RFC 8166
// §3.3.3).
const DefaultInline = 1024

// A Segment is an rdma_segment: one registered memory region (RFC 8166 §3.4.4).
type Segment struct {
	Handle uint32
	Length uint32
	Offset uint64
}

// A ReadSegment is one entry of the Read list.
type ReadSegment struct {
	Position uint32
	Segment
}

// A Chunk is an ordered list of segments that hold one data item or a complete message.
type Chunk []Segment

// Length returns the sum of the lengths of the segments in bytes.
func (c Chunk) Length() uint64 {
	var n uint64
	for i := range c {
		n += uint64(c[i].Length)
	}
	return n
}

// A Header is a transport header.
type Header struct {
	XID     uint32
	Vers    uint32
	Credits uint32
	Proc    Proc

	Reads    []ReadSegment // Read list in the order of the message
	Writes   []Chunk       // Write list; a chunk may have no segments (RFC 8166 §4.3.2.3)
	Reply    Chunk         // Reply chunk, if HasReply
	HasReply bool

	// Err, Low and High are the body of an RDMA_ERROR. Low and High exist only with ErrVers.
	Err       ErrCode
	Low, High uint32

	segs []Segment // memory of Writes and Reply after Decode
}

// Reset clears the header and keeps its memory.
func (h *Header) Reset() {
	*h = Header{Reads: h.Reads[:0], Writes: h.Writes[:0], segs: h.segs[:0]}
}

// Size returns the encoded size in bytes.
func (h *Header) Size() int {
	if h.Proc == ProcError {
		if h.Err == ErrVers {
			return ErrVersSize
		}
		return ErrChunkSize
	}
	n := MinHeaderSize + len(h.Reads)*ReadSegmentSize
	for _, c := range h.Writes {
		n += ChunkHeadSize + len(c)*SegmentSize
	}
	if h.HasReply {
		n += 4 + len(h.Reply)*SegmentSize
	}
	return n
}

// Append appends the encoded header to b.
func (h *Header) Append(b []byte) []byte {
	be := binary.BigEndian
	b = be.AppendUint32(b, h.XID)
	b = be.AppendUint32(b, h.Vers)
	b = be.AppendUint32(b, h.Credits)
	b = be.AppendUint32(b, uint32(h.Proc))
	if h.Proc == ProcError {
		b = be.AppendUint32(b, uint32(h.Err))
		if h.Err == ErrVers {
			b = be.AppendUint32(b, h.Low)
			b = be.AppendUint32(b, h.High)
		}
		return b
	}
	for i := range h.Reads {
		b = be.AppendUint32(b, 1)
		b = be.AppendUint32(b, h.Reads[i].Position)
		b = appendSegment(b, &h.Reads[i].Segment)
	}
	b = be.AppendUint32(b, 0)
	for _, c := range h.Writes {
		b = be.AppendUint32(b, 1)
		b = appendChunk(b, c)
	}
	b = be.AppendUint32(b, 0)
	if !h.HasReply {
		return be.AppendUint32(b, 0)
	}
	b = be.AppendUint32(b, 1)
	return appendChunk(b, h.Reply)
}

func appendChunk(b []byte, c Chunk) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(c)))
	for i := range c {
		b = appendSegment(b, &c[i])
	}
	return b
}

func appendSegment(b []byte, s *Segment) []byte {
	b = binary.BigEndian.AppendUint32(b, s.Handle)
	b = binary.BigEndian.AppendUint32(b, s.Length)
	return binary.BigEndian.AppendUint64(b, s.Offset)
}

// Errors of Decode. RFC 8166 §4.5 specifies the reaction to an invalid reply, §4.5.1 and §4.5.2 the
// reaction to an invalid call.
var (
	// ErrShort means that the message is shorter than the minimum of its kind.
	ErrShort = errors.New("rpcrdma: message is too short")
	// ErrBadVersion means that rdma_vers is not 1. XID, Vers and Credits are set.
	ErrBadVersion = errors.New("rpcrdma: unsupported rdma_vers")
	// ErrBadProc means that rdma_proc is unknown or obsolete. The fixed part is set.
	ErrBadProc = errors.New("rpcrdma: unknown or obsolete rdma_proc")
	// ErrBadChunks means that a chunk list is invalid. The fixed part is set.
	ErrBadChunks = errors.New("rpcrdma: invalid chunk list")
	// ErrBadError means an RDMA_ERROR with an unknown rdma_err. A receiver discards it (RFC 8166
	// §4.5).
	ErrBadError = errors.New("rpcrdma: unknown rdma_err")
)

// Decode decodes the header at the start of b and returns its size n. The RPC message of an
// RDMA_MSG is b[n:]. Decode reuses the slices of h, which are valid until the next Decode or Reset.
// It does not keep b.
//
// RFC 8166 §4.5 requires a receiver to drop messages of fewer than 28 bytes, but an ERR_CHUNK
// message has 20 (§4.1.2). Decode therefore requires 16 bytes to read rdma_proc, and then the
// minimum of this kind of message.
func (h *Header) Decode(b []byte) (n int, err error) {
	h.Reset()
	if len(b) < FixedSize {
		return 0, ErrShort
	}
	be := binary.BigEndian
	h.XID = be.Uint32(b)
	h.Vers = be.Uint32(b[4:])
	h.Credits = be.Uint32(b[8:])
	h.Proc = Proc(be.Uint32(b[12:]))
	if h.Vers != Version {
		return 0, ErrBadVersion
	}
	switch h.Proc {
	case ProcMsg, ProcNoMsg:
		if len(b) < MinHeaderSize {
			return 0, ErrShort
		}
		return h.decodeLists(b)
	case ProcError:
		return h.decodeError(b)
	}
	return 0, ErrBadProc
}

func (h *Header) decodeError(b []byte) (int, error) {
	if len(b) < ErrChunkSize {
		return 0, ErrShort
	}
	h.Err = ErrCode(binary.BigEndian.Uint32(b[16:]))
	switch h.Err {
	case ErrChunk:
		return ErrChunkSize, nil
	case ErrVers:
		if len(b) < ErrVersSize {
			return 0, ErrShort
		}
		h.Low = binary.BigEndian.Uint32(b[20:])
		h.High = binary.BigEndian.Uint32(b[24:])
		return ErrVersSize, nil
	}
	return 0, ErrBadError
}

// cursor reads XDR words. invalid stays set after the first failure.
type cursor struct {
	b       []byte
	off     int
	invalid bool
}

func (c *cursor) word() uint32 {
	if len(c.b)-c.off < 4 {
		c.invalid = true
		return 0
	}
	v := binary.BigEndian.Uint32(c.b[c.off:])
	c.off += 4
	return v
}

// more reads an optional-data discriminator (RFC 4506 §4.19), which is 0 or 1.
func (c *cursor) more() bool {
	v := c.word()
	if v > 1 {
		c.invalid = true
	}
	return !c.invalid && v == 1
}

func (c *cursor) segment() (s Segment) {
	if len(c.b)-c.off < SegmentSize {
		c.invalid = true
		return s
	}
	p := c.b[c.off:]
	s.Handle = binary.BigEndian.Uint32(p)
	s.Length = binary.BigEndian.Uint32(p[4:])
	s.Offset = binary.BigEndian.Uint64(p[8:])
	c.off += SegmentSize
	return s
}

func (h *Header) decodeLists(b []byte) (int, error) {
	// A message of this size cannot hold more segments. segs therefore never grows while chunks
	// refer to it.
	if most := len(b) / SegmentSize; cap(h.segs) < most {
		h.segs = make([]Segment, 0, most)
	}
	c := cursor{b: b, off: FixedSize}
	for c.more() {
		pos := c.word()
		seg := c.segment()
		if c.invalid || pos%4 != 0 { // RFC 8166 §3.4.5
			return 0, ErrBadChunks
		}
		h.Reads = append(h.Reads, ReadSegment{Position: pos, Segment: seg})
	}
	for c.more() {
		chunk, ok := h.decodeChunk(&c)
		if !ok {
			return 0, ErrBadChunks
		}
		h.Writes = append(h.Writes, chunk)
	}
	if c.more() {
		chunk, ok := h.decodeChunk(&c)
		if !ok {
			return 0, ErrBadChunks
		}
		h.Reply, h.HasReply = chunk, true
	}
	if c.invalid {
		return 0, ErrBadChunks
	}
	return c.off, nil
}

func (h *Header) decodeChunk(c *cursor) (Chunk, bool) {
	count := c.word()
	if c.invalid || uint64(count)*SegmentSize > uint64(len(c.b)-c.off) {
		return nil, false
	}
	start := len(h.segs)
	for range count {
		h.segs = append(h.segs, c.segment())
	}
	return Chunk(h.segs[start:len(h.segs):len(h.segs)]), true
}
