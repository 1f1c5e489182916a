package rpctcp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// ErrClosed is the error of calls on a Client that was closed.
var ErrClosed = errors.New("RPC connection is closed")

// Options of a Client. The zero value is good.
type Options struct {
	// MaxRecord is the largest reply in octets that is taken; 0 means DefaultMaxRecord.
	MaxRecord int
	// WriteTimeout bounds the writing of one call, which a context cannot interrupt; 0 means
	// DefaultWriteTimeout. When it passes, the connection ends.
	WriteTimeout time.Duration
}

// Defaults of Options.
const (
	DefaultMaxRecord    = 4 << 20
	DefaultWriteTimeout = 30 * time.Second
)

// A Client makes calls on one connection. It satisfies nfs3.Caller and is safe for concurrent use;
// calls are answered in any order. The first error of the connection ends it for good: pending
// calls and later ones return it.
type Client struct {
	conn    net.Conn
	opts    Options
	xid     atomic.Uint32
	strays  atomic.Uint64
	writer  chan struct{} // holds one token: the right to write
	dead    chan struct{} // closed when err is set
	readEnd chan struct{} // closed when the reader has ended

	mu    sync.Mutex
	calls map[uint32]*pending // by XID
	err   error               // why the connection ended
}

// pending is a call that waits for its reply. Whoever takes it off the table, under Client.mu, owns
// its message until done is sent to.
type pending struct {
	m    *sunrpc.Message
	hdr  []byte
	done chan error // of one
}

var pendings = sync.Pool{New: func() any { return &pending{done: make(chan error, 1)} }}

// Dial connects to addr, "host:port".
func Dial(ctx context.Context, addr string, opts Options) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return New(conn, opts), nil
}

// New returns a Client on conn, which belongs to it from now on.
func New(conn net.Conn, opts Options) *Client {
	if opts.MaxRecord == 0 {
		opts.MaxRecord = DefaultMaxRecord
	}
	if opts.WriteTimeout == 0 {
		opts.WriteTimeout = DefaultWriteTimeout
	}
	c := &Client{conn: conn, opts: opts, writer: make(chan struct{}, 1), dead: make(chan struct{}),
		readEnd: make(chan struct{}), calls: make(map[uint32]*pending)}
	c.xid.Store(rand.Uint32())
	c.writer <- struct{}{}
	go c.read()
	return c
}

// Close ends the connection and every call on it, and waits for the reader's end.
func (c *Client) Close() error {
	c.fail(ErrClosed)
	<-c.readEnd
	return nil
}

// Strays is the number of replies that belonged to no call, for example to one whose context had
// ended.
func (c *Client) Strays() uint64 { return c.strays.Load() }

// Call makes one call; see nfs3.Caller. The results always come whole in m.Result, ResultData is
// not used. Errors: the context's, wrapped; that of sunrpc.ParseReply; or the connection's.
func (c *Client) Call(ctx context.Context, m *sunrpc.Message) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("RPC to %s: %w", c.conn.RemoteAddr(), err)
	}
	p := pendings.Get().(*pending)
	p.m = m
	m.ResultDataLen = -1
	if err := c.enter(p); err != nil {
		p.release()
		return err
	}
	if err := c.send(ctx, p); err != nil {
		return c.abandon(p, err)
	}
	select {
	case err := <-p.done:
		p.release()
		return err
	case <-ctx.Done():
		return c.abandon(p, fmt.Errorf("RPC to %s: %w", c.conn.RemoteAddr(), ctx.Err()))
	}
}

func (p *pending) release() {
	p.m = nil
	pendings.Put(p)
}

// enter puts p on the table under a new XID.
func (c *Client) enter(p *pending) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	for {
		p.m.XID = c.xid.Add(1)
		if _, taken := c.calls[p.m.XID]; !taken {
			break
		}
	}
	c.calls[p.m.XID] = p
	return nil
}

// abandon ends p with err, unless its outcome is on its way already: then that is waited for,
// because the reader may be filling p's message. The wait is short; no I/O is in it.
func (c *Client) abandon(p *pending, err error) error {
	if c.leave(p.m.XID) == nil {
		err = <-p.done
	}
	p.release()
	return err
}

// leave takes a call off the table; nil when it is not there.
func (c *Client) leave(xid uint32) *pending {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.calls[xid]
	delete(c.calls, xid)
	return p
}

// send writes p's call. An error means that nothing was written, or that the connection has ended.
func (c *Client) send(ctx context.Context, p *pending) error {
	m := p.m
	p.hdr = sunrpc.AppendCall(p.hdr[:0], m.XID, m.Prog, m.Vers, m.Proc, m.Cred)
	select {
	case <-c.writer:
	case <-ctx.Done():
		return fmt.Errorf("RPC to %s: %w", c.conn.RemoteAddr(), ctx.Err())
	case <-c.dead:
		return c.cause()
	}
	err := c.conn.SetWriteDeadline(time.Now().Add(c.opts.WriteTimeout))
	if err == nil {
		err = writeCall(c.conn, p.hdr, m)
	}
	c.writer <- struct{}{}
	if err != nil {
		c.fail(fmt.Errorf("RPC to %s: write: %w", c.conn.RemoteAddr(), err))
		return c.cause()
	}
	return nil
}

var zeroPad [3]byte

// writeCall writes the header and the arguments with ArgData at its place.
func writeCall(conn net.Conn, hdr []byte, m *sunrpc.Message) error {
	if len(m.ArgData) == 0 {
		return WriteRecord(conn, hdr, m.Args)
	}
	pad := zeroPad[:sunrpc.Pad4(len(m.ArgData))-len(m.ArgData)]
	return WriteRecord(conn, hdr, m.Args[:m.ArgDataPos], m.ArgData, pad, m.Args[m.ArgDataPos:])
}

// cause is why the connection ended.
func (c *Client) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// fail ends the connection with its first error, and every call on it.
func (c *Client) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	calls := c.calls
	c.calls = nil
	close(c.dead)
	c.mu.Unlock()
	c.conn.Close()
	for _, p := range calls {
		p.done <- err
	}
}

// read hands each reply to its call until the connection ends.
func (c *Client) read() {
	defer close(c.readEnd)
	r := bufio.NewReaderSize(c.conn, growStep)
	var buf []byte
	for {
		rec, err := ReadRecord(r, buf, c.opts.MaxRecord)
		if err != nil {
			c.fail(fmt.Errorf("RPC to %s: read: %w", c.conn.RemoteAddr(), err))
			return
		}
		buf = rec
		xid, results, err := sunrpc.ParseReply(rec)
		if len(rec) < sunrpc.SizeUint32 {
			c.fail(fmt.Errorf("RPC to %s: %w", c.conn.RemoteAddr(), err))
			return
		}
		p := c.leave(xid)
		if p == nil {
			c.strays.Add(1)
			continue
		}
		if err == nil && len(results) > cap(p.m.Result) {
			p.m.Result = results // the record is the message's now
			buf = nil
		} else if err == nil {
			p.m.Result = append(p.m.Result[:0], results...)
		}
		p.done <- err
	}
}
