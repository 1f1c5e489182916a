package softiwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serveOnce runs f on the first connection to a new port. At the end of the test the reads of f
// fail, because a client whose connect was canceled sends no FIN (dial.go).
func serveOnce(t testing.TB, f func(c *net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(loopback))
	kit.Must(t, err)
	testDone, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.AcceptTCP()
		if err != nil {
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(kit.Timeout))
		served := make(chan struct{})
		go func() {
			defer close(served)
			f(c)
		}()
		select {
		case <-served:
		case <-testDone:
			c.SetDeadline(time.Unix(1, 0))
			<-served
		}
	}()
	t.Cleanup(func() {
		l.Close()
		close(testDone)
		<-done
	})
	return addrPort(l.Addr())
}

// connectEndpoint makes an endpoint and connects it to addr.
func connectEndpoint(t testing.TB, ctx context.Context, cfg Config, addr netip.AddrPort,
	param verbs.ConnParam) (*endpoint,
	error) {
	t.Helper()
	id, err := New(cfg).Resolve(ctx, addr)
	kit.Must(t, err)
	v := newEndpoint(t, id)
	return v, id.Connect(ctx, param)
}

// testContext returns a context that ends after kit.Timeout or with the test.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	t.Cleanup(cancel)
	return ctx
}

// validReply returns an accepting Reply.
func validReply() mpaFrame {
	return mpaFrame{reply: true, enhanced: true, rev: mpaRev2, ird: 4, ord: 4}
}

// readRequestFrame reads a Request and ignores errors.
func readRequestFrame(c net.Conn) mpaFrame {
	f, _ := readMPAFrame(c, false)
	return f
}

// enhanced returns a Request of revision 2 with these depths.
func enhanced(ird, ord uint16) mpaFrame { return mpaFrame{rev: 2, enhanced: true, ird: ird, ord: ord} }

// peerToPeer returns a Request for the peer-to-peer mode. The letters of rtr are the RTR messages
// that it offers: S for Send, W for RDMA Write, R for RDMA Read.
func peerToPeer(rtr string, ird, ord uint16) mpaFrame {
	f := enhanced(ird, ord)
	f.peer = true
	f.rtrSend = strings.Contains(rtr, "S")
	f.rtrWrite = strings.Contains(rtr, "W")
	f.rtrRead = strings.Contains(rtr, "R")
	return f
}

// replyWith returns a server that answers a Request with a valid Reply after change.
func replyWith(change func(f *mpaFrame)) func(c *net.TCPConn) {
	f := validReply()
	change(&f)
	return func(c *net.TCPConn) {
		readRequestFrame(c)
		c.Write(f.append(nil))
		io.Copy(io.Discard, c)
	}
}

func answerHTTP(c *net.TCPConn) {
	c.Read(make([]byte, 10))
	io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
}

func closeAfterRequest(c *net.TCPConn) { readRequestFrame(c) }

func closeInReply(c *net.TCPConn) {
	readRequestFrame(c)
	r := validReply()
	c.Write(r.append(nil)[:21])
}

// resetConnection reads first, because dial could otherwise return the error.
func resetConnection(c *net.TCPConn) {
	c.Read(make([]byte, 1))
	c.SetLinger(0)
}

// A connFailure is the kind and the phase of a ConnError. An empty phase stands for any phase.
type connFailure struct {
	kind  verbs.ConnErrorKind
	phase string
}

var (
	connLost       = connFailure{verbs.ConnProtocol, ""}
	noReply        = connFailure{verbs.ConnTimeout, phaseReadReply}
	malformedReply = connFailure{verbs.ConnProtocol, phaseReadReply}
	unusableReply  = connFailure{verbs.ConnProtocol, phaseCheckReply}
	rejectingReply = connFailure{verbs.ConnRejected, phaseReadReply}
)

// wrongServers are servers that do not follow the protocol, with the error of a connect.
var wrongServers = []struct {
	name  string
	serve func(c *net.TCPConn)
	fail  connFailure
	want  string // in the error text
}{
	{"HTTP server", answerHTTP, malformedReply, "HTTP"},
	{"closes after the request", closeAfterRequest, malformedReply, "closed the connection without"},
	{"resets", resetConnection, connLost, "peer"},
	{"closes inside the reply", closeInReply, malformedReply, "in the middle"},
	{"does not reply", func(c *net.TCPConn) { io.Copy(io.Discard, c) }, noReply, "did not answer"},
	{"rejects", replyWith(func(f *mpaFrame) { f.reject, f.data = true, []byte("no") }), rejectingReply, "rejected"},
	{"plain reply", replyWith(func(f *mpaFrame) { f.enhanced = false }), unusableReply, "enhanced"},
	{"markers", replyWith(func(f *mpaFrame) { f.markers = true }), unusableReply, "markers"},
}

// TestConnectToWrongServerFails checks that a connect to each of wrongServers fails within the
// timeouts.
func TestConnectToWrongServerFails(t *testing.T) {
	for _, c := range wrongServers {
		t.Run(c.name, func(t *testing.T) {
			cfg := defaultConfig
			if c.fail.kind == verbs.ConnTimeout {
				cfg.ReplyTimeout = 50 * time.Millisecond
			}
			addr := serveOnce(t, c.serve)
			v, err := connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
			var ce *verbs.ConnError
			if !errors.As(err, &ce) {
				t.Fatalf("error: got %v, want a *verbs.ConnError", err)
			}
			t.Log(err)
			if ce.Kind != c.fail.kind || c.fail.phase != "" && ce.Phase != c.fail.phase || ce.Addr != addr.String() ||
				!strings.Contains(ce.Error(), c.want) {
				t.Errorf("error %q: got kind %v, phase %q, want %v, %q and the text %q", ce, ce.Kind, ce.Phase,
					c.fail.kind, c.fail.phase, c.want)
			}
			if c.name == "rejects" && string(ce.PrivateData) != "no" {
				t.Errorf("private data: got %q, want %q", ce.PrivateData, "no")
			}
			if len(v.disconnected) != 0 {
				t.Error("OnDisconnect was called")
			}
		})
	}
}

// TestRequestIsOneSegment checks the bytes of the Request, and that one read(2) returns all of
// them.
func TestRequestIsOneSegment(t *testing.T) {
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
		t.Errorf("request: got %x, want %x", b, want)
	}
}

// TestTooLargeORDTerminates sends a Reply whose ORD is above the limit. The answer is a Terminate
// (RFC 6581 §9.1).
func TestTooLargeORDTerminates(t *testing.T) {
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
		t.Error("Connect: got nil, want an error")
	}
	if code := <-got; code != termInsufficientIRD {
		t.Errorf("Terminate: got %+v, want %+v", code, termInsufficientIRD)
	}
}

// TestReplyEnablesCRC checks that a responder can enable CRCs that the initiator did not request
// (RFC 5044 §7.1.1).
func TestReplyEnablesCRC(t *testing.T) {
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
	kit.Must(t, err)
	v.run(&verbs.WorkRequest{Opcode: verbs.OpSend, SGList: []verbs.SGE{{Buf: []byte("abc")}}})
	if h := <-got; h.op != opSend {
		t.Errorf("first FPDU: got %+v, want a Send", h)
	}
}

// unresponsivePort returns a port that does not answer SYNs, because its accept queue is full.
func unresponsivePort(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	kit.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	kit.Must(t, unix.Listen(fd, 0))
	sa, err := unix.Getsockname(fd)
	kit.Must(t, err)
	addr := netip.AddrPortFrom(loopback.Addr(), uint16(sa.(*unix.SockaddrInet4).Port))
	c, err := net.Dial("tcp", addr.String())
	kit.Must(t, err)
	t.Cleanup(func() { c.Close() })
	kit.Eventually(t, "full accept queue", func() bool {
		// Of a listening socket: the length of the accept queue, and its limit.
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		kit.Must(t, err)
		return info.Unacked > info.Sacked
	})
	return addr
}

// TestSourcePort checks that connections of root have reserved source ports, unless the
// configuration does not ask for one. Connections to other addresses can have the same port, as
// there are few.
func TestSourcePort(t *testing.T) {
	kit.NeedsRoot(t)
	for _, any := range []bool{false, true} {
		ports := make(chan int, 1)
		addr := serveOnce(t, func(c *net.TCPConn) {
			ports <- c.RemoteAddr().(*net.TCPAddr).Port
			replyWith(func(*mpaFrame) {})(c)
		})
		cfg := defaultConfig
		cfg.AnySourcePort = any
		_, err := connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
		kit.Must(t, err)
		port := <-ports
		if (port >= resvport.Limit) != any {
			t.Errorf("any source port %v: got port %d", any, port)
		}
		if !any {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			kit.Must(t, err)
			kit.Must(t, bindSource(fd, port, unix.AF_INET))
			kit.Must(t, unix.Close(fd))
		}
	}
}

func TestConnectTimesOut(t *testing.T) {
	addr := unresponsivePort(t)
	cfg := defaultConfig
	cfg.ConnectTimeout = 100 * time.Millisecond
	_, err := connectEndpoint(t, testContext(t), cfg, addr, endpointParam)
	var ce *verbs.ConnError
	if !errors.As(err, &ce) || ce.Kind != verbs.ConnTimeout || ce.Phase != phaseConnect {
		t.Errorf("connect without an answer to the SYN: got %v, want a timeout in phase connect", err)
	}
	// A canceled connect does not delay the next one.
	cfg.ConnectTimeout = 10 * time.Minute
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if _, err := connectEndpoint(t, ctx, cfg, addr, endpointParam); !errors.As(err, &ce) ||
			ce.Kind != verbs.ConnTimeout {
			t.Errorf("connect with a deadline: got %v, want a timeout", err)
		}
		cancel()
	}
}

// TestConnectsToOneAddressRunInTurn checks that one connect to an address waits for the other.
func TestConnectsToOneAddressRunInTurn(t *testing.T) {
	const n = 3
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(loopback))
	kit.Must(t, err)
	defer l.Close()
	addr := addrPort(l.Addr())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if _, err := connectEndpoint(t, testContext(t), defaultConfig, addr, endpointParam); err != nil {
				t.Error(err)
			}
		})
	}
	connecting := func() int {
		connects.mu.Lock()
		defer connects.mu.Unlock()
		if g := connects.addrs[addr]; g != nil {
			return g.refs
		}
		return 0
	}
	for left := n; left > 0; left-- {
		c, err := l.AcceptTCP()
		kit.Must(t, err)
		defer c.Close()
		readRequestFrame(c)
		kit.Eventually(t, "waiting connects", func() bool { return connecting() == left })
		l.SetDeadline(time.Unix(1, 0))
		if _, err := l.Accept(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("Accept before the reply: got %v, want no connection", err)
		}
		l.SetDeadline(time.Time{})
		rep := validReply()
		c.Write(rep.append(nil))
	}
	wg.Wait()
	// The goroutine that connects leaves the limiter after it has reported the connection.
	kit.Eventually(t, "an empty connect limiter", func() bool { return connecting() == 0 })
}

// acceptAll runs a listener that accepts every request, and returns its address and its endpoints.
func acceptAll(t testing.TB, cfg Config) (netip.AddrPort, chan *endpoint) {
	t.Helper()
	l, err := New(cfg).Listen(testContext(t), loopback)
	kit.Must(t, err)
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
				t.Logf("Accept: %v", err)
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

// TestInvalidRequestsAreClosed sends data that is not an MPA Request. The listener must close the
// connection without an answer, and continue to accept others.
func TestInvalidRequestsAreClosed(t *testing.T) {
	addr, endpoints := acceptAll(t, defaultConfig)
	hasty, _ := acceptAll(t, Config{RequestTimeout: 50 * time.Millisecond})
	for _, c := range []struct {
		name string
		to   netip.AddrPort
		b    string
	}{
		{"HTTP", addr, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
		{"reply", addr, mpaRepKey + "\x10\x02\x00\x04\x00\x00\x00\x00"},
		{"silence", hasty, ""},
		{"half a request", hasty, mpaReqKey},
		{"private data missing", hasty, mpaReqKey + "\x00\x01\x00\x04ab"},
	} {
		conn, err := net.Dial("tcp", c.to.String())
		kit.Must(t, err)
		io.WriteString(conn, c.b)
		conn.SetReadDeadline(time.Now().Add(kit.Timeout))
		n, err := conn.Read(make([]byte, 100))
		if n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: got an answer of %d bytes and %v, want a closed connection", c.name, n, err)
		}
		conn.Close()
	}
	if _, err := connectEndpoint(t, testContext(t), defaultConfig, addr, endpointParam); err != nil {
		t.Errorf("connect after the invalid requests: %v", err)
	}
	<-endpoints
	if len(endpoints) != 0 {
		t.Error("an invalid request was accepted")
	}
}

// TestReplyHasFormOfRequest sends Requests of every form and checks the Reply.
func TestReplyHasFormOfRequest(t *testing.T) {
	addr, endpoints := acceptAll(t, defaultConfig)
	for _, c := range []struct {
		name string
		req  mpaFrame
		want mpaFrame // without the reply bit
	}{
		{"plain, revision 1", mpaFrame{rev: 1}, mpaFrame{rev: 1}},
		{"plain, CRC", mpaFrame{rev: 1, crc: true}, mpaFrame{rev: 1, crc: true}},
		{"enhanced", enhanced(2, 30), enhanced(32, 2)},
		{"depths left to the ULP", enhanced(depthByULP, depthByULP), enhanced(depthByULP, depthByULP)},
		{"markers", mpaFrame{rev: 2, enhanced: true, markers: true}, mpaFrame{rev: 2, enhanced: true, reject: true}},
		{"RTR: all", peerToPeer("SWR", 1, 1), peerToPeer("W", 4, 1)},
		{"RTR: Read", peerToPeer("SR", 0, 0), peerToPeer("R", 4, 0)},
		{"RTR: Send", peerToPeer("S", 0, 0), peerToPeer("S", 4, 0)},
		{"RTR: none", peerToPeer("", 0, 0), peerToPeer("W", 4, 0)},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := net.Dial("tcp", addr.String())
			kit.Must(t, err)
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(kit.Timeout))
			conn.Write(c.req.append(nil))
			got, err := readMPAFrame(conn, true)
			kit.Must(t, err)
			c.want.reply = true
			if !sameFrame(got, c.want) {
				t.Errorf("reply: got %+v, want %+v", got, c.want)
			}
			if got.reject {
				return
			}
			v := <-endpoints
			p := &rawPeer{t: t, c: conn.(*net.TCPConn), crc: got.crc}
			msn := uint32(1)
			switch {
			case got.rtrSend: // consumes no Receive
				p.send(untagged(opSend, true, 0, qnSend, 1, 0, nil))
				msn++
			case got.rtrRead:
				p.send(readReq(readRequest{msn: 1, sinkSTag: 1}))
				if h, _ := p.mustNext(); h.op != opReadResp {
					t.Errorf("answer to the RTR Read: got %+v, want a Read Response", h)
				}
			case got.rtrWrite:
				p.send(tagged(opWrite, true, 1, 0, nil))
			}
			p.send(untagged(opSend, true, 0, qnSend, msn, 0, []byte("x")))
			if wc := v.received(); wc.Status != verbs.StatusSuccess || wc.ByteLen != 1 {
				t.Errorf("first Receive: got %+v, want 1 byte", wc)
			}
		})
	}
}
