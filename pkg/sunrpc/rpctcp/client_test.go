package rpctcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

var cred = sunrpc.AppendAuthNone(nil)

// connect returns a Client and the server side of its connection.
func connect(t testing.TB, opts Options) (*Client, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	defer ln.Close()
	c, err := Dial(t.Context(), ln.Addr().String(), opts)
	kit.Must(t, err)
	peer, err := ln.Accept()
	kit.Must(t, err)
	t.Cleanup(func() {
		c.Close()
		peer.Close()
	})
	return c, peer
}

// readCall reads one call on the server side.
func readCall(t testing.TB, peer net.Conn) (sunrpc.CallHeader, []byte) {
	t.Helper()
	rec, err := ReadRecord(peer, nil, 1<<20)
	if err != nil {
		t.Errorf("read call: %v", err)
		return sunrpc.CallHeader{}, nil
	}
	h, args, err := sunrpc.ParseCall(rec)
	if err != nil {
		t.Errorf("parse call: %v", err)
	}
	return h, args
}

func success(xid uint32, results []byte) []byte {
	return append(sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success), results...)
}

func TestCallWireFormat(t *testing.T) {
	c, peer := connect(t, Options{})
	for _, x := range []struct {
		name       string
		args, data string
		pos        int
		want       string
	}{
		{"arguments only", "abcdefgh", "", 0, "abcdefgh"},
		{"data at the end", "abcd\x00\x00\x00\x05", "hello", 8, "abcd\x00\x00\x00\x05hello\x00\x00\x00"},
		{"data in the middle", "\x00\x00\x00\x04wxyz", "1234", 4, "\x00\x00\x00\x041234wxyz"},
	} {
		served := make(chan struct{})
		go func() {
			defer close(served)
			h, args := readCall(t, peer)
			if h.Prog != 7 || h.Vers != 8 || h.Proc != 9 || string(args) != x.want {
				t.Errorf("%s: got call %+v with arguments %q, want arguments %q", x.name, h, args, x.want)
			}
			WriteRecord(peer, success(h.XID, []byte("result!!")))
		}()
		m := sunrpc.Message{Prog: 7, Vers: 8, Proc: 9, Cred: cred, Args: []byte(x.args), ArgData: []byte(x.data),
			ArgDataPos: x.pos, Result: make([]byte, 0, 8), ResultData: make([]byte, 8)}
		if err := c.Call(t.Context(), &m); err != nil || string(m.Result) != "result!!" || m.ResultDataLen != -1 {
			t.Errorf("%s: got result %q, ResultDataLen %d, error %v", x.name, m.Result, m.ResultDataLen, err)
		}
		<-served
	}
}

// TestConcurrentCalls answers calls in the reverse order of their arrival. Each caller must get the
// reply to its call.
func TestConcurrentCalls(t *testing.T) {
	const callers = 16
	c, peer := connect(t, Options{})
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			want := fmt.Appendf(nil, "%08d", i)
			// The capacity of Result is too small for one call in four.
			m := sunrpc.Message{Cred: cred, Args: want, Result: make([]byte, 0, 4*(i%4))}
			if err := c.Call(t.Context(), &m); err != nil || !bytes.Equal(m.Result, want) {
				t.Errorf("caller %d: got result %q, error %v; want %q", i, m.Result, err, want)
			}
		})
	}
	var replies [callers][]byte
	for i := range replies {
		h, args := readCall(t, peer)
		replies[i] = success(h.XID, args)
	}
	for _, r := range slices.Backward(replies[:]) {
		kit.Must(t, WriteRecord(peer, r))
	}
	wg.Wait()
}

// TestCanceledCallIgnoresLateReply cancels one call and answers it late. The next call must
// succeed.
func TestCanceledCallIgnoresLateReply(t *testing.T) {
	c, peer := connect(t, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	var first sunrpc.CallHeader
	served := make(chan struct{})
	go func() {
		defer close(served)
		first, _ = readCall(t, peer)
		cancel()
	}()
	m := sunrpc.Message{Cred: cred, Result: make([]byte, 0, 8)}
	if err := c.Call(ctx, &m); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled call: got error %v, want %v", err, context.Canceled)
	}
	<-served
	go func() {
		second, _ := readCall(t, peer)
		WriteRecord(peer, success(first.XID, []byte("late")))
		WriteRecord(peer, success(second.XID, []byte("next")))
	}()
	next := sunrpc.Message{Cred: cred, Result: make([]byte, 0, 8)}
	if err := c.Call(t.Context(), &next); err != nil || string(next.Result) != "next" {
		t.Errorf("next call: got result %q, error %v; want next", next.Result, err)
	}
	if len(m.Result) != 0 {
		t.Errorf("canceled call: got result %q, want none", m.Result)
	}
	if err := c.Call(ctx, &m); !errors.Is(err, context.Canceled) {
		t.Errorf("call with a canceled context: got error %v, want %v", err, context.Canceled)
	}
}

// TestErrorRepliesKeepConnection checks that an RPC error ends only the call.
func TestErrorRepliesKeepConnection(t *testing.T) {
	c, peer := connect(t, Options{MaxRecord: 1 << 16})
	reply := func(r func(xid uint32) []byte) error {
		go func() {
			h, _ := readCall(t, peer)
			WriteRecord(peer, r(h.XID))
		}()
		return c.Call(t.Context(), &sunrpc.Message{Cred: cred})
	}
	err := reply(func(xid uint32) []byte { return sunrpc.AppendDeniedReply(nil, xid, sunrpc.AuthTooWeak) })
	if e := (*sunrpc.DeniedError)(nil); !errors.As(err, &e) || e.Auth != sunrpc.AuthTooWeak {
		t.Errorf("denied: got error %v", err)
	}
	err = reply(func(xid uint32) []byte { return sunrpc.AppendAcceptedReply(nil, xid, sunrpc.ProcUnavail) })
	if e := (*sunrpc.AcceptError)(nil); !errors.As(err, &e) || e.Stat != sunrpc.ProcUnavail {
		t.Errorf("not accepted: got error %v", err)
	}
	err = reply(func(xid uint32) []byte { return success(xid, make([]byte, 1<<16)) })
	if e := (*SizeError)(nil); !errors.As(err, &e) || e.Limit != 1<<16 {
		t.Errorf("too long: got error %v", err)
	}
	err = reply(func(xid uint32) []byte { return binary.BigEndian.AppendUint32(nil, xid) })
	if !errors.Is(err, sunrpc.ErrMalformed) {
		t.Errorf("malformed: got error %v, want %v", err, sunrpc.ErrMalformed)
	}
	kit.Must(t, reply(func(xid uint32) []byte { return success(xid, nil) }))
}

// TestProtocolErrorsEndConnection checks that every pending and later call fails when the peer
// breaks the protocol, or one side closes the connection.
func TestProtocolErrorsEndConnection(t *testing.T) {
	for _, x := range []struct {
		name string
		send string // after the calls have arrived; "" closes the connection
		want error
	}{
		{"close", "", io.EOF},
		{"close of the client", "", ErrClosed},
		{"close inside the mark", "\x80\x00", io.ErrUnexpectedEOF},
		{"HTTP", "HTTP/1.1 400 Bad Request\r\n\r\n", ErrRecord},
		{"record too long to skip", "\x84\x01\x00\x01", ErrRecord},
		{"record of two bytes", "\x80\x00\x00\x02ab", sunrpc.ErrMalformed},
		{"unknown XID", "\x80\x00\x00\x04abcd", sunrpc.ErrMalformed},
	} {
		t.Run(x.name, func(t *testing.T) {
			c, peer := connect(t, Options{MaxRecord: 1 << 16})
			c.xid.Store(0)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !errors.Is(err, x.want) {
						t.Errorf("pending call: got error %v, want %v", err, x.want)
					}
				})
			}
			for range 4 {
				readCall(t, peer)
			}
			if _, err := peer.Write([]byte(x.send)); err != nil {
				t.Error(err)
			}
			switch x.want {
			case io.EOF, io.ErrUnexpectedEOF:
				peer.Close()
			case ErrClosed:
				c.Close()
			}
			wg.Wait()
			if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !errors.Is(err, x.want) {
				t.Errorf("later call: got error %v, want %v", err, x.want)
			}
			if err := c.Err(); !errors.Is(err, x.want) {
				t.Errorf("Err: got %v, want %v", err, x.want)
			}
		})
	}
}

// TestForwardKeepsMessage checks that Forward changes neither the call nor the reply, and that it
// uses the buffer of the caller.
func TestForwardKeepsMessage(t *testing.T) {
	c, peer := connect(t, Options{MaxRecord: 1 << 16})
	call := sunrpc.AppendCall(nil, 0xabcd, 7, 8, 9, cred)
	want := []byte("\x00\x00\xab\xcdany bytes")
	for _, x := range []struct {
		name string
		sent string // by the server, with marks
	}{
		{"one fragment", "\x80\x00\x00\x0d" + string(want)},
		{"fragment ends inside the XID", "\x00\x00\x00\x02" + string(want[:2]) + "\x80\x00\x00\x0b" + string(want[2:])},
		{"fragment ends after the XID", "\x00\x00\x00\x04" + string(want[:4]) + "\x80\x00\x00\x09" + string(want[4:])},
	} {
		for _, room := range []int{0, 64} {
			go func() {
				if rec, err := ReadRecord(peer, nil, 1<<16); err != nil || !bytes.Equal(rec, call) {
					t.Errorf("%s: server got call %x, error %v; want %x", x.name, rec, err, call)
				}
				peer.Write([]byte(x.sent))
			}()
			buf := make([]byte, room)
			reply, err := c.Forward(t.Context(), call, buf)
			if err != nil || !bytes.Equal(reply, want) {
				t.Errorf("%s: got reply %x, error %v; want %x", x.name, reply, err, want)
			}
			if room > 0 && err == nil && &reply[0] != &buf[0] {
				t.Errorf("%s: Forward did not use the buffer of the caller", x.name)
			}
		}
	}
}

func TestForwardRefusesInvalidCalls(t *testing.T) {
	c, peer := connect(t, Options{})
	call := sunrpc.AppendCall(nil, 1, 7, 8, 9, cred)
	if _, err := c.Forward(t.Context(), call[:3], nil); !errors.Is(err, sunrpc.ErrMalformed) {
		t.Errorf("call without an XID: got error %v, want %v", err, sunrpc.ErrMalformed)
	}
	first := make(chan error, 1)
	go func() {
		_, err := c.Forward(t.Context(), call, nil)
		first <- err
	}()
	readCall(t, peer)
	if _, err := c.Forward(t.Context(), call, nil); !errors.Is(err, errXIDInUse) {
		t.Errorf("second call with the same XID: got error %v, want %v", err, errXIDInUse)
	}
	WriteRecord(peer, success(1, nil))
	if err := <-first; err != nil {
		t.Errorf("first call: %v", err)
	}
}

// TestCanceledForwardWaitsForHalfReply cancels a call whose reply the server has sent in part.
// Forward must return after restTimeout, because the buffer belongs to the caller again after it
// returns.
func TestCanceledForwardWaitsForHalfReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, peer := net.Pipe()
		c := New(conn, Options{})
		defer c.Close()
		defer peer.Close()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		started := time.Now()
		go func() {
			_, err := c.Forward(ctx, sunrpc.AppendCall(nil, 1, 7, 8, 9, cred), make([]byte, 100))
			ended <- err
		}()
		readCall(t, peer)
		if _, err := peer.Write([]byte("\x80\x00\x00\x10\x00\x00\x00\x01abc")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Forward: got error %v, want %v", err, context.Canceled)
		}
		if waited := time.Since(started); waited != restTimeout {
			t.Errorf("Forward returned after %v, want %v", waited, restTimeout)
		}
		if err := c.Err(); err != errHalfReply {
			t.Errorf("Err: got %v, want %v", err, errHalfReply)
		}
	})
}

func TestWriteTimeoutEndsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, peer := net.Pipe() // without a buffer: a write blocks until the peer reads
		c := New(conn, Options{WriteTimeout: time.Minute})
		defer c.Close()
		defer peer.Close()
		err := c.Call(t.Context(), &sunrpc.Message{Cred: cred})
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got error %v, want %v", err, os.ErrDeadlineExceeded)
		}
		if c.Err() == nil {
			t.Error("Err: got nil after a write timeout")
		}
	})
}
