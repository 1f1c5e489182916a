package sunrpc

// A Message is one RPC. The caller sets the arguments and the buffers, and the transport sets the
// results. A Message and its buffers may be reused for the next call, one call at a time.
//
// The DDP-eligible item of a procedure travels beside the XDR stream, so that a transport can move
// it without a copy. RFC 8267 §4 lists these items: the data of WRITE and READ, the path of SYMLINK
// and READLINK.
type Message struct {
	// Prog, Vers and Proc identify the procedure (RFC 5531 §9).
	Prog, Vers, Proc uint32

	// Cred is the encoded credential: flavor, length, body; see AppendAuthSys and AppendAuthNone.
	// The verifier is always AUTH_NONE.
	Cred []byte

	// Args is the XDR of the arguments without ArgData.
	Args []byte
	// ArgData, if not empty, is the DDP-eligible opaque of the arguments. Its bytes and their XDR
	// pad belong at offset ArgDataPos of Args, after the length of the opaque. The transport reads
	// ArgData only during the call.
	ArgData    []byte
	ArgDataPos int

	// ResultData, if not empty, is the buffer for the DDP-eligible opaque of the results.
	// ResultDataLen says whether the transport used it. The content is undefined after an error.
	ResultData []byte
	// ResultPieces, if not empty, is the buffer in several pieces, instead of ResultData. No piece
	// is empty.
	ResultPieces [][]byte

	// MaxResult is the maximum size in bytes of the XDR of the results, including pads but without
	// the opaque that goes to ResultData (RFC 8267 §3). Transports size the reply buffer by it.
	MaxResult int

	// Result is the XDR of the results. The caller provides a slice with a capacity of at least
	// MaxResult. The transport sets the length, and replaces the slice if the capacity is too
	// small.
	Result []byte

	// ResultDataLen is the number of bytes that the transport placed in ResultData and omitted from
	// Result. It is -1 when Result holds all results.
	ResultDataLen int

	// Once is true when the effects of the call must happen once: a retransmission must have the same
	// XID, so that the server recognizes it. See CallKeeper.
	Once bool

	// XID of the call, set by the transport.
	XID uint32
}

// ResultRoom returns the size of ResultData or ResultPieces in bytes.
func (m *Message) ResultRoom() int {
	n := len(m.ResultData)
	for _, p := range m.ResultPieces {
		n += len(p)
	}
	return n
}
