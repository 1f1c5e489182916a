package fdstore

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// The protocol between a daemon and a holder uses a SOCK_SEQPACKET socket; a packet is one message.
//
//	byte 0    version of the protocol
//	byte 1    request: operation; reply: status
//	byte 2..  request and entry: name; other replies: text of an error
//
// The holder sends a greeting with statusOK, statusBusy or statusDenied when a daemon connects. A
// daemon sends one request at a time:
//
//	opPut     name, with one descriptor: keep it, replace an entry of the same name
//	opRemove  name: remove the entry if there is one
//	opList    every entry comes as one message with statusEntry, the name and the descriptor
//
// The holder completes each request with statusOK or an error. It closes the connection after a
// message that is not valid.
const (
	protocolVersion = 1
	headerBytes     = 2
	// maxMessage is the largest length of a message: a header and a name, or the text of an error.
	maxMessage = 512
)

const (
	opPut = 1 + iota
	opRemove
	opList
)

const (
	statusOK = iota
	statusEntry
	statusInvalid // the message is not valid
	statusVersion // the holder does not support the version of the message
	statusBusy
	statusDenied
	statusFull
	statusDuplicate
	statusFailed // a system call failed
)

// A request is one request of a daemon.
type request struct {
	op   byte
	name string
}

// A protocolError is an error of the peer: its message has a wrong form.
type protocolError struct {
	status byte
	text   string
}

func (e *protocolError) Error() string { return e.text }

func invalid(format string, args ...any) error {
	return &protocolError{status: statusInvalid, text: fmt.Sprintf(format, args...)}
}

// parseRequest parses a request that came with a number of descriptors. All its errors are of type
// *protocolError.
func parseRequest(b []byte, descriptors int) (request, error) {
	switch {
	case len(b) < headerBytes:
		return request{}, invalid("message of %d bytes is too short", len(b))
	case b[0] != protocolVersion:
		return request{}, &protocolError{status: statusVersion,
			text: fmt.Sprintf("version %d is not supported; the holder supports version %d", b[0], protocolVersion)}
	}
	r := request{op: b[1], name: string(b[headerBytes:])}
	want := 0
	switch r.op {
	case opPut:
		want = 1
		fallthrough
	case opRemove:
		if err := checkName(r.name); err != nil {
			return request{}, invalid("%v", err)
		}
	case opList:
		if r.name != "" {
			return request{}, invalid("list request with a name")
		}
	default:
		return request{}, invalid("unknown operation %d", r.op)
	}
	if descriptors != want {
		return request{}, invalid("operation %d with %d descriptors; want %d", r.op, descriptors, want)
	}
	return r, nil
}

// checkName returns an error if name is not valid in $LISTEN_FDNAMES, or longer than MaxName.
func checkName(name string) error {
	if name == "" || len(name) > MaxName {
		return fmt.Errorf("%w: length %d bytes; want 1 to %d", ErrName, len(name), MaxName)
	}
	for _, c := range []byte(name) {
		if c < ' ' || c >= 0x7f || c == ':' {
			return fmt.Errorf("%w: %q; use printable ASCII without colon", ErrName, name)
		}
	}
	return nil
}

// send sends a message. fd is its descriptor, or -1.
func send(c *net.UnixConn, code byte, text string, fd int) error {
	b := append([]byte{protocolVersion, code}, text[:min(len(text), maxMessage-headerBytes)]...)
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	_, _, err := c.WriteMsgUnix(b, oob, nil)
	return err
}

// receive receives a message and its descriptors, which the caller closes. It returns a
// *protocolError for a message that is too long or has more than one descriptor. The kernel closes
// the descriptors that do not fit into the buffer.
func receive(c *net.UnixConn) (b []byte, fds []int, err error) {
	b = make([]byte, maxMessage)
	oob := make([]byte, unix.CmsgSpace(4)) // one descriptor; alignment leaves space for two
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	fds, fdsErr := receivedFDs(oob[:oobn])
	switch {
	case err != nil: // io.EOF also for an empty message, which may have a descriptor
	case fdsErr != nil:
		err = fdsErr
	case flags&unix.MSG_TRUNC != 0:
		err = invalid("message longer than %d bytes", maxMessage)
	case flags&unix.MSG_CTRUNC != 0 || len(fds) > 1:
		err = invalid("message with more than one descriptor, or too few free descriptors to receive it")
	}
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return b[:n], fds, nil
}
