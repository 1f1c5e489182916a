package softiwarp

import (
	"encoding/binary"
	"hash/crc32"
)

// MPA FPDU, RFC 5044 §4.1: ULPDU_Length (2), ULPDU, pad (0..3), CRC (4).
const (
	fpduLenSize = 2
	fpduCRCSize = 4
	fpduAlign   = 4
	// maxULPDU is the largest ULPDU that the length field allows. The receiver accepts it, although
	// senders must not send it (RFC 5044 §3).
	maxULPDU = 0xffff
	// maxSentULPDU is the largest sent ULPDU. RFC 5044 §3 allows 64768; this is the largest smaller
	// size without a pad.
	maxSentULPDU = 64766
	// minMULPDU is the smallest MULPDU that MPA may offer (RFC 5044 §3).
	minMULPDU = 128
)

// DDP and RDMAP control bytes, RFC 5041 §4.1 and RFC 5040 §4.1, as one big-endian word.
const (
	ctrlTagged    = 0x8000
	ctrlLast      = 0x4000
	ctrlDVMask    = 0x0300
	ctrlDV1       = 0x0100
	ctrlRVMask    = 0x00c0
	ctrlRV1       = 0x0040
	ctrlOpMask    = 0x000f
	ctrlBothV1    = ctrlDV1 | ctrlRV1
	ctrlSize      = 2
	stagSize      = 4
	taggedHdr     = 14 // control, STag, TO: RFC 5041 §4.2
	untaggedHdr   = 18 // control, RsvdULP, QN, MSN, MO: RFC 5041 §4.3
	readReqHdr    = 28 // RFC 5040 §4.4, after the untagged header
	readReqULPDU  = untaggedHdr + readReqHdr
	termHdr       = 4 // RFC 5040 §4.8, after the untagged header
	maxHeaderSize = fpduLenSize + readReqULPDU
)

// RDMAP opcodes, RFC 5040 §4.1.
const (
	opWrite       = 0
	opReadRequest = 1
	opReadResp    = 2
	opSend        = 3
	opSendInv     = 4
	opSendSE      = 5
	opSendSEInv   = 6
	opTerminate   = 7
)

// Untagged queue numbers, RFC 5040 §4.2.
const (
	qnSend      = 0
	qnReadReq   = 1
	qnTerminate = 2
	numQueues   = 3
)

// firstMSN is the message sequence number of the first message on each queue (RFC 5041 §4.3).
const firstMSN = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// padding returns the number of zero bytes that make length field, ULPDU and pad a multiple of
// four.
func padding(ulpdu int) int {
	return -(fpduLenSize + ulpdu) & (fpduAlign - 1)
}

// putCRC stores a CRC32c in the byte order of RFC 5044 §4.4 (Figure 5 has an example).
func putCRC(b []byte, sum uint32) { binary.LittleEndian.PutUint32(b, sum) }

func getCRC(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// A header is the decoded DDP and RDMAP header of one FPDU.
type header struct {
	ulpdu  int // bytes of the ULPDU, headers included
	ctrl   uint16
	op     uint8
	tagged bool
	last   bool
	stag   uint32 // tagged: STag; untagged: RsvdULP, the Invalidate STag
	to     uint64 // tagged
	qn     uint32 // untagged
	msn    uint32
	mo     uint32
}

// size returns the length of the DDP header.
func (h *header) size() int {
	if h.tagged {
		return taggedHdr
	}
	return untaggedHdr
}

// parseControl decodes the length and the control word. b has at least four bytes.
func (h *header) parseControl(b []byte) {
	h.ulpdu = int(binary.BigEndian.Uint16(b))
	h.ctrl = binary.BigEndian.Uint16(b[2:])
	h.op = uint8(h.ctrl & ctrlOpMask)
	h.tagged = h.ctrl&ctrlTagged != 0
	h.last = h.ctrl&ctrlLast != 0
}

// parseRest decodes the rest of the DDP header. b starts at the length field and contains the whole
// header.
func (h *header) parseRest(b []byte) {
	h.stag = binary.BigEndian.Uint32(b[4:])
	if h.tagged {
		h.to = binary.BigEndian.Uint64(b[8:])
		return
	}
	h.qn = binary.BigEndian.Uint32(b[8:])
	h.msn = binary.BigEndian.Uint32(b[12:])
	h.mo = binary.BigEndian.Uint32(b[16:])
}

func control(op uint8, last bool) uint16 {
	c := uint16(ctrlBothV1) | uint16(op)
	if last {
		c |= ctrlLast
	}
	return c
}

// putTagged writes the length field and the tagged DDP header of a segment with n payload bytes.
func putTagged(b []byte, op uint8, last bool, stag uint32, to uint64, n int) {
	binary.BigEndian.PutUint16(b, uint16(taggedHdr+n))
	binary.BigEndian.PutUint16(b[2:], control(op, last)|ctrlTagged)
	binary.BigEndian.PutUint32(b[4:], stag)
	binary.BigEndian.PutUint64(b[8:], to)
}

// putUntagged writes the length field and the untagged DDP header of a segment with n payload
// bytes.
func putUntagged(b []byte, op uint8, last bool, ulp, qn, msn, mo uint32, n int) {
	binary.BigEndian.PutUint16(b, uint16(untaggedHdr+n))
	binary.BigEndian.PutUint16(b[2:], control(op, last))
	binary.BigEndian.PutUint32(b[4:], ulp)
	binary.BigEndian.PutUint32(b[8:], qn)
	binary.BigEndian.PutUint32(b[12:], msn)
	binary.BigEndian.PutUint32(b[16:], mo)
}

// A readRequest is the RDMAP part of an RDMA Read Request, RFC 5040 §4.4.
type readRequest struct {
	msn      uint32
	sinkSTag uint32
	sinkTO   uint64
	size     uint32
	srcSTag  uint32
	srcTO    uint64
}

// putRDMAP writes the 28 bytes of the Read Request header.
func (r *readRequest) putRDMAP(b []byte) {
	binary.BigEndian.PutUint32(b, r.sinkSTag)
	binary.BigEndian.PutUint64(b[4:], r.sinkTO)
	binary.BigEndian.PutUint32(b[12:], r.size)
	binary.BigEndian.PutUint32(b[16:], r.srcSTag)
	binary.BigEndian.PutUint64(b[20:], r.srcTO)
}

// parseRDMAP reads the 28 bytes of the Read Request header.
func (r *readRequest) parseRDMAP(b []byte) {
	r.sinkSTag = binary.BigEndian.Uint32(b)
	r.sinkTO = binary.BigEndian.Uint64(b[4:])
	r.size = binary.BigEndian.Uint32(b[12:])
	r.srcSTag = binary.BigEndian.Uint32(b[16:])
	r.srcTO = binary.BigEndian.Uint64(b[20:])
}

// putReadRequest writes the FPDU without its trailer.
func putReadRequest(b []byte, r *readRequest) {
	putUntagged(b, opReadRequest, true, 0, qnReadReq, r.msn, 0, readReqHdr)
	r.putRDMAP(b[fpduLenSize+untaggedHdr:])
}
