package mountd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"

	"github.com/vmware/go-nfs-client/nfs/rpc"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// maxRecord is the largest call and the largest reply in octets: far above any MNT, and room for
// some hundred exports.
const maxRecord = 64 << 10

var (
	errReplyXID = errors.New("the reply's XID is not the call's")
	errLocal    = errors.New("the loopback connection to the RPC client failed")
)

// A fence relays between go-nfs-client on a loopback connection and the server on peer; see the
// package's doc.
type fence struct {
	peer net.Conn
	ln   *net.TCPListener
	from net.IP // source address of the one connection that ln takes

	mu     sync.Mutex
	client net.Conn // accepted on ln
	closed bool
	err    error // why the relay ended
}

// through runs use with a client of go-nfs-client whose server is peer. peer is closed afterwards,
// and when ctx ends. An error of the relay goes before what the library makes of it.
func through(ctx context.Context, peer net.Conn, use func(*rpc.Client) error) error {
	f, err := newFence(ctx, peer)
	if err != nil {
		peer.Close()
		return err
	}
	stop := context.AfterFunc(ctx, f.close)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.fail(f.relay())
		f.close()
	}()
	err = f.use(use)
	stop()
	f.close()
	<-ended
	if ctxErr := ctx.Err(); ctxErr != nil && err != nil {
		return ctxErr
	}
	if f.err != nil && err != nil {
		return f.err
	}
	return err
}

func newFence(ctx context.Context, peer net.Conn) (*fence, error) {
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errLocal, err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		ln.SetDeadline(deadline)
		peer.SetDeadline(deadline)
	}
	host := rand.Uint32N(1<<24 - 4)
	host += 2 // neither 127.0.0.0 nor 127.0.0.1, which everybody uses
	return &fence{peer: peer, ln: ln, from: net.IPv4(127, byte(host>>16), byte(host>>8), byte(host))}, nil
}

// use dials the fence with the library's client and runs fn; a panic in the library becomes an
// error.
func (f *fence) use(fn func(*rpc.Client) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("go-nfs-client panicked: %v", p)
		}
	}()
	c, err := rpc.DialTCP("tcp4", &net.TCPAddr{IP: f.from}, f.ln.Addr().String())
	if err != nil {
		return fmt.Errorf("%w: %w", errLocal, err)
	}
	defer c.Close()
	return fn(c)
}

// fail keeps the first error.
func (f *fence) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil && !f.closed {
		f.err = err
	}
}

// close ends the relay, the library's calls, and the connection to the server.
func (f *fence) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	f.ln.Close()
	f.peer.Close()
	if f.client != nil {
		f.client.Close()
	}
}

// accept takes the library's connection, and turns away any other.
func (f *fence) accept() (net.Conn, error) {
	for {
		conn, err := f.ln.AcceptTCP()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errLocal, err)
		}
		if addr, ok := conn.RemoteAddr().(*net.TCPAddr); !ok || !addr.IP.Equal(f.from) {
			conn.Close()
			continue
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.closed {
			conn.Close()
			return nil, net.ErrClosed
		}
		f.client = conn
		return conn, nil
	}
}

// relay passes calls and replies until either side ends, or the server answers anything but
// success.
func (f *fence) relay() error {
	client, err := f.accept()
	if err != nil {
		return err
	}
	var call, reply []byte
	for {
		if call, err = rpctcp.ReadRecord(client, call, maxRecord); err == io.EOF {
			return nil // the library has done its calls
		} else if err != nil {
			return fmt.Errorf("%w: %w", errLocal, err)
		}
		header, _, err := sunrpc.ParseCall(call)
		if err != nil {
			return fmt.Errorf("%w: %w", errLocal, err)
		}
		if err := rpctcp.WriteRecord(f.peer, call); err != nil {
			return err
		}
		if reply, err = rpctcp.ReadRecord(f.peer, reply, maxRecord); err != nil {
			return err
		}
		xid, _, err := sunrpc.ParseReply(reply)
		if err != nil {
			return err
		}
		if xid != header.XID {
			return fmt.Errorf("%w: %w", sunrpc.ErrMalformed, errReplyXID)
		}
		if err := rpctcp.WriteRecord(client, reply); err != nil {
			return fmt.Errorf("%w: %w", errLocal, err)
		}
	}
}
