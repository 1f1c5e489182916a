package softiwarp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
)

// MPA Request and Reply frames, RFC 5044 §7.1.1.
const (
	mpaKeySize = 16
	mpaHdrSize = 20
	mpaReqKey  = "MPA ID Req Frame"
	mpaRepKey  = "MPA ID Rep Frame"
	// maxPrivateData is the protocol's limit, which includes the enhanced block.
	maxPrivateData = 512
	// maxULPData is the consumer's part on an enhanced connection (RFC 6581 §9).
	maxULPData = maxPrivateData - enhSize
)

// Flag byte, RFC 5044 §7.1.1 and RFC 6581 §6. Other bits are reserved: zero when sent, ignored when
// received. In particular 0x08 is never sent, because some siw versions then send segments that are
// larger than the path allows.
const (
	mpaMarkers  = 0x80
	mpaCRC      = 0x40
	mpaReject   = 0x20
	mpaEnhanced = 0x10
)

// MPA revisions.
const (
	mpaRev1 = 1 // RFC 5044
	mpaRev2 = 2 // RFC 6581
)

// Enhanced connection data, RFC 6581 §9.
const (
	enhSize      = 4
	enhPeer      = 0x8000 // A, in the IRD word
	enhRTRSend   = 0x4000 // B, in the IRD word
	enhRTRWrite  = 0x8000 // C, in the ORD word
	enhRTRRead   = 0x4000 // D, in the ORD word
	enhDepthMask = 0x3fff
	// depthByULP means that the ULP negotiates the depth (RFC 6581 §9.1).
	depthByULP = 0x3fff
)

var (
	errMPAKey      = errors.New("not an MPA frame")
	errMPARevision = errors.New("unsupported MPA revision")
	errMPALength   = errors.New("private data length out of range")
	errMPAShort    = errors.New("frame too short for its enhanced connection data")
	errMPABoth     = errors.New("peer sent an MPA request instead of a reply: both sides act as initiator")
)

// An mpaFrame is a Request or Reply frame.
type mpaFrame struct {
	reply    bool
	markers  bool
	crc      bool
	reject   bool
	enhanced bool
	rev      uint8
	ird, ord uint16 // with enhanced: 14 bits each
	peer     bool   // A
	rtrSend  bool   // B
	rtrWrite bool   // C
	rtrRead  bool   // D
	data     []byte // the ULP's private data
}

// append appends the encoded frame to b.
func (f *mpaFrame) append(b []byte) []byte {
	key := mpaReqKey
	if f.reply {
		key = mpaRepKey
	}
	b = append(b, key...)
	var flags byte
	for _, x := range [...]struct {
		on  bool
		bit byte
	}{{f.markers, mpaMarkers}, {f.crc, mpaCRC}, {f.reject, mpaReject}, {f.enhanced, mpaEnhanced}} {
		if x.on {
			flags |= x.bit
		}
	}
	n := len(f.data)
	if f.enhanced {
		n += enhSize
	}
	b = append(b, flags, f.rev)
	b = binary.BigEndian.AppendUint16(b, uint16(n))
	if f.enhanced {
		ird, ord := f.ird&enhDepthMask, f.ord&enhDepthMask
		if f.peer { // with A clear, B, C and D are zero too (RFC 6581 §9.2)
			ird |= enhPeer
			if f.rtrSend {
				ird |= enhRTRSend
			}
			if f.rtrWrite {
				ord |= enhRTRWrite
			}
			if f.rtrRead {
				ord |= enhRTRRead
			}
		}
		b = binary.BigEndian.AppendUint16(b, ird)
		b = binary.BigEndian.AppendUint16(b, ord)
	}
	return append(b, f.data...)
}

// parseMPAHeader checks the fixed part of a frame, mpaHdrSize bytes, and returns the length of its
// private data.
func parseMPAHeader(b []byte, wantReply bool) (f mpaFrame, dataLen int, err error) {
	want, other := mpaReqKey, mpaRepKey
	if wantReply {
		want, other = mpaRepKey, mpaReqKey
	}
	switch key := string(b[:mpaKeySize]); {
	case key == other && wantReply:
		return f, 0, errMPABoth
	case key != want:
		return f, 0, fmt.Errorf("%w: it starts with %q", errMPAKey, key)
	}
	flags := b[mpaKeySize]
	f = mpaFrame{
		reply: wantReply, markers: flags&mpaMarkers != 0, crc: flags&mpaCRC != 0, enhanced: flags&mpaEnhanced != 0,
		reject: wantReply && flags&mpaReject != 0, rev: b[mpaKeySize+1],
	}
	dataLen = int(binary.BigEndian.Uint16(b[mpaKeySize+2:]))
	if f.rev != mpaRev1 && f.rev != mpaRev2 {
		return f, 0, fmt.Errorf("%w %d", errMPARevision, f.rev)
	}
	if f.rev == mpaRev1 {
		f.enhanced = false // the bit was reserved in revision 1
	}
	if dataLen > maxPrivateData {
		return f, 0, fmt.Errorf("%w: %d bytes, at most %d are allowed", errMPALength, dataLen, maxPrivateData)
	}
	if f.enhanced && dataLen < enhSize {
		return f, 0, fmt.Errorf("%w: %d bytes", errMPAShort, dataLen)
	}
	return f, dataLen, nil
}

// parseData decodes the private data. The frame keeps p.
func (f *mpaFrame) parseData(p []byte) {
	if f.enhanced {
		ird, ord := binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:])
		f.ird, f.ord = ird&enhDepthMask, ord&enhDepthMask
		if f.peer = ird&enhPeer != 0; f.peer {
			f.rtrSend, f.rtrWrite, f.rtrRead = ird&enhRTRSend != 0, ord&enhRTRWrite != 0, ord&enhRTRRead != 0
		}
		p = p[enhSize:]
	}
	f.data = p
}

// readMPAFrame reads exactly one frame. readMPAFrame fails on the first byte that differs from the
// key of an MPA frame.
func readMPAFrame(r io.Reader, wantReply bool) (mpaFrame, error) {
	var hdr [mpaHdrSize]byte
	n := 0
	for n < mpaHdrSize {
		k, err := r.Read(hdr[n:])
		n += k
		if m := min(n, mpaKeySize); m > 0 && string(hdr[:m]) != mpaReqKey[:m] && string(hdr[:m]) != mpaRepKey[:m] {
			return mpaFrame{}, fmt.Errorf("%w: it starts with %q", errMPAKey, hdr[:n])
		}
		if err != nil && n < mpaHdrSize {
			if n > 0 && errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return mpaFrame{}, err
		}
	}
	f, dataLen, err := parseMPAHeader(hdr[:], wantReply)
	if err != nil {
		return f, err
	}
	data := make([]byte, dataLen)
	if _, err := io.ReadFull(r, data); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return f, err
	}
	f.parseData(data)
	return f, nil
}

// roundDepth rounds a read depth up to a power of two, at most limit. A stock siw peer rounds the
// offered depth up after the negotiation, and then uses the rounded depth.
func roundDepth(n, limit int) int {
	if n <= 0 {
		return 0
	}
	return min(1<<bits.Len(uint(n-1)), limit)
}

// A depths value is the result of the IRD/ORD negotiation for one side.
type depths struct{ ird, ord int }

// answerDepths is the responder's side of RFC 6581 §9.1. answerDepths returns the depths of this
// side, and ird and ord for the Reply.
func answerDepths(req *mpaFrame, own depths, limit int) (d depths, ird, ord uint16) {
	d = depths{ird: roundDepth(own.ird, limit), ord: min(own.ord, limit)}
	if req.ord == depthByULP {
		ird = depthByULP
	} else {
		d.ird = max(d.ird, roundDepth(int(req.ord), limit)) // at least the initiator's ORD
		ird = uint16(d.ird)
	}
	if req.ird == depthByULP {
		ord = depthByULP
	} else {
		d.ord = min(d.ord, int(req.ird))
		ord = uint16(d.ord)
	}
	return d, ird, ord
}

// adoptDepths is the initiator's side of RFC 6581 §9.1. ok is false when the responder requires a
// larger IRD than limit.
func adoptDepths(rep *mpaFrame, own depths, limit int) (d depths, ok bool) {
	d = own
	if rep.ord != depthByULP && int(rep.ord) > d.ird {
		if int(rep.ord) > limit {
			return d, false
		}
		d.ird = roundDepth(int(rep.ord), limit)
	}
	if rep.ird != depthByULP {
		d.ord = min(d.ord, int(rep.ird))
	}
	return d, true
}
