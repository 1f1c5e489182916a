package rpctcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

func TestMain(m *testing.M) { testutil.Main(m) }

var cred = sunrpc.AppendAuthNone(nil)

// connect returns a Client and the server's end of its connection.
func connect(t testing.TB, opts Options) (*Client, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := Dial(t.Context(), ln.Addr().String(), opts)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		peer.Close()
	})
	return c, peer
}

// readCall reads a call at the server's end.
func readCall(t testing.TB, peer net.Conn) (sunrpc.CallHeader, []byte) {
	t.Helper()
	rec, err := ReadRecord(peer, nil, 1<<20)
	if err != nil {
		t.Error(err)
		return sunrpc.CallHeader{}, nil
	}
	h, args, err := sunrpc.ParseCall(rec)
	if err != nil {
		t.Error(err)
	}
	return h, args
}

func success(xid uint32, results []byte) []byte {
	return append(sunrpc.AppendAcceptedReply(nil, xid, sunrpc.Success), results...)
}

func TestCallOnTheWire(t *testing.T) {
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
				t.Errorf("%s: header %+v, arguments %q, want %q", x.name, h, args, x.want)
			}
			WriteRecord(peer, success(h.XID, []byte("result!!")))
		}()
		m := sunrpc.Message{Prog: 7, Vers: 8, Proc: 9, Cred: cred, Args: []byte(x.args), ArgData: []byte(x.data),
			ArgDataPos: x.pos, Result: make([]byte, 0, 8),
			ResultData: make([]byte, 8)}
		if err := c.Call(t.Context(), &m); err != nil || string(m.Result) != "result!!" || m.ResultDataLen != -1 {
			t.Errorf("%s: result %q, placed %d, error %v", x.name, m.Result, m.ResultDataLen, err)
		}
		<-served
	}
}

// TestConcurrentCalls answers many calls out of order; each must get its own answer.
func TestConcurrentCalls(t *testing.T) {
	const callers, rounds = 16, 50
	c, peer := connect(t, Options{})
	go func() {
		var one sync.Mutex
		for {
			rec, err := ReadRecord(peer, nil, 1<<20)
			if err != nil {
				return
			}
			h, args, _ := sunrpc.ParseCall(rec)
			go func() {
				time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
				one.Lock()
				defer one.Unlock()
				WriteRecord(peer, success(h.XID, args))
			}()
		}
	}()
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for j := range rounds {
				want := fmt.Appendf(nil, "%04d%04d", i, j)
				// sometimes too small
				m := sunrpc.Message{Cred: cred, Args: want, Result: make([]byte, 0, 4*(j%4))}
				if err := c.Call(t.Context(), &m); err != nil || !bytes.Equal(m.Result, want) {
					t.Errorf("caller %d: %q, error %v", i, m.Result, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestCanceledCall gives up one call, whose late reply must touch nothing, and makes the next.
func TestCanceledCall(t *testing.T) {
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
		t.Errorf("error is %v", err)
	}
	<-served
	go func() {
		second, _ := readCall(t, peer)
		WriteRecord(peer, success(first.XID, []byte("late")))
		WriteRecord(peer, success(second.XID, []byte("next")))
	}()
	next := sunrpc.Message{Cred: cred, Result: make([]byte, 0, 8)}
	if err := c.Call(t.Context(), &next); err != nil || string(next.Result) != "next" {
		t.Errorf("next call: %q, error %v", next.Result, err)
	}
	if len(m.Result) != 0 || c.Strays() != 1 {
		t.Errorf("the late reply left %q, %d strays", m.Result, c.Strays())
	}
	if err := c.Call(ctx, &m); !errors.Is(err, context.Canceled) {
		t.Errorf("a call under an ended context: %v", err)
	}
}

// TestErrorReplies come back as errors of their calls; the connection lives on.
func TestErrorReplies(t *testing.T) {
	c, peer := connect(t, Options{})
	for _, x := range []struct {
		name  string
		reply func(xid uint32) []byte
		is    func(error) bool
	}{
		{"denied", func(xid uint32) []byte { return sunrpc.AppendDeniedReply(nil, xid, sunrpc.AuthTooWeak) },
			func(err error) bool {
				var e *sunrpc.DeniedError
				return errors.As(err, &e) && e.Auth == sunrpc.AuthTooWeak
			}},
		{"not accepted", func(xid uint32) []byte { return sunrpc.AppendAcceptedReply(nil, xid, sunrpc.ProcUnavail) },
			func(err error) bool {
				var e *sunrpc.AcceptError
				return errors.As(err, &e) && e.Stat == sunrpc.ProcUnavail
			}},
		{"malformed", func(xid uint32) []byte { return binary.BigEndian.AppendUint32(nil, xid) },
			func(err error) bool { return errors.Is(err, sunrpc.ErrMalformed) }},
		{"good", func(xid uint32) []byte { return success(xid, nil) }, func(err error) bool { return err == nil }},
	} {
		go func() {
			h, _ := readCall(t, peer)
			WriteRecord(peer, x.reply(h.XID))
		}()
		if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !x.is(err) {
			t.Errorf("%s: error is %v", x.name, err)
		}
	}
}

// TestBadPeers end the connection and every call on it.
func TestBadPeers(t *testing.T) {
	for _, x := range []struct {
		name string
		send []byte // after the first call has come; nil: close
		want error
	}{
		{"closes", nil, io.EOF},
		{"HTTP", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), ErrRecord},
		{"more than the limit", []byte("\x80\x01\x00\x01"), ErrRecord},
		{"two octets", []byte("\x80\x00\x00\x02ab"), sunrpc.ErrMalformed},
	} {
		t.Run(x.name, func(t *testing.T) {
			c, peer := connect(t, Options{MaxRecord: 1 << 16})
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !errors.Is(err, x.want) {
						t.Errorf("error is %v, want %v", err, x.want)
					}
				})
			}
			for range 4 {
				readCall(t, peer)
			}
			if x.send == nil {
				peer.Close()
			} else if _, err := peer.Write(x.send); err != nil {
				t.Error(err)
			}
			wg.Wait()
			if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !errors.Is(err, x.want) {
				t.Errorf("a later call: error is %v, want %v", err, x.want)
			}
		})
	}
}

// TestPeerThatDoesNotRead ends a write in bounded time.
func TestPeerThatDoesNotRead(t *testing.T) {
	c, _ := connect(t, Options{WriteTimeout: 50 * time.Millisecond})
	big := make([]byte, 64<<20)
	err := c.Call(t.Context(), &sunrpc.Message{Cred: cred, Args: big})
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error is %v", err)
	}
}

// TestCloseEndsCalls closes under a call that waits.
func TestCloseEndsCalls(t *testing.T) {
	c, peer := connect(t, Options{})
	ended := make(chan error, 1)
	go func() { ended <- c.Call(context.Background(), &sunrpc.Message{Cred: cred}) }()
	readCall(t, peer)
	c.Close()
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Errorf("error is %v", err)
	}
	if err := c.Call(t.Context(), &sunrpc.Message{Cred: cred}); !errors.Is(err, ErrClosed) {
		t.Errorf("a later call: error is %v", err)
	}
}

func TestDialRefused(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close()
	if _, err := Dial(t.Context(), addr, Options{}); err == nil {
		t.Error("connected to a closed port")
	}
}

// echoServer answers each call with its arguments and allocates nothing once it runs.
func echoServer(peer net.Conn) {
	var rec, reply []byte
	var err error
	for {
		if rec, err = ReadRecord(peer, rec, 4<<20); err != nil {
			return
		}
		h, args, err := sunrpc.ParseCall(rec)
		if err != nil {
			return
		}
		reply = append(sunrpc.AppendAcceptedReply(reply[:0], h.XID, sunrpc.Success), args...)
		if WriteRecord(peer, reply) != nil {
			return
		}
	}
}

func BenchmarkCall(b *testing.B) {
	for _, size := range []int{0, 4 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c, peer := connect(b, Options{})
			go echoServer(peer)
			m := sunrpc.Message{Cred: cred, Args: make([]byte, size), Result: make([]byte, 0, size)}
			b.SetBytes(int64(2 * size))
			b.ReportAllocs()
			for b.Loop() {
				if err := c.Call(context.Background(), &m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
