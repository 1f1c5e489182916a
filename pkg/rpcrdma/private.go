package rpcrdma

import "encoding/binary"

// Format of the connection private data (RFC 8797 §4).
const (
	// PrivateSize is the size of the message in bytes.
	PrivateSize = 8

	privateMagic   = 0xf6ab0e18
	privateVersion = 1
	flagRemoteInv  = 0x01
	sizeUnit       = 1024       // a size is encoded as size/1024 - 1
	maxPrivateSize = 256 * 1024 // maximum of the encoding in one byte
)

// Private is the connection private data of one side.
type Private struct {
	// RemoteInv, the R flag, reports support of Send With Invalidate (RFC 8797 §3.2).
	RemoteInv bool
	// SendSize and RecvSize are inline thresholds in bytes: multiples of 1024 from 1024 to 262144.
	SendSize, RecvSize int
}

// DefaultPrivate applies to a peer that sends no private data (RFC 8797 §5.1).
var DefaultPrivate = Private{SendSize: DefaultInline, RecvSize: DefaultInline}

// Append appends the encoded p to b. It rounds the sizes down to a multiple of 1024.
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

// ParsePrivate finds the message anywhere in b, at any alignment (RFC 8797 §5.2). It returns
// DefaultPrivate and false if b contains no message of version 1.
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

// Thresholds returns the inline thresholds in bytes of a connection (RFC 8797 §4.2). send applies
// to messages from the side of mine, recv to messages from the peer.
func Thresholds(mine, peer Private) (send, recv int) {
	return min(mine.SendSize, peer.RecvSize), min(mine.RecvSize, peer.SendSize)
}
