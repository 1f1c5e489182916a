package rpcrdma

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Version is the protocol version spoken here (RFC 8166 §4.2.2).
const Version = 1

// Proc is the rdma_proc field (RFC 8166 §4.2.4).
type Proc uint32

// Values of rdma_proc. MSGP and DONE are obsolete and never sent. DONE is discarded when received,
// MSGP by a requester too; a responder answers MSGP with ERR_CHUNK (RFC 8166 §4.6).
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

// Sizes in octets of the parts of a transport header (RFC 8166 §4.1.2).
const (
	FixedSize       = 16 // xid, vers, credit, proc
	MinHeaderSize   = 28 // fixed part and three empty lists
	ErrChunkSize    = 20 // RDMA_ERROR with ERR_CHUNK
	ErrVersSize     = 28 // RDMA_ERROR with ERR_VERS
	SegmentSize     = 16 // handle, length, offset
	ReadSegmentSize = 24 // discriminator, position, segment
	ChunkHeadSize   = 8  // discriminator, segment count
)

// DefaultInline is the inline threshold of a connection whose peers agreed on no other (RFC 8166
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

// A Chunk is an ordered list of segments that hold one data item, or a whole message.
type Chunk []Segment

// Length is the sum of the segments' lengths, in octets.
func (c Chunk) Length() uint64 {
	var n uint64
	for i := range c {
		n += uint64(c[i].Length)
	}
	return n
}

// A Header is a decoded, or to be encoded, transport header.
type Header struct {
	XID     uint32
	Vers    uint32
	Credits uint32
	Proc    Proc

	Reads    []ReadSegment // the Read list, in wire order
	Writes   []Chunk       // the Write list; a chunk may have no segments (RFC 8166 §4.3.2.3)
	Reply    Chunk         // the Reply chunk, if HasReply
	HasReply bool

	// Err, Low and High are the body of an RDMA_ERROR; Low and High belong to ErrVers.
	Err       ErrCode
	Low, High uint32

	segs []Segment // backing of Writes and Reply after Decode
}

// Reset empties the header and keeps its memory.
func (h *Header) Reset() {
	*h = Header{Reads: h.Reads[:0], Writes: h.Writes[:0], segs: h.segs[:0]}
}

// Size is the encoded size in octets.
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

// Append encodes the header behind b.
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

// Errors of Decode. What a receiver does about each depends on its role: RFC 8166 §4.5 for replies,
// §4.5.1–2 for calls.
var (
	// ErrShort: fewer octets than the smallest message of that kind.
	ErrShort = errors.New("rpcrdma: message is too short for a transport header")
	// ErrBadVersion: rdma_vers is not 1; XID, Vers and Credits are set.
	ErrBadVersion = errors.New("rpcrdma: unsupported rdma_vers")
	// ErrBadProc: rdma_proc is unknown or obsolete; the fixed part is set.
	ErrBadProc = errors.New("rpcrdma: unknown or obsolete rdma_proc")
	// ErrBadChunks: a chunk list does not parse; the fixed part is set.
	ErrBadChunks = errors.New("rpcrdma: malformed chunk lists")
	// ErrBadError: an RDMA_ERROR with an unknown rdma_err, to be discarded (RFC 8166 §4.5).
	ErrBadError = errors.New("rpcrdma: undecodable RDMA_ERROR")
)

// Decode parses the header at the front of b and returns its size: the RPC message of an RDMA_MSG
// is b[n:]. The slices of h are reused and stay valid until the next Decode or Reset. It does not
// keep b.
//
// RFC 8166 §4.5 asks to drop anything shorter than 28 octets, yet an ERR_CHUNK message has 20
// (§4.1.2); so the floor is 16 octets before rdma_proc is known, and what that kind needs after.
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

// cursor walks over XDR words with a sticky failure.
type cursor struct {
	b   []byte
	off int
	bad bool
}

func (c *cursor) word() uint32 {
	if len(c.b)-c.off < 4 {
		c.bad = true
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
		c.bad = true
	}
	return !c.bad && v == 1
}

func (c *cursor) segment() (s Segment) {
	if len(c.b)-c.off < SegmentSize {
		c.bad = true
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
	// No message of this size holds more segments, so segs never moves while chunks point into it.
	if most := len(b) / SegmentSize; cap(h.segs) < most {
		h.segs = make([]Segment, 0, most)
	}
	c := cursor{b: b, off: FixedSize}
	for c.more() {
		pos := c.word()
		seg := c.segment()
		if c.bad || pos%4 != 0 { // RFC 8166 §3.4.5
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
	if c.bad {
		return 0, ErrBadChunks
	}
	return c.off, nil
}

func (h *Header) decodeChunk(c *cursor) (Chunk, bool) {
	count := c.word()
	if c.bad || uint64(count)*SegmentSize > uint64(len(c.b)-c.off) {
		return nil, false
	}
	start := len(h.segs)
	for range count {
		h.segs = append(h.segs, c.segment())
	}
	return Chunk(h.segs[start:len(h.segs):len(h.segs)]), true
}
