package rpctcp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// ErrClosed is returned by calls on a closed Client.
var ErrClosed = errors.New("RPC connection is closed")

var (
	errXIDInUse  = errors.New("forward RPC call: a call with the same XID is in flight")
	errShortCall = fmt.Errorf("forward RPC call: %w: no XID", sunrpc.ErrMalformed)
	errNoXID     = fmt.Errorf("%w: reply without an XID", sunrpc.ErrMalformed)
	errNoCall    = fmt.Errorf("%w: reply with the XID of no call", sunrpc.ErrMalformed)
	errHalfReply = errors.New("read RPC reply: peer stopped in the middle of the reply")
)

// Options of a Client. The zero value selects the defaults.
type Options struct {
	// MaxRecord is the maximum size of a reply in bytes; 0 means DefaultMaxRecord.
	MaxRecord int
	// WriteTimeout limits the time to write one call; 0 means DefaultWriteTimeout. A context does
	// not interrupt a write. The connection fails when the timeout expires.
	WriteTimeout time.Duration
}

// Defaults of Options.
const (
	DefaultMaxRecord    = 4 << 20
	DefaultWriteTimeout = 30 * time.Second
)

const (
	// restTimeout limits how long a canceled call waits for the rest of a reply that the reader is
	// already storing in the caller's buffer.
	restTimeout = 2 * time.Second
	// maxSkip is the largest excess, in bytes, of a reply over MaxRecord that the reader skips. The
	// connection fails when the excess is larger.
	maxSkip = 64 << 20
)

// A Client makes calls on one connection and matches the replies by XID. It is safe for concurrent
// use, and it satisfies nfs3.Caller. The first error of the connection is final: pending calls and
// later calls return this error.
type Client struct {
	conn    net.Conn
	opts    Options
	xid     atomic.Uint32
	writer  chan struct{} // holds one token: the right to write
	failed  chan struct{} // closed when state.err is set
	readEnd chan struct{} // closed when the reader has returned
	spare   []byte        // the reader's buffer for replies without a call
	free    sync.Pool     // of *pendingCall

	state struct {
		sync.Mutex
		calls map[uint32]*pendingCall // by XID
		// calls that ended without their reply, which may still come
		canceled int
		err      error // why the connection failed
	}
}

// A pendingCall waits for its reply. The goroutine that removes it from state.calls owns reply
// until it sends to done.
type pendingCall struct {
	header []byte
	reply  []byte
	done   chan error // capacity 1
}

func newPendingCall() any { return &pendingCall{done: make(chan error, 1)} }

// Dial connects to addr, "host:port".
func Dial(ctx context.Context, addr string, opts Options) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return New(conn, opts), nil
}

// New returns a Client that owns conn.
func New(conn net.Conn, opts Options) *Client {
	if opts.MaxRecord == 0 {
		opts.MaxRecord = DefaultMaxRecord
	}
	if opts.WriteTimeout == 0 {
		opts.WriteTimeout = DefaultWriteTimeout
	}
	c := &Client{conn: conn, opts: opts, writer: make(chan struct{}, 1), failed: make(chan struct{}),
		readEnd: make(chan struct{})}
	c.free.New = newPendingCall
	c.state.calls = make(map[uint32]*pendingCall)
	c.xid.Store(rand.Uint32())
	c.writer <- struct{}{}
	go c.read()
	return c
}

// Close closes the connection, ends every call with ErrClosed and waits until the reader has
// returned.
func (c *Client) Close() error {
	c.fail(ErrClosed)
	<-c.readEnd
	return nil
}

// Err returns the error that ended the connection, or nil while calls are possible.
func (c *Client) Err() error {
	c.state.Lock()
	defer c.state.Unlock()
	return c.state.err
}

// Done returns a channel that is closed when the connection has failed or was closed; Err returns
// the reason.
func (c *Client) Done() <-chan struct{} { return c.failed }

// Call makes one call; see nfs3.Caller. It stores all results in m.Result and does not use
// m.ResultData. It returns the wrapped error of ctx, the error of [sunrpc.ParseReply], a
// [*SizeError], or the error of the connection. Only the last one affects other calls. Errors do
// not name the peer.
func (c *Client) Call(ctx context.Context, m *sunrpc.Message) error {
	p := c.free.Get().(*pendingCall)
	defer c.free.Put(p)
	m.ResultDataLen = -1
	pos := len(m.Args)
	if len(m.ArgData) > 0 {
		pos = m.ArgDataPos
	}
	pad := zeroPad[:sunrpc.Pad4(len(m.ArgData))-len(m.ArgData)]
	err := errXIDInUse
	for errors.Is(err, errXIDInUse) {
		m.XID = c.xid.Add(1)
		p.header = sunrpc.AppendCall(p.header[:0], m.XID, m.Prog, m.Vers, m.Proc, m.Cred)
		err = c.roundTrip(ctx, m.XID, p, p.header, m.Args[:pos], m.ArgData, pad, m.Args[pos:])
	}
	if err != nil {
		return err
	}
	_, results, err := sunrpc.ParseReply(p.reply)
	if err != nil {
		return err
	}
	if len(results) > cap(m.Result) {
		m.Result = results
		p.reply = nil // the message owns this memory now
		return nil
	}
	m.Result = append(m.Result[:0], results...)
	return nil
}

var zeroPad [3]byte

// Forward sends call, a complete RPC message, without changing its XID. It returns the complete
// reply, in reply's memory when its capacity suffices. It does not check the reply. Forward does
// not access reply after it returns. Errors are those of Call; a call with the XID of a call in
// flight is an error.
func (c *Client) Forward(ctx context.Context, call, reply []byte) ([]byte, error) {
	if len(call) < sunrpc.SizeUint32 {
		return nil, errShortCall
	}
	p := c.free.Get().(*pendingCall)
	defer c.free.Put(p)
	own := p.reply
	p.reply = reply[:0]
	err := c.roundTrip(ctx, binary.BigEndian.Uint32(call), p, call)
	reply, p.reply = p.reply, own
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// roundTrip writes the parts as one call and waits until p.reply holds the reply. The reader does
// not access p after roundTrip has returned.
func (c *Client) roundTrip(ctx context.Context, xid uint32, p *pendingCall, parts ...[]byte) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("send RPC call: %w", err)
	}
	if err := c.add(xid, p); err != nil {
		return err
	}
	if err := c.send(ctx, parts...); err != nil {
		return c.cancel(xid, p, err)
	}
	select {
	case err := <-p.done:
		return err
	case <-ctx.Done():
		return c.cancel(xid, p, fmt.Errorf("wait for RPC reply: %w", ctx.Err()))
	}
}

func (c *Client) add(xid uint32, p *pendingCall) error {
	c.state.Lock()
	defer c.state.Unlock()
	if c.state.err != nil {
		return c.state.err
	}
	if c.state.calls[xid] != nil {
		return errXIDInUse
	}
	c.state.calls[xid] = p
	return nil
}

// send writes one call. The connection has failed when part of the call was written.
func (c *Client) send(ctx context.Context, parts ...[]byte) error {
	select {
	case <-c.writer:
	case <-ctx.Done():
		return fmt.Errorf("send RPC call: %w", ctx.Err())
	case <-c.failed:
		return c.Err()
	}
	err := c.conn.SetWriteDeadline(time.Now().Add(c.opts.WriteTimeout))
	if err == nil {
		err = WriteRecord(c.conn, parts...)
	}
	c.writer <- struct{}{}
	if err != nil {
		c.fail(fmt.Errorf("send RPC call: %w", err))
		return c.Err()
	}
	return nil
}

// cancel ends p and returns err. When the reader is storing the reply in p's buffer, cancel waits
// for the reader. The connection fails when the rest of the reply does not arrive in time.
func (c *Client) cancel(xid uint32, p *pendingCall, err error) error {
	c.state.Lock()
	pending := c.state.calls[xid] == p
	if pending {
		delete(c.state.calls, xid)
		c.state.canceled++
	}
	c.state.Unlock()
	if pending {
		return err
	}
	timer := time.NewTimer(restTimeout)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		c.fail(errHalfReply)
		<-p.done // the reader sends to done, because fail has closed its connection
	}
	return err
}

// fail closes the connection and ends every pending call with err. Only the first call has an
// effect.
func (c *Client) fail(err error) {
	c.state.Lock()
	if c.state.err != nil {
		c.state.Unlock()
		return
	}
	c.state.err = err
	calls := c.state.calls
	c.state.calls = nil
	close(c.failed)
	c.state.Unlock()
	c.conn.Close()
	for _, p := range calls {
		p.done <- err
	}
}

// read completes calls until the connection fails.
func (c *Client) read() {
	defer close(c.readEnd)
	r := bufio.NewReaderSize(c.conn, growStep)
	for {
		p, err := c.readReply(r)
		if err != nil {
			err = fmt.Errorf("read RPC reply: %w", err)
			c.fail(err)
		}
		if p != nil {
			p.done <- err
		}
		if err != nil {
			return
		}
	}
}

// readReply reads one reply into the buffer of its call and returns the call, or nil when the call
// has ended already. An error ends the connection.
func (c *Client) readReply(r *bufio.Reader) (*pendingCall, error) {
	mark, err := r.Peek(MarkSize)
	if err != nil {
		return nil, partialEOF(mark, err)
	}
	n := FragmentSize(mark)
	if n < sunrpc.SizeUint32 {
		return c.readSplitXID(r)
	}
	var p *pendingCall
	if n <= c.opts.MaxRecord+maxSkip { // otherwise ReadRecord returns the error
		// With the XID known before the read, the reply is stored directly in the call's buffer.
		head, err := r.Peek(MarkSize + sunrpc.SizeUint32)
		if err != nil {
			return nil, partialEOF(head, err)
		}
		if p, err = c.take(binary.BigEndian.Uint32(head[MarkSize:])); err != nil {
			return nil, err
		}
	}
	if p != nil {
		p.reply, err = ReadRecord(r, p.reply, c.opts.MaxRecord)
	} else {
		c.spare, err = ReadRecord(r, c.spare, c.opts.MaxRecord)
	}
	if err != nil {
		return c.skipReply(r, p, err)
	}
	return p, nil
}

// skipReply ends the call p when err is a SizeError, and skips the rest of the reply. The server
// would send the same reply again, so only this call fails.
func (c *Client) skipReply(r *bufio.Reader, p *pendingCall, err error) (*pendingCall, error) {
	var long *SizeError
	if !errors.As(err, &long) || long.rest > maxSkip {
		return p, err
	}
	if p != nil {
		p.done <- fmt.Errorf("read RPC reply: %w", err)
	}
	return nil, long.Skip(r, maxSkip)
}

// readSplitXID reads one reply whose first fragment ends inside the XID. RFC 5531 §11 allows this,
// but no known server does it, so the extra copy does not matter.
func (c *Client) readSplitXID(r *bufio.Reader) (*pendingCall, error) {
	var err error
	if c.spare, err = ReadRecord(r, c.spare, c.opts.MaxRecord); err != nil {
		return nil, err
	}
	if len(c.spare) < sunrpc.SizeUint32 {
		return nil, errNoXID
	}
	p, err := c.take(binary.BigEndian.Uint32(c.spare))
	if p != nil {
		p.reply = append(p.reply[:0], c.spare...)
	}
	return p, err
}

// take removes and returns the call of a reply, or nil when the reply can belong to a canceled
// call. Any other reply is an error: the peer does not follow the protocol.
func (c *Client) take(xid uint32) (*pendingCall, error) {
	c.state.Lock()
	defer c.state.Unlock()
	if p := c.state.calls[xid]; p != nil {
		delete(c.state.calls, xid)
		return p, nil
	}
	if c.state.canceled == 0 {
		return nil, errNoCall
	}
	c.state.canceled--
	return nil, nil
}

// partialEOF returns io.ErrUnexpectedEOF for an EOF after some bytes.
func partialEOF(got []byte, err error) error {
	if errors.Is(err, io.EOF) && len(got) > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
