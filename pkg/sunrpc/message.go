package sunrpc

// A Message is one RPC as its caller hands it to a transport, and as the transport hands it back. A
// Message and its buffers may be reused for any number of calls, one at a time.
//
// The DDP-eligible item of a procedure (RFC 8267 §4: the data of WRITE and of READ, the path of
// SYMLINK and of READLINK) travels beside the XDR stream, so that a transport can move it without a
// copy.
type Message struct {
	// Prog, Vers, Proc name the procedure (RFC 5531 §9).
	Prog, Vers, Proc uint32

	// Cred is the encoded credential: flavor, length, body, as AppendAuthSys and
	// AppendAuthNone make it. The verifier sent is always AUTH_NONE.
	Cred []byte

	// Args is the XDR of the arguments without the octets of ArgData.
	Args []byte
	// ArgData, if not empty, is the arguments' DDP-eligible opaque (WRITE's data, SYMLINK's path).
	// Its octets belong at offset ArgDataPos of Args (behind the opaque's length word), followed by
	// their XDR pad. The transport reads it during the call only.
	ArgData    []byte
	ArgDataPos int

	// ResultData, if not empty, receives the result's DDP-eligible opaque (READ's data, READLINK's
	// path). Whether it was used says ResultDataLen; when the peer sent the item inline it is in
	// Result. When the call returned an error its content is undefined.
	ResultData []byte

	// MaxResult is the largest possible size in octets of the results' XDR, pads included, without
	// the octets of the opaque that goes to ResultData (RFC 8267 §3). Transports size the reply
	// from it.
	MaxResult int

	// Result is the results' XDR. The caller gives the room, a capacity of at least MaxResult; the
	// transport sets the length, and may replace the slice by one of its own making where the room
	// is too small.
	Result []byte

	// ResultDataLen is the number of octets that were placed in ResultData and left out of Result;
	// -1 when the results came whole in Result.
	ResultDataLen int

	// XID of the call, set by the transport.
	XID uint32
}
