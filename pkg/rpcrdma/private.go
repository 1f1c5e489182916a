package rpcrdma

import "encoding/binary"

// The connection's private data (RFC 8797 §4).
const (
	// PrivateSize is the size of the message in octets.
	PrivateSize = 8

	privateMagic   = 0xf6ab0e18
	privateVersion = 1
	flagRemoteInv  = 0x01
	sizeUnit       = 1024       // sizes are coded as size/1024 - 1
	maxPrivateSize = 256 * 1024 // largest size that one octet can say
)

// Private is what one side says of itself when it connects.
type Private struct {
	// RemoteInv (the R flag): this side supports Send With Invalidate (RFC 8797 §3.2).
	RemoteInv bool
	// SendSize and RecvSize are inline thresholds in octets, multiples of 1024 from 1024 to 262144.
	SendSize, RecvSize int
}

// DefaultPrivate is what a peer that says nothing is taken to have said (RFC 8797 §5.1).
var DefaultPrivate = Private{SendSize: DefaultInline, RecvSize: DefaultInline}

// Append encodes p behind b. Sizes are rounded down to what the format can say.
func (p Private) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, privateMagic)
	var flags byte
	if p.RemoteInv {
		flags = flagRemoteInv
	}
	return append(b, privateVersion, flags, encodeSize(p.SendSize), encodeSize(p.RecvSize))
}

func encodeSize(n int) byte {
	n = min(max(n, sizeUnit), maxPrivateSize)
	return byte(n/sizeUnit - 1)
}

// ParsePrivate looks for the message anywhere in b, at any alignment, as RFC 8797 §5.2 asks. found
// is false, and the result is DefaultPrivate, when there is none of a version known here.
func ParsePrivate(b []byte) (p Private, found bool) {
	for ; len(b) >= PrivateSize; b = b[1:] {
		if binary.BigEndian.Uint32(b) != privateMagic || b[4] != privateVersion {
			continue
		}
		return Private{
			RemoteInv: b[5]&flagRemoteInv != 0,
			SendSize:  (int(b[6]) + 1) * sizeUnit,
			RecvSize:  (int(b[7]) + 1) * sizeUnit,
		}, true
	}
	return DefaultPrivate, false
}

// Thresholds gives the inline thresholds in octets that two sides agree on: send is for messages
// from the side that said mine (RFC 8797 §4.2).
func Thresholds(mine, peer Private) (send, recv int) {
	return min(mine.SendSize, peer.RecvSize), min(mine.RecvSize, peer.SendSize)
}
