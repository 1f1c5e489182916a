package softiwarp

import (
	"encoding/binary"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Layers of a Terminate, RFC 5040 §4.8.
const (
	layerRDMAP = 0
	layerDDP   = 1
	layerLLP   = 2
)

// Header-control bits of a Terminate (RFC 5040 §4.8), and their positions in siw's messages. siw
// uses C bit-fields in the order of a little-endian host, which reverses the nibbles and these
// bits.
const (
	termM, termD, termR          = 0x80, 0x40, 0x20
	siwTermM, siwTermD, siwTermR = 0x01, 0x02, 0x04
	termSegLen                   = 2
	// maxTermULPDU is the size of a Terminate that quotes a Read Request.
	maxTermULPDU = untaggedHdr + termHdr + termSegLen + untaggedHdr + readReqHdr
)

// A termCode is the layer, error type and code of a Terminate.
type termCode struct{ layer, etype, code uint8 }

// Codes that this provider sends. RFC 5040 §4.8, RFC 5041 §7.2, RFC 5044 §8, RFC 6581 §8.
var (
	termLocalCatastrophic = termCode{layerRDMAP, 0, 0x00}

	termReadInvalidSTag  = termCode{layerRDMAP, 1, 0x00}
	termReadBounds       = termCode{layerRDMAP, 1, 0x01}
	termReadAccess       = termCode{layerRDMAP, 1, 0x02}
	termReadOtherStream  = termCode{layerRDMAP, 1, 0x03}
	termReadWrap         = termCode{layerRDMAP, 1, 0x04}
	termCannotInvalidate = termCode{layerRDMAP, 1, 0x09}

	termRDMAPVersion = termCode{layerRDMAP, 2, 0x05}
	termOpcode       = termCode{layerRDMAP, 2, 0x06}
	termUnspecified  = termCode{layerRDMAP, 2, 0xff}

	termTaggedInvalidSTag = termCode{layerDDP, 1, 0x00}
	termTaggedBounds      = termCode{layerDDP, 1, 0x01}
	termTaggedOtherStream = termCode{layerDDP, 1, 0x02}
	termTaggedWrap        = termCode{layerDDP, 1, 0x03}
	termTaggedVersion     = termCode{layerDDP, 1, 0x04}

	termUntaggedQN      = termCode{layerDDP, 2, 0x01}
	termNoBuffer        = termCode{layerDDP, 2, 0x02}
	termMSNRange        = termCode{layerDDP, 2, 0x03}
	termMO              = termCode{layerDDP, 2, 0x04}
	termTooLong         = termCode{layerDDP, 2, 0x05}
	termUntaggedVersion = termCode{layerDDP, 2, 0x06}

	termCRC             = termCode{layerLLP, 0, 0x02}
	termFPDULength      = termCode{layerLLP, 0, 0x03}
	termInsufficientIRD = termCode{layerLLP, 0, 0x06}
)

var termTexts = map[termCode]string{
	termLocalCatastrophic: "local catastrophic error",
	termReadInvalidSTag:   "remote protection error: invalid STag",
	termReadBounds:        "remote protection error: base or bounds violation",
	termReadAccess:        "remote protection error: access rights violation",
	termReadOtherStream:   "remote protection error: STag not associated with this stream",
	termReadWrap:          "remote protection error: tagged offset wraps",
	termCannotInvalidate:  "remote protection error: STag cannot be invalidated",
	{layerRDMAP, 1, 0xff}: "remote protection error",
	termRDMAPVersion:      "remote operation error: invalid RDMAP version",
	termOpcode:            "remote operation error: unexpected opcode",
	{layerRDMAP, 2, 0x07}: "remote operation error: catastrophic, this stream",
	{layerRDMAP, 2, 0x08}: "remote operation error: catastrophic, all streams",
	{layerRDMAP, 2, 0x09}: "remote operation error: STag cannot be invalidated",
	termUnspecified:       "remote operation error",
	{layerDDP, 0, 0}:      "DDP local catastrophic error",
	termTaggedInvalidSTag: "tagged buffer error: invalid STag",
	termTaggedBounds:      "tagged buffer error: base or bounds violation",
	termTaggedOtherStream: "tagged buffer error: STag not associated with this stream",
	termTaggedWrap:        "tagged buffer error: tagged offset wraps",
	termTaggedVersion:     "tagged buffer error: invalid DDP version",
	termUntaggedQN:        "untagged buffer error: invalid queue number",
	termNoBuffer:          "untagged buffer error: no buffer available",
	termMSNRange:          "untagged buffer error: message sequence number out of range",
	termMO:                "untagged buffer error: invalid message offset",
	termTooLong:           "untagged buffer error: message too long for the buffer",
	termUntaggedVersion:   "untagged buffer error: invalid DDP version",
	{layerLLP, 0, 0x01}:   "MPA: TCP connection closed or lost",
	termCRC:               "MPA: CRC error",
	termFPDULength:        "MPA: marker and ULPDU length do not match",
	{layerLLP, 0, 0x04}:   "MPA: invalid request or reply frame",
	{layerLLP, 0, 0x05}:   "MPA: local catastrophic error",
	termInsufficientIRD:   "MPA: insufficient IRD resources",
	{layerLLP, 0, 0x07}:   "MPA: no matching RTR option",
}

func (c termCode) text() string {
	if s, ok := termTexts[c]; ok {
		return s
	}
	return "unknown error"
}

// asError returns the TerminateError that reports c.
func (c termCode) asError(local bool) *verbs.TerminateError {
	return &verbs.TerminateError{Local: local, Layer: c.layer, EType: c.etype, Code: c.code, Text: c.text()}
}

// A terminate is a Terminate message: the code, and the headers of the segment that caused it.
type terminate struct {
	code   termCode
	segLen uint16 // ULPDU length of that segment
	ddp    [untaggedHdr]byte
	ddpLen int // 0: no header
	rdmap  [readReqHdr]byte
	read   bool // rdmap is present
}

// quote copies the DDP header of b, an FPDU from its length field on.
func (t *terminate) quote(b []byte, h *header) {
	t.segLen = uint16(h.ulpdu)
	t.ddpLen = copy(t.ddp[:h.size()], b[fpduLenSize:])
}

// quoteRead copies the headers of a Read Request. The caller may have advanced r past the served
// bytes.
func (t *terminate) quoteRead(r *readRequest) {
	var b [maxHeaderSize]byte
	putReadRequest(b[:], r)
	h := header{ulpdu: readReqULPDU}
	t.quote(b[:], &h)
	t.read = true
	copy(t.rdmap[:], b[fpduLenSize+untaggedHdr:])
}

// encode writes the FPDU without its trailer into b, which has fpduLenSize+maxTermULPDU bytes, and
// returns its length.
func (t *terminate) encode(b []byte) int {
	n := termHdr
	if t.ddpLen > 0 {
		n += termSegLen + t.ddpLen
		if t.read {
			n += readReqHdr
		}
	}
	putUntagged(b, opTerminate, true, 0, qnTerminate, firstMSN, 0, n)
	p := b[fpduLenSize+untaggedHdr:]
	p[0], p[1], p[2], p[3] = t.code.layer<<4|t.code.etype, t.code.code, 0, 0
	if t.ddpLen > 0 {
		p[2] = termM | termD
		binary.BigEndian.PutUint16(p[termHdr:], t.segLen)
		copy(p[termHdr+termSegLen:], t.ddp[:t.ddpLen])
		if t.read {
			p[2] |= termR
			copy(p[termHdr+termSegLen+t.ddpLen:], t.rdmap[:])
		}
	}
	return fpduLenSize + untaggedHdr + n
}

// decodeTerminate decodes the payload of a Terminate in the bit order of the RFC or of siw. readMSN
// is the MSN of the quoted Read Request, or 0 when none is quoted.
func decodeTerminate(p []byte) (c termCode, readMSN uint32) {
	if len(p) < termHdr {
		return termUnspecified, 0
	}
	hi, lo, flags := p[0]>>4, p[0]&0xf, p[2]
	siw := flags&(termM|termD|termR) == 0 && flags&(siwTermM|siwTermD|siwTermR) != 0
	if flags == 0 {
		// Without headers only the code distinguishes the bit orders. Most messages without headers
		// are LLP errors: 20 xx in RFC order, 02 xx in siw's. An RDMAP operation error (0/2) in RFC
		// order always quotes a header.
		_, rfcKnown := termTexts[termCode{hi, lo, p[1]}]
		_, siwKnown := termTexts[termCode{lo, hi, p[1]}]
		siw = siwKnown && (!rfcKnown || hi == layerRDMAP && lo == layerLLP)
	}
	c = termCode{hi, lo, p[1]}
	hasDDP, seg := flags&termD != 0, p[termHdr:]
	if siw {
		c = termCode{lo, hi, p[1]}
		hasDDP = flags&siwTermD != 0
	}
	if !hasDDP || len(seg) < termSegLen+untaggedHdr {
		return c, 0
	}
	var h header
	h.parseControl(seg) // the segment length is at the position of an FPDU's length field
	h.parseRest(seg)
	if !h.tagged && h.op == opReadRequest && h.qn == qnReadReq {
		readMSN = h.msn
	}
	return c, readMSN
}
