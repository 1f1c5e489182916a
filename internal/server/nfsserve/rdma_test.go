package nfsserve

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// dialRDMA returns a client whose NFS calls go over RDMA, after a MOUNT over TCP to mountAddr.
func dialRDMA(t testing.TB, s *Server, mountAddr string) *client {
	t.Helper()
	c := dial(t, mountAddr)
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: s.RDMAAddr, Slots: 16,
		ReconnectMin: 10 * time.Millisecond, ReconnectMax: 100 * time.Millisecond})
	c.OK(err)
	t.Cleanup(func() { x.Close() })
	c.OK(x.Connect(c.Ctx))
	c.Client.Client = nfs3.NewClient(x)
	return c
}

// exercise moves data in every form that the transport knows and compares it.
func exercise(t *testing.T, c *client) {
	t.Helper()
	var cr nfs3.CreateResult
	var w nfs3.WriteResult
	var r nfs3.ReadResult
	c.OK(c.Create(c.Ctx, c.Cred, c.Root, "data", &nfs3.CreateHow{}, &cr))
	fh := cr.FH
	for _, n := range []int{1, 2, 3, 4, 1000, 4095, 4096, 4097, 70001, 1 << 20} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(i*31 + n)
		}
		c.OK(c.Write(c.Ctx, c.Cred, fh, 0, data, nfs3.Unstable, &w))
		buf := make([]byte, n)
		c.OK(c.Read(c.Ctx, c.Cred, fh, 0, buf, &r))
		if w.Count != uint32(n) || r.N != n || !bytes.Equal(buf, data) {
			t.Fatalf("%d bytes: wrote %d, read %d, equal %v", n, w.Count, r.N, bytes.Equal(buf, data))
		}
	}
	target := string(bytes.Repeat([]byte("0123456/"), 300)) // READLINK's and SYMLINK's long form
	c.OK(c.Symlink(c.Ctx, c.Cred, c.Root, "link", target, &nfs3.SetAttr{}, &cr))
	buf := make([]byte, nfs3.MaxPath)
	var rl nfs3.ReadLinkResult
	c.OK(c.ReadLink(c.Ctx, c.Cred, cr.FH, buf, &rl))
	if string(buf[:rl.N]) != target {
		t.Errorf("READLINK: %d bytes", rl.N)
	}
	const files = 500
	for i := range files {
		c.OK(c.Create(c.Ctx, c.Cred, c.Root, fmt.Sprintf("file-%03d", i), &nfs3.CreateHow{}, &cr))
	}
	seen := 0
	var res nfs3.ReadDirResult
	var cookie uint64
	for !res.EOF {
		verf := res.Verf
		c.OK(c.ReadDirPlus(c.Ctx, c.Cred, c.Root, cookie, verf, 65536, 65536, &res, func(e *nfs3.DirEntry) bool {
			seen++
			cookie = e.Cookie
			return true
		}))
	}
	if seen != files+4 {
		t.Errorf("READDIRPLUS: %d entries", seen)
	}
}

func TestDirectoryOverRDMA(t *testing.T) {
	var stats svcrdma.Stats
	s, _ := start(t, func(c *Config) { c.RDMA.Stats = &stats })
	exercise(t, dialRDMA(t, s, s.TCPAddr))
	if stats.ReadBytes.Load() < 1<<20 || stats.WrittenBytes.Load() < 1<<20 || stats.ReplyChunks.Load() == 0 ||
		stats.RemoteInvalidates.Load() == 0 || stats.RDMAErrors.Load() != 0 {
		t.Errorf("read %d bytes, wrote %d, %d reply chunks, %d remote invalidations, %d RDMA_ERRORs",
			stats.ReadBytes.Load(), stats.WrittenBytes.Load(),
			stats.ReplyChunks.Load(), stats.RemoteInvalidates.Load(), stats.RDMAErrors.Load())
	}
}

// The RDMA port works while the TCP port has as many connections as it accepts.
func TestRDMAPortDoesNotNeedTCPPort(t *testing.T) {
	s, _ := start(t, nil)
	c := dialRDMA(t, s, s.TCPAddr)
	for range maxTCPConns {
		idle, err := net.Dial("tcp", s.TCPAddr)
		kit.Must(t, err)
		defer idle.Close()
	}
	var a nfs3.Attr
	c.OK(c.GetAttr(c.Ctx, c.Cred, c.Root, &a))
}

func TestBackendOverRDMA(t *testing.T) {
	dir, _ := start(t, nil)
	front, err := Run(context.Background(), Config{Backend: dir.TCPAddr, RDMAListen: "127.0.0.1:0",
		Provider: softiwarp.New(softiwarp.Config{})})
	kit.Must(t, err)
	t.Cleanup(func() { front.Close() })
	exercise(t, dialRDMA(t, front, dir.TCPAddr))
}

// The proxy logs no error when a client leaves while the proxy connects to the backend.
func TestProxyClientGone(t *testing.T) {
	b := newScripted(t)
	var log bytes.Buffer
	p := newProxy(b.Addr().String(), false, hclog.New(&hclog.LoggerOptions{Output: &log}))
	peer := netip.MustParseAddrPort("127.0.0.1:700")
	defer p.ConnClosed(peer)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	call := sunrpc.AppendCall(nil, 1, nfs3.Program, 3, 1, sunrpc.AppendAuthNone(nil))
	if _, err := p.ServeRPC(gone, peer, call, nil); err == nil {
		t.Error("answered")
	}
	if log.Len() > 0 {
		t.Errorf("log: %s", &log)
	}
}

// A scripted is a backend whose replies the test writes.
type scripted struct {
	net.Listener
	calls chan scriptedCall
	wg    sync.WaitGroup
}

type scriptedCall struct {
	conn net.Conn
	msg  []byte
}

func newScripted(t *testing.T) *scripted {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	kit.Must(t, err)
	s := &scripted{Listener: l, calls: make(chan scriptedCall, 64)}
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.wg.Go(func() {
				defer c.Close()
				for {
					msg, err := rpctcp.ReadRecord(c, nil, maxRecord)
					if err != nil {
						return
					}
					s.calls <- scriptedCall{c, msg}
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); s.wg.Wait() })
	return s
}

func (c *scriptedCall) answer(t *testing.T, body string) {
	t.Helper()
	xid := binary.BigEndian.Uint32(c.msg)
	if err := rpctcp.WriteRecord(c.conn, sunrpc.AppendAcceptedReply(nil, xid, 0), []byte(body)); err != nil {
		t.Error(err)
	}
}

func TestProxy(t *testing.T) {
	b := newScripted(t)
	p := newProxy(b.Addr().String(), false, hclog.NewNullLogger())
	peer := netip.MustParseAddrPort("127.0.0.1:700")
	defer p.ConnClosed(peer)
	type outcome struct {
		reply []byte
		err   error
	}
	send := func(ctx context.Context, xid uint32) chan outcome {
		done := make(chan outcome, 1)
		go func() {
			reply, err := p.ServeRPC(ctx, peer, sunrpc.AppendCall(nil, xid, nfs3.Program, 3, 1,
				sunrpc.AppendAuthNone(nil)), make([]byte, 0, 4096))
			done <- outcome{reply, err}
		}()
		return done
	}
	ctx := context.Background()
	outcomes := map[uint32]chan outcome{}
	for xid := uint32(1); xid <= 8; xid++ {
		outcomes[xid] = send(ctx, xid)
	}
	var calls []scriptedCall
	for range 8 {
		calls = append(calls, <-b.calls)
	}
	for i := len(calls) - 1; i >= 0; i-- { // answered in another order, each with its own XID
		calls[i].answer(t, fmt.Sprintf("%04d", binary.BigEndian.Uint32(calls[i].msg)))
	}
	for xid, done := range outcomes {
		if o := <-done; o.err != nil || binary.BigEndian.Uint32(o.reply) != xid ||
			!bytes.HasSuffix(o.reply, fmt.Appendf(nil, "%04d", xid)) {
			t.Errorf("call %d: %x %v", xid, o.reply, o.err)
		}
	}

	// The late reply of a canceled call is discarded, and the connection stays.
	canceled, cancel := context.WithCancel(ctx)
	done := send(canceled, 20)
	late := <-b.calls
	cancel()
	if o := <-done; !errors.Is(o.err, context.Canceled) {
		t.Errorf("canceled call: %v", o.err)
	}
	late.answer(t, "late")
	for xid := uint32(21); xid <= 22; xid++ { // one on each connection
		done = send(ctx, xid)
		next := <-b.calls
		next.answer(t, "next")
		if o := <-done; o.err != nil || binary.BigEndian.Uint32(o.reply) != xid {
			t.Errorf("call after it: %x %v", o.reply, o.err)
		}
	}

	// A reply that is too long ends its call with an error that the client does not retry. The
	// connection stays.
	done = send(ctx, 25)
	long := <-b.calls
	other := send(ctx, 26)
	short := <-b.calls
	third := send(ctx, 27) // on the connection of the first
	behind := <-b.calls
	long.answer(t, strings.Repeat("x", maxRecord))
	behind.answer(t, "well")
	short.answer(t, "well")
	if o := <-done; !errors.Is(o.err, svcrdma.ErrReplySize) || o.reply != nil {
		t.Errorf("long reply: %d bytes, %v", len(o.reply), o.err)
	}
	for _, done := range []chan outcome{other, third} {
		if o := <-done; o.err != nil || !bytes.HasSuffix(o.reply, []byte("well")) {
			t.Errorf("beside a long reply: %x %v", o.reply, o.err)
		}
	}
	if behind.conn != long.conn {
		t.Error("the third call took another connection: nothing is shown")
	}

	// Replies may be cut into fragments anywhere (RFC 5531 §11), even in the XID.
	for _, at := range []int{1, 3, 4, 9} {
		done = send(ctx, 28)
		call := <-b.calls
		reply := append(sunrpc.AppendAcceptedReply(nil, 28, 0), "cut"...)
		var first, rest [rpctcp.MarkSize]byte
		binary.BigEndian.PutUint32(first[:], uint32(at))
		rpctcp.PutMark(rest[:], len(reply)-at)
		if _, err := call.conn.Write(slices.Concat(first[:], reply[:at], rest[:], reply[at:])); err != nil {
			t.Error(err)
		}
		if o := <-done; o.err != nil || !bytes.Equal(o.reply, reply) {
			t.Errorf("cut after %d bytes: %q %v", at, o.reply, o.err)
		}
	}

	// When the backend closes the connection, the call fails and the next call makes a new one.
	done = send(ctx, 30)
	call := <-b.calls
	call.conn.Close()
	var be *BackendError
	if o := <-done; !errors.As(o.err, &be) || o.reply != nil {
		t.Errorf("backend died: %x %v", o.reply, o.err)
	}
	for xid := uint32(31); xid <= 32; xid++ {
		done = send(ctx, xid)
		call = <-b.calls
		call.answer(t, "back")
		if o := <-done; o.err != nil {
			t.Errorf("after reconnecting: %v", o.err)
		}
	}
}

// The relay refuses calls from an unprivileged source port, unless Config.Insecure is set. Its own
// source port is reserved only if that of the client is.
func TestProxySourcePort(t *testing.T) {
	kit.NeedsRoot(t)
	for _, tt := range []struct {
		peer     string
		insecure bool
		relayed  bool
		reserved bool
	}{
		{"127.0.0.1:1024", false, false, false},
		{"127.0.0.1:1023", false, true, true},
		{"127.0.0.1:1024", true, true, false},
		{"127.0.0.1:1023", true, true, true},
	} {
		b := newScripted(t)
		p := newProxy(b.Addr().String(), tt.insecure, hclog.NewNullLogger())
		peer := netip.MustParseAddrPort(tt.peer)
		replies := make(chan []byte, 1)
		go func() {
			defer close(replies)
			reply, err := p.ServeRPC(t.Context(), peer, sunrpc.AppendCall(nil, 1, nfs3.Program, 3, 1,
				sunrpc.AppendAuthNone(nil)), nil)
			if err != nil {
				t.Error(err)
			}
			replies <- reply
		}()
		if tt.relayed {
			call := <-b.calls
			port := call.conn.RemoteAddr().(*net.TCPAddr).Port
			if (port < resvport.Limit) != tt.reserved {
				t.Errorf("%+v: got source port %d", tt, port)
			}
			call.answer(t, "done")
		}
		_, _, err := sunrpc.ParseReply(<-replies)
		var denied *sunrpc.DeniedError
		if errors.As(err, &denied) == tt.relayed {
			t.Errorf("%+v: got %v", tt, err)
		}
		p.ConnClosed(peer)
	}
}

// A backend that stops within a reply delays neither the end of the call nor the end of the
// client's connection.
func TestProxyPartOfReply(t *testing.T) {
	b := newScripted(t)
	p := newProxy(b.Addr().String(), false, hclog.NewNullLogger())
	peer := netip.MustParseAddrPort("127.0.0.1:700")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := p.ServeRPC(ctx, peer, sunrpc.AppendCall(nil, 1, nfs3.Program, 3, 1, sunrpc.AppendAuthNone(nil)),
			make([]byte, 0, 4096))
		done <- err
	}()
	call := <-b.calls
	part := make([]byte, rpctcp.MarkSize)
	rpctcp.PutMark(part, 1000)
	if _, err := call.conn.Write(append(part, call.msg[:8]...)); err != nil {
		t.Error(err)
	}
	// time for the reader to get it; without it, the call ends in the usual way
	time.Sleep(50 * time.Millisecond)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	p.ConnClosed(peer)
}

func TestProxyWithoutBackend(t *testing.T) {
	p := newProxy(kit.ClosedPort(t).String(), false, hclog.NewNullLogger())
	peer := netip.MustParseAddrPort("127.0.0.1:700")
	defer p.ConnClosed(peer)
	_, err := p.ServeRPC(context.Background(), peer, make([]byte, 40), nil)
	var be *BackendError
	if !errors.As(err, &be) || be.Op != "connect" {
		t.Errorf("got %v", err)
	}
}
