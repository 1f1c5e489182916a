package nfs3

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// A Caller is an RPC transport. Call sends m and waits for its reply, as sunrpc.Message describes.
// It may be called from any number of goroutines. It returns nil only when the call was accepted
// and executed (sunrpc.Success) and m.Result holds the results; when it has returned, with or
// without an error, nothing touches m or the memory it names any more. When ctx ends, Call ends
// soon after.
type Caller interface {
	Call(ctx context.Context, m *sunrpc.Message) error
}

// Options of a Client. The zero value is good.
type Options struct {
	// Observe, if not nil, is called after each RPC with its duration and the transport's error. It
	// runs on the calling path, concurrently, and must not block.
	Observe func(p Proc, d time.Duration, err error)
}

// A Client makes the NFSv3 procedures over a Caller. It is safe for concurrent use, holds no lock
// during a call, and a call that succeeds allocates nothing here; only a READDIR or READDIRPLUS of
// more than 128 KiB gets memory for its own.
//
// Every method takes the credential as sunrpc.AppendAuthSys encodes it, and fills a result that its
// caller provides. Errors:
//   - [*Error]: the server's status, or a name that no server could take;
//   - one that wraps [ErrMalformed]: the reply was not NFSv3;
//   - the transport's own error, wrapped.
//
// [Errno] makes an error number of any of them.
type Client struct {
	caller  Caller
	observe func(Proc, time.Duration, error)
	pool    sync.Pool // of *scratch
}

// NewClient returns a Client over caller.
func NewClient(caller Caller, opts Options) *Client {
	c := &Client{caller: caller, observe: opts.Observe}
	c.pool.New = func() any { return &scratch{res: make([]byte, 0, resultRoom)} }
	return c
}

const (
	// resultRoom is the room in octets that each call's result has at least, so that small READs
	// that come inline, and the large results of directories of everyday size, need no larger
	// slice.
	resultRoom = 8 << 10
	// resultKeep is the largest result slice in octets that goes back to the pool.
	resultKeep = 128 << 10
)

// scratch is what one call needs while it runs.
type scratch struct {
	msg    sunrpc.Message
	proc   Proc
	status Status
	args   []byte // view of argBuf while encoding
	argBuf [maxArgs]byte
	res    []byte // room for results, length 0
	path   []byte // SYMLINK's target
	entry  DirEntry
}

// begin takes a scratch and prepares it for a call whose results are at most maxResult octets.
func (c *Client) begin(p Proc, cred []byte, maxResult int) *scratch {
	s := c.pool.Get().(*scratch)
	s.proc = p
	s.args = s.argBuf[:0]
	if cap(s.res) < maxResult {
		s.res = make([]byte, 0, maxResult)
	}
	s.msg = sunrpc.Message{Prog: Program, Vers: Version, Proc: uint32(p), Cred: cred, MaxResult: maxResult,
		Result: s.res, ResultDataLen: -1}
	return s
}

// end gives s back. The message is cleared because it names memory of the caller's.
func (c *Client) end(s *scratch) {
	s.msg = sunrpc.Message{}
	s.entry = DirEntry{}
	if cap(s.res) > resultKeep {
		s.res = make([]byte, 0, resultRoom)
	}
	c.pool.Put(s)
}

// roundTrip makes the call whose arguments are in s.args.
func (c *Client) roundTrip(ctx context.Context, s *scratch) error {
	m := &s.msg
	m.Args = s.args
	m.ArgDataPos = len(s.args)
	var start time.Time
	if c.observe != nil {
		start = time.Now()
	}
	err := c.caller.Call(ctx, m)
	if c.observe != nil {
		c.observe(s.proc, time.Since(start), err)
	}
	if err != nil {
		return fmt.Errorf("NFSv3 %s: %w", s.proc, err)
	}
	if m.ResultDataLen > len(m.ResultData) {
		return malformed(s.proc, errResultData)
	}
	return nil
}

// call makes the call and reads the status of its results; the arm that belongs to s.status comes
// next in the reader.
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

// finish is the call's outcome when its results have been read.
func (s *scratch) finish(d *reader) error {
	if err := d.Err(); err != nil {
		return malformed(s.proc, err)
	}
	if s.status != OK {
		return statusError(s.proc, s.status)
	}
	return nil
}

// refuse is the error of a call that is not sent.
func (s *scratch) refuse(status Status, what string) error {
	return &Error{Proc: s.proc, Status: status, What: what}
}

// addDirOp appends a diropargs3: a directory and a name in it (RFC 1813 §2.6).
func (s *scratch) addDirOp(dir *FH, name string) error {
	switch {
	case len(name) > MaxName:
		return s.refuse(ErrNameTooLong, "a name has at most 255 octets")
	case name == "" || strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return s.refuse(ErrInval, "a name is not empty and holds no '/' and no NUL")
	}
	s.args = sunrpc.AppendString(appendFH(s.args, dir), name)
	return nil
}
