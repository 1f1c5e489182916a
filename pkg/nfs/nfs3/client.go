package nfs3

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A Caller is an RPC transport. Call sends m and waits for the reply, as sunrpc.Message describes.
// It is safe for concurrent use.
//
// Call returns nil when the server accepted and executed the call (sunrpc.Success) and m.Result
// holds the results. It returns soon after ctx ends. The transport does not access m, or the memory
// m refers to, after Call has returned.
type Caller interface {
	Call(ctx context.Context, m *sunrpc.Message) error
}

// A Client calls the NFSv3 procedures over a Caller. It is safe for concurrent use and holds no
// lock during a call. A successful call does not allocate, except a READDIR or READDIRPLUS of more
// than 128 KiB.
//
// Every method takes an encoded credential (see sunrpc.AppendAuthSys) and stores the results in a
// struct of the caller. Errors:
//   - [*Error]: the status from the server, or arguments that are invalid in NFSv3;
//   - an error that wraps [ErrMalformed]: the reply is not valid NFSv3;
//   - the wrapped error of the transport.
//
// [Errno] converts each of them to an error number.
type Client struct {
	caller Caller
	pool   sync.Pool // of *scratch
}

// NewClient returns a Client over caller.
func NewClient(caller Caller) *Client {
	c := &Client{caller: caller}
	c.pool.New = func() any { return &scratch{res: make([]byte, 0, resultRoom)} }
	return c
}

const (
	// resultRoom is the minimum capacity for results, in bytes. It suffices for a small inline READ
	// and for the listing of an average directory.
	resultRoom = 8 << 10
	// resultKeep is the maximum capacity, in bytes, of a result slice in the pool.
	resultKeep = 128 << 10
)

// scratch holds the buffers of one call.
type scratch struct {
	msg    sunrpc.Message
	proc   Proc
	status Status
	args   []byte // slice of argBuf
	argBuf [maxArgs]byte
	res    []byte // buffer for results, length 0
	path   []byte // target of SYMLINK
	entry  DirEntry
}

// once are the procedures whose effects must happen once.
var once = [NumProcs]bool{ProcSetAttr: true, ProcCreate: true, ProcMkdir: true, ProcSymlink: true, ProcMknod: true,
	ProcRemove: true, ProcRmdir: true, ProcRename: true, ProcLink: true}

// begin prepares a scratch for a call with results of at most maxResult bytes.
func (c *Client) begin(p Proc, cred []byte, maxResult int) *scratch {
	s := c.pool.Get().(*scratch)
	s.proc = p
	s.args = s.argBuf[:0]
	if cap(s.res) < maxResult {
		s.res = make([]byte, 0, maxResult)
	}
	s.msg = sunrpc.Message{Prog: Program, Vers: Version, Proc: uint32(p), Cred: cred, MaxResult: maxResult,
		Result: s.res, ResultDataLen: -1, Once: once[p]}
	return s
}

// end puts s into the pool. It clears the message, which refers to memory of the caller.
func (c *Client) end(s *scratch) {
	s.msg = sunrpc.Message{}
	s.entry = DirEntry{}
	if cap(s.res) > resultKeep {
		s.res = make([]byte, 0, resultRoom)
	}
	c.pool.Put(s)
}

// roundTrip makes a call with the arguments in s.args.
func (c *Client) roundTrip(ctx context.Context, s *scratch) error {
	m := &s.msg
	m.Args = s.args
	m.ArgDataPos = len(s.args)
	if err := c.caller.Call(ctx, m); err != nil {
		return fmt.Errorf("%s: %w", operation(s.proc), err)
	}
	if m.ResultDataLen > m.ResultRoom() {
		return malformed(s.proc, errResultData)
	}
	return nil
}

// call makes the call and decodes its status into s.status. The returned reader is at the first
// item after the status.
func (c *Client) call(ctx context.Context, s *scratch) (reader, error) {
	if err := c.roundTrip(ctx, s); err != nil {
		return reader{}, err
	}
	d := reader{sunrpc.NewDecoder(s.msg.Result)}
	s.status = Status(d.Uint32())
	if err := d.Err(); err != nil {
		return reader{}, malformed(s.proc, err)
	}
	if s.status != OK && !s.status.Valid() {
		return reader{}, statusError(s.proc, s.status)
	}
	return d, nil
}

// finish returns the error of the call after d has decoded the results.
func (s *scratch) finish(d *reader) error {
	if err := d.Err(); err != nil {
		return malformed(s.proc, err)
	}
	if s.status != OK {
		return statusError(s.proc, s.status)
	}
	return nil
}

// refuse returns the error for invalid arguments. The call is not sent.
func (s *scratch) refuse(status Status, what string) error {
	return &Error{Op: operation(s.proc), Status: status, What: what}
}

// addDirOp appends a diropargs3: a directory and a name in the directory (RFC 1813 §2.6).
func (s *scratch) addDirOp(dir *FH, name string) error {
	switch {
	case len(name) > MaxName:
		return s.refuse(ErrNameTooLong, "name is longer than 255 bytes")
	case name == "" || strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return s.refuse(ErrInval, "name is empty or contains '/' or NUL")
	}
	s.args = sunrpc.AppendString(appendFH(s.args, dir), name)
	return nil
}
