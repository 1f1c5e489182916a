package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// server runs f on the first connection to a fresh port, which it closes at the end of the test: a
// peer that was given up hears of that only then.
func serveOnce(t testing.TB, f func(c *net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.AcceptTCP()
		if err != nil {
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(testTimeout))
		served := make(chan struct{})
		go func() {
			defer close(served)
			f(c)
		}()
		select {
		case <-served:
		case <-over:
			c.SetDeadline(time.Unix(1, 0))
			<-served
		}
	}()
	t.Cleanup(func() {
		l.Close()
		close(over)
		<-done
	})
	return addrPort(l.Addr())
}

// connectEndpoint connects a endpoint to addr.
func connectEndpoint(t testing.TB, ctx context.Context, cfg Config, addr netip.AddrPort, param verbs.ConnParam) (*endpoint,
	error) {
	t.Helper()
	id, err := New(cfg).Resolve(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	v := newEndpoint(t, id)
	return v, id.Connect(ctx, param)
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

func validReply() mpaFrame {
	return mpaFrame{reply: true, enhanced: true, rev: mpaRev2, ird: 4, ord: 4}
}

// readRequestFrame reads a request, whatever it is.
func readRequestFrame(c net.Conn) mpaFrame {
	f, _ := readMPAFrame(c, false)
	return f
}

// TestWrongServers: every peer that is not what it should be gives its own clear error in bounded
// time.
func TestWrongServers(t *testing.T) {
	reply := func(f mpaFrame) func(c *net.TCPConn) {
		return func(c *net.TCPConn) {
			readRequestFrame(c)
			c.Write(f.append(nil))
			io.Copy(io.Discard, c)
		}
	}
	with := func(change func(f *mpaFrame)) mpaFrame {
		f := validReply()
		change(&f)
		return f
	}
	for _, c := range []struct {
		name  string
		serve func(c *net.TCPConn)
		kind  verbs.ConnErrorKind
		phase string
		says  string
	}{
		{"HTTP server", func(c *net.TCPConn) {
			c.Read(make([]byte, 10))
			c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
		}, verbs.ConnProtocol, phaseReadReply, "HTTP"},
		{"banner without being asked", func(c *net.TCPConn) {
			c.Write([]byte("SSH-2.0-x\r\n"))
			io.Copy(io.Discard, c)
		}, verbs.ConnProtocol, phaseReadReply, "SSH"},
		{"random octets", func(c *net.TCPConn) {
			readRequestFrame(c)
			c.Write([]byte{0x9a, 0x11, 0, 1})
			io.Copy(io.Discard, c)
		}, verbs.ConnProtocol, phaseReadReply, "does not speak MPA"},
		{"closes at once", func(*net.TCPConn) {}, verbs.ConnProtocol, phaseReadReply, "closed the connection without"},
		{"closes after the request", func(c *net.TCPConn) { readRequestFrame(c) }, verbs.ConnProtocol, phaseReadReply,
			"closed the connection without"},
		// not before the request: the dial could see it
		{"resets", func(c *net.TCPConn) { c.Read(make([]byte, 1)); c.SetLinger(0) }, verbs.ConnProtocol, "", "peer"},
		{"closes in the middle", func(c *net.TCPConn) {
			readRequestFrame(c)
			r := validReply()
			c.Write(r.append(nil)[:21])
		}, verbs.ConnProtocol, phaseReadReply, "in the middle"},
		{"hangs", func(c *net.TCPConn) { io.Copy(io.Discard, c) }, verbs.ConnTimeout, phaseReadReply, "did not answer"},
		{"hangs in the middle", func(c *net.TCPConn) {
			readRequestFrame(c)
			c.Write([]byte(mpaRepKey))
			io.Copy(io.Discard, c)
		}, verbs.ConnTimeout, phaseReadReply, "did not answer"},
		{"rejects", reply(with(func(f *mpaFrame) { f.reject, f.data = true, []byte("no") })), verbs.ConnRejected,
			phaseReadReply, "rejected"},
		{"both initiators", reply(with(func(f *mpaFrame) { f.reply = false })), verbs.ConnProtocol, phaseReadReply,
			"initiator"},
		{"revision 3", reply(with(func(f *mpaFrame) { f.rev = 3 })), verbs.ConnProtocol, phaseReadReply, "revision 3"},
		{"plain reply", reply(with(func(f *mpaFrame) { f.enhanced = false })), verbs.ConnProtocol, phaseCheckReply,
			"enhanced"},
		{"markers", reply(with(func(f *mpaFrame) { f.markers = true })), verbs.ConnProtocol, phaseCheckReply,
			"markers"},
		{"private data too long", reply(with(func(f *mpaFrame) { f.data = make([]byte, 600) })), verbs.ConnProtocol,
			phaseReadReply, "604"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := defaultConfig
			cfg.ReplyTimeout = 200 * time.Millisecond
			addr := serveOnce(t, c.serve)
			v, err := connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
			var ce *verbs.ConnError
			if !errors.As(err, &ce) {
				t.Fatalf("%v, want a *verbs.ConnError", err)
			}
			t.Log(err)
			if ce.Kind != c.kind || c.phase != "" && ce.Phase != c.phase || ce.Addr != addr.String() ||
				!strings.Contains(ce.Error(), c.says) {
				t.Errorf("kind %v, phase %q, want %v, %q, and a mention of %q", ce.Kind, ce.Phase, c.kind, c.phase,
					c.says)
			}
			if c.name == "rejects" && string(ce.PrivateData) != "no" {
				t.Errorf("private data %q", ce.PrivateData)
			}
			if len(v.disconnected) != 0 {
				t.Error("OnDisconnect was called")
			}
		})
	}
}

// TestRequestOnTheWire: the octets of the request, and that they leave in one TCP segment.
func TestRequestOnTheWire(t *testing.T) {
	got := make(chan []byte, 1)
	addr := serveOnce(t, func(c *net.TCPConn) {
		b := make([]byte, 1000)
		n, _ := c.Read(b)
		got <- b[:n]
	})
	connectEndpoint(t, testContext(t), defaultConfig, addr, verbs.ConnParam{ResponderResources: 20,
		PrivateData: []byte{0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3}})
	want := append([]byte(mpaReqKey), 0x10, 2, 0, 12, 0, 32, 0, 0, 0xf6, 0xab, 0x0e, 0x18, 1, 1, 3, 3)
	if b := <-got; !bytes.Equal(b, want) {
		t.Errorf("request %x, want %x", b, want)
	}
}

// TestInsufficientIRD: a Reply whose ORD cannot be met is answered with a Terminate (RFC 6581
// §9.1).
func TestInsufficientIRD(t *testing.T) {
	got := make(chan termCode, 1)
	addr := serveOnce(t, func(c *net.TCPConn) {
		readRequestFrame(c)
		rep := validReply()
		rep.ord = 1000
		c.Write(rep.append(nil))
		code, _ := (&rawPeer{t: t, c: c}).readTerminate()
		got <- code
	})
	if _, err := connectEndpoint(t, testContext(t), defaultConfig, addr, endpointParam); err == nil {
		t.Error("connected")
	}
	if code := <-got; code != termInsufficientIRD {
		t.Errorf("Terminate %+v, want %+v", code, termInsufficientIRD)
	}
}

// TestReplyDecidesCRC: a responder may ask for CRCs that the initiator did not ask for (RFC 5044
// §7.1.1).
func TestReplyDecidesCRC(t *testing.T) {
	got := make(chan header, 1)
	addr := serveOnce(t, func(c *net.TCPConn) {
		readRequestFrame(c)
		rep := validReply()
		rep.crc = true
		c.Write(rep.append(nil))
		h, _ := (&rawPeer{t: t, c: c, crc: true}).mustNext()
		got <- h
	})
	v, err := connectEndpoint(t, testContext(t), defaultConfig, addr, endpointParam)
	if err != nil {
		t.Fatal(err)
	}
	v.run(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: []byte("abc")}}})
	if h := <-got; h.op != opSend {
		t.Errorf("got %+v", h)
	}
}

// TestGivenUpBeforeRequest: the same when the context ends before the TCP connection is used.
func TestGivenUpBeforeRequest(t *testing.T) {
	got := make(chan mpaFrame, 1)
	addr := serveOnce(t, func(c *net.TCPConn) { got <- readRequestFrame(c) })
	ctx, cancel := context.WithCancel(context.Background())
	id, err := New(defaultConfig).Resolve(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	newEndpoint(t, id)
	cancel()
	if err := id.Connect(ctx, endpointParam); err == nil {
		t.Error("connected with a cancelled context")
	}
	select {
	case f := <-got: // a connection, if there was one, carried the request
		if f.rev != mpaRev2 {
			t.Errorf("request %+v", f)
		}
	case <-time.After(100 * time.Millisecond): // or there was none
	}
}

// unresponsivePort is a port whose SYNs go unanswered: its accept queue is full.
func unresponsivePort(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(loopback.Addr(), uint16(sa.(*unix.SockaddrInet4).Port))
	for range 8 {
		c, err := net.DialTimeout("tcp", addr.String(), 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the kernel accepts however many connections wait")
	return addr
}

func TestConnectHangs(t *testing.T) {
	addr := unresponsivePort(t)
	cfg := defaultConfig
	cfg.ConnectTimeout = 100 * time.Millisecond
	_, err := connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
	var ce *verbs.ConnError
	if !errors.As(err, &ce) || ce.Kind != verbs.ConnTimeout || ce.Phase != phaseConnect {
		t.Errorf("no answer to the SYN: %v", err)
	}
	// Giving up in the middle of it frees the turn for the next at once.
	cfg.ConnectTimeout = 10 * time.Minute
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		if _, err := connectEndpoint(t, ctx, cfg, addr, endpointParam); !errors.As(err, &ce) || ce.Kind != verbs.ConnTimeout {
			t.Errorf("deadline: %v", err)
		}
		cancel()
	}
}

// TestOneConnectAtATime: connects to one address wait for each other.
func TestOneConnectAtATime(t *testing.T) {
	const n = 6
	l, err := net.Listen("tcp", loopback.String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var inside, most atomic.Int32
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				most.Store(max(most.Load(), inside.Add(1)))
				readRequestFrame(c)
				time.Sleep(5 * time.Millisecond)
				inside.Add(-1)
				rep := validReply()
				c.Write(rep.append(nil))
				io.Copy(io.Discard, c)
			}()
		}
	}()
	var wg sync.WaitGroup
	for range n {
		id, err := New(defaultConfig).Resolve(testContext(t), addrPort(l.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		newEndpoint(t, id)
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := id.Connect(testContext(t), endpointParam); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if m := most.Load(); m != 1 {
		t.Errorf("%d connects were under way at once", m)
	}
	connects.mu.Lock()
	defer connects.mu.Unlock()
	if len(connects.addrs) != 0 {
		t.Errorf("%d turnstiles are left", len(connects.addrs))
	}
}

// accepting runs a listener that accepts everything, and hands its endpoints out.
func accepting(t *testing.T, cfg Config) (netip.AddrPort, chan *endpoint) {
	t.Helper()
	l, err := New(cfg).Listen(testContext(t), loopback)
	if err != nil {
		t.Fatal(err)
	}
	endpoints := make(chan *endpoint, 10)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			v := newEndpoint(t, r)
			if err := r.Accept(context.Background(), endpointParam); err != nil {
				t.Logf("accept: %v", err)
			}
			endpoints <- v
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-ended
	})
	return l.Addr(), endpoints
}

// TestWrongClients: what is not an MPA Request is closed without an answer, and the listener lives.
func TestWrongClients(t *testing.T) {
	addr, endpoints := accepting(t, Config{RequestTimeout: 150 * time.Millisecond})
	frame := func(f mpaFrame) []byte { return f.append(nil) }
	for _, c := range []struct {
		name string
		b    []byte
	}{
		{"HTTP", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")},
		{"reply", frame(validReply())},
		{"revision 0", frame(mpaFrame{crc: true})},
		{"revision 3", frame(mpaFrame{rev: 3})},
		{"too much private data", frame(mpaFrame{rev: 1, data: make([]byte, 513)})},
		{"no enhanced block", append([]byte(mpaReqKey), mpaEnhanced, 2, 0, 2, 0, 0)},
		{"silence", nil},
		{"half a request", []byte(mpaReqKey)},
		{"private data missing", frame(mpaFrame{rev: 1, data: []byte("abcd")})[:22]},
	} {
		conn, err := net.Dial("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(c.b)
		conn.SetReadDeadline(time.Now().Add(testTimeout))
		if n, err := conn.Read(make([]byte, 100)); n != 0 {
			t.Errorf("%s: was answered with %d octets", c.name, n)
		} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
			t.Errorf("%s: was not closed", c.name)
		}
		conn.Close()
	}
	if _, err := connectEndpoint(t, testContext(t), defaultConfig, addr, endpointParam); err != nil {
		t.Errorf("after all that: %v", err)
	}
	<-endpoints
	if len(endpoints) != 0 {
		t.Error("a wrong client was accepted")
	}
}

// TestReplies: the form of the Reply follows that of the Request.
func TestReplies(t *testing.T) {
	addr, endpoints := accepting(t, defaultConfig)
	for _, c := range []struct {
		name string
		req  mpaFrame
		want mpaFrame
	}{
		{"plain, revision 1", mpaFrame{rev: 1}, mpaFrame{reply: true, rev: 1}},
		{"plain, CRC", mpaFrame{rev: 1, crc: true}, mpaFrame{reply: true, rev: 1, crc: true}},
		{"enhanced", mpaFrame{rev: 2, enhanced: true, ird: 2, ord: 30}, mpaFrame{reply: true, rev: 2, enhanced: true,
			ird: 32, ord: 2}},
		{"depths left to the ULP", mpaFrame{rev: 2, enhanced: true, ird: depthByULP, ord: depthByULP},
			mpaFrame{reply: true, rev: 2, enhanced: true, ird: depthByULP, ord: depthByULP}},
		{"markers", mpaFrame{rev: 2, enhanced: true, markers: true}, mpaFrame{reply: true, rev: 2, enhanced: true,
			reject: true}},
		{"RTR: all", mpaFrame{rev: 2, enhanced: true, peer: true, rtrSend: true, rtrWrite: true, rtrRead: true,
			ird: 1, ord: 1}, mpaFrame{reply: true, rev: 2, enhanced: true, peer: true, rtrWrite: true, ird: 4, ord: 1}},
		{"RTR: Read", mpaFrame{rev: 2, enhanced: true, peer: true, rtrSend: true, rtrRead: true},
			mpaFrame{reply: true, rev: 2, enhanced: true, peer: true, rtrRead: true, ird: 4}},
		{"RTR: Send", mpaFrame{rev: 2, enhanced: true, peer: true, rtrSend: true},
			mpaFrame{reply: true, rev: 2, enhanced: true, peer: true, rtrSend: true, ird: 4}},
		{"RTR: none", mpaFrame{rev: 2, enhanced: true, peer: true}, mpaFrame{reply: true, rev: 2, enhanced: true,
			peer: true, rtrWrite: true, ird: 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := net.Dial("tcp", addr.String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(testTimeout))
			conn.Write(c.req.append(nil))
			got, err := readMPAFrame(conn, true)
			if err != nil {
				t.Fatal(err)
			}
			if !sameFrame(got, c.want) {
				t.Errorf("reply %+v, want %+v", got, c.want)
			}
			if got.reject {
				return
			}
			v := <-endpoints
			p := &rawPeer{t: t, c: conn.(*net.TCPConn), crc: got.crc}
			msn := uint32(1)
			switch {
			case got.rtrSend: // takes no Receive
				p.send(untagged(opSend, true, 0, qnSend, 1, 0, nil))
				msn++
			case got.rtrRead:
				p.send(readReq(readRequest{msn: 1, sinkSTag: 1}))
				if h, _ := p.mustNext(); h.op != opReadResp {
					t.Errorf("answer to the RTR: %+v", h)
				}
			case got.rtrWrite:
				p.send(tagged(opWrite, true, 1, 0, nil))
			}
			p.send(untagged(opSend, true, 0, qnSend, msn, 0, []byte("x")))
			if wc := v.received(); wc.Status != verbs.StatusSuccess || wc.ByteLen != 1 {
				t.Errorf("first Receive: %+v", wc)
			}
		})
	}
}

// TestSlowRequest: a request may come octet by octet.
func TestSlowRequest(t *testing.T) {
	addr, endpoints := accepting(t, defaultConfig)
	conn, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, b := range (&mpaFrame{rev: 2, enhanced: true, ird: 1, data: []byte("private")}).append(nil) {
		conn.Write([]byte{b})
	}
	if rep, err := readMPAFrame(conn, true); err != nil || rep.reject {
		t.Errorf("reply %+v, %v", rep, err)
	}
	if v := <-endpoints; string(v.id.Peer().PrivateData) != "private" {
		t.Errorf("peer %+v", v.id.Peer())
	}
}
