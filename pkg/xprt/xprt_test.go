package xprt

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// serverEnv makes the test binary a server, so that measurements of a test cover the client alone.
const serverEnv = "XPRT_TEST_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(serverEnv) != "" {
		if err := serveProcess(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	kit.Main(m)
}

// serveProcess serves on loopback until its standard input ends. It prints its address to standard
// output.
func serveProcess() error {
	l, err := softiwarp.New(softiwarp.Config{}).Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	fmt.Println(l.Addr())
	return svcrdma.Serve(ctx, l, svcrdma.Config{Handler: &service{}, RemoteInv: true})
}

// startServerProcess starts a server in another process, which ends with the test.
func startServerProcess(t testing.TB) netip.AddrPort {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serverEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("server process: %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netip.ParseAddrPort(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

const (
	// Procedure 0 does nothing, 1 returns its arguments, 2 returns as many bytes as requested.
	echoProg = 0x20000001
	nfsProg  = 100003
)

// pattern returns the byte at offset off of the file of the test server.
func pattern(off uint64) byte { return byte(off*7 + off>>8 + off>>16) }

// firstMiB is the first MiB of the file. It is filled once, so that benchmarks do not measure the
// pattern.
var firstMiB = fill(0, 1<<20)

func appendPattern(b []byte, off uint64, n int) []byte {
	if off == 0 && n <= len(firstMiB) {
		return append(b, firstMiB[:n]...)
	}
	return append(b, fill(off, n)...)
}

func matchesPattern(off uint64, data []byte) bool {
	if off == 0 && len(data) <= len(firstMiB) {
		return bytes.Equal(data, firstMiB[:len(data)])
	}
	return bytes.Equal(data, fill(off, len(data)))
}

// A service is a small RPC server: the echo program, and READ and WRITE of one endless file.
type service struct {
	delay atomic.Int64 // nanoseconds before each reply
	calls atomic.Int64
}

func (s *service) ServeRPC(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	s.calls.Add(1)
	if d := s.delay.Load(); d > 0 {
		select {
		case <-time.After(time.Duration(d)):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	h, args, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	d := sunrpc.NewDecoder(args)
	switch {
	case h.Prog == echoProg && h.Proc == 1:
		return append(reply, args...), nil
	case h.Prog == echoProg && h.Proc == 2:
		return appendPattern(reply, 0, int(d.Uint32())), nil
	case h.Prog == nfsProg && h.Proc == 6:
		d.Opaque(64)
		off, n := d.Uint64(), d.Uint32()
		reply = sunrpc.AppendUint32(reply, 0) // NFS3_OK
		reply = sunrpc.AppendUint32(reply, 0) // no attributes
		reply = sunrpc.AppendUint32(reply, n)
		reply = sunrpc.AppendUint32(reply, 0) // not the end
		reply = sunrpc.AppendUint32(reply, n)
		reply = appendPattern(reply, off, int(n))
		for range (4 - n%4) % 4 {
			reply = append(reply, 0)
		}
		return reply, d.Err()
	case h.Prog == nfsProg && h.Proc == 7:
		d.Opaque(64)
		off, n := d.Uint64(), d.Uint32()
		d.Uint32()
		data := d.Opaque(1 << 20)
		status := uint32(0)
		if !matchesPattern(off, data) {
			status = 5 // NFS3ERR_IO
		}
		if d.Err() != nil || len(data) != int(n) || d.Remaining() != 0 {
			status = 5
		}
		reply = sunrpc.AppendUint32(reply, status)
		reply = sunrpc.AppendUint64(reply, 0) // no wcc data
		if status == 0 {
			reply = sunrpc.AppendUint32(reply, n)
			reply = sunrpc.AppendUint32(reply, 2)
			reply = sunrpc.AppendUint64(reply, 42)
		}
		return reply, nil
	}
	return reply, nil
}

// A handlerFunc handles every call. The reply is empty and follows when the function returns.
type handlerFunc func(ctx context.Context, proc uint32)

func (f handlerFunc) ServeRPC(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, _, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	f(ctx, h.Proc)
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
}

// serve starts a server on loopback, which ends with the test.
func serve(t testing.TB, cfg svcrdma.Config) netip.AddrPort {
	t.Helper()
	return serveOn(t, softiwarp.New(softiwarp.Config{}), cfg)
}

func serveOn(t testing.TB, p verbs.Provider, cfg svcrdma.Config) netip.AddrPort {
	t.Helper()
	l, err := p.Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svcrdma.Serve(ctx, l, cfg) }()
	t.Cleanup(func() {
		cancel()
		l.Close()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	})
	return l.Addr()
}

// faulty returns a softiwarp provider with the faults of spec.
func faulty(t testing.TB, spec string) *faults.Provider {
	t.Helper()
	plan, err := faults.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	return faults.New(softiwarp.New(softiwarp.Config{}), plan, nil)
}

// dial returns a connected transport, which is closed at the end of the test.
func dial(t testing.TB, addr netip.AddrPort, change func(*Config)) *Transport {
	t.Helper()
	cfg := Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr, ReconnectMin: 10 * time.Millisecond,
		ReconnectMax: 50 * time.Millisecond,
		KeepAlive:    -1} // the tests count calls
	if change != nil {
		change(&cfg)
	}
	tr, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err = tr.Connect(ctx)
	// A mount would fail here; the tests need a connection.
	for err != nil && strings.Contains(err.Error(), "injected fault") {
		err = tr.Connect(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

var noCred = sunrpc.AppendAuthNone(nil)

func echo(proc uint32, args []byte, maxResult int) *sunrpc.Message {
	return &sunrpc.Message{Prog: echoProg, Vers: 1, Proc: proc, Cred: noCred, Args: args, MaxResult: maxResult}
}

func fill(off uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = pattern(off + uint64(i))
	}
	return b
}

func testFH(t testing.TB) nfs3.FH {
	fh, err := nfs3.NewFH([]byte("the file"))
	if err != nil {
		t.Fatal(err)
	}
	return fh
}

func TestMessageForms(t *testing.T) {
	for _, always := range []bool{false, true} {
		for _, inv := range []bool{false, true} {
			t.Run(fmt.Sprintf("reply chunk always %v, remote invalidation %v", always, inv), func(t *testing.T) {
				tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: inv, AlwaysReplyChunk: always}),
					nil)
				ctx := testContext(t)
				for _, n := range []int{0, 4, 1000, 3800, 4000, 4096, 4100, 20000, 1 << 20} {
					args := fill(3, n)
					m := echo(1, args, n)
					if err := tr.Call(ctx, m); err != nil {
						t.Fatalf("echo of %d bytes: %v", n, err)
					}
					if !bytes.Equal(m.Result, args) {
						t.Fatalf("echo of %d bytes: got %d bytes, or other ones", n, len(m.Result))
					}
					m = echo(2, binary.BigEndian.AppendUint32(nil, uint32(n)), n+100)
					if err := tr.Call(ctx, m); err != nil || !bytes.Equal(m.Result, fill(0, n)) {
						t.Fatalf("reply of %d bytes: got %d, %v", n, len(m.Result), err)
					}
				}
				s := tr.Stats()
				if s.NomsgCall == 0 || s.ReplyChunks == 0 || s.ReadChunks == 0 {
					t.Errorf("message forms: got %d long calls, %d reply chunks, %d read chunks; want some of each",
						s.NomsgCall, s.ReplyChunks, s.ReadChunks)
				}
				if inv && s.RemoteInvalidations == 0 {
					t.Error("remote invalidations: got 0, want some")
				}
				if !inv && (s.RemoteInvalidations != 0 || s.LocalInvNeeded == 0) {
					t.Errorf("without the flag: got %d remote, %d local invalidations; want 0, some",
						s.RemoteInvalidations, s.LocalInvNeeded)
				}
			})
		}
	}
}

// scatter returns all of b in pieces of growing size, the last ones first.
func scatter(b []byte) (pieces [][]byte) {
	for n := 1; len(b) > 0; n = 2*n + 1 {
		n = min(n, len(b))
		pieces = append(pieces, b[len(b)-n:])
		b = b[:len(b)-n]
	}
	return pieces
}

func TestReadWriteSizes(t *testing.T) {
	for _, pad := range []bool{false, true} {
		t.Run(fmt.Sprintf("write pad %v", pad), func(t *testing.T) {
			tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true}),
				func(c *Config) { c.WritePad = pad })
			c, ctx, fh := nfs3.NewClient(tr), testContext(t), testFH(t)
			for _, n := range []int{0, 1, 2, 3, 4, 5, 3700, 3701, 3702, 3703, 3900, 4095, 4096, 4097, 65535, 65537,
				1<<20 - 1, 1 << 20} {
				buf := make([]byte, n)
				var r nfs3.ReadResult
				if err := c.Read(ctx, noCred, fh, 5<<30+1, buf, &r); err != nil {
					t.Fatalf("READ of %d bytes: %v", n, err)
				}
				if r.N != n || !bytes.Equal(buf, fill(5<<30+1, n)) {
					t.Fatalf("READ of %d bytes: got %d bytes, or bytes that differ", n, r.N)
				}
				clear(buf)
				pieces := scatter(buf)
				if err := c.ReadPieces(ctx, noCred, fh, 5<<30+1, pieces, &r); err != nil {
					t.Fatalf("READ of %d bytes in %d pieces: %v", n, len(pieces), err)
				}
				if r.N != n || !bytes.Equal(bytes.Join(pieces, nil), fill(5<<30+1, n)) {
					t.Fatalf("READ of %d bytes in %d pieces: got %d bytes, or bytes that differ", n, len(pieces), r.N)
				}
				var w nfs3.WriteResult
				if err := c.Write(ctx, noCred, fh, 77, fill(77, n), nfs3.FileSync, &w); err != nil {
					t.Fatalf("WRITE of %d bytes: %v", n, err)
				}
				if int(w.Count) != n {
					t.Fatalf("WRITE of %d bytes: got count %d", n, w.Count)
				}
			}
			s := tr.Stats()
			if s.WriteChunks == 0 || s.ReadChunks == 0 || s.MRStates["VALID"] > 1 {
				t.Errorf("stats: got %+v, want read and write chunks, and no VALID MR but the pad", s)
			}
		})
	}
}

// TestSteadyState checks the hot path: no allocation, one post, and far fewer Send completions than
// RPCs.
func TestSteadyState(t *testing.T) {
	tr := dial(t, startServerProcess(t), func(c *Config) { c.Observe = func(context.Context, Ended) {} })
	ctx := &lastID{Context: context.Background()}
	read := make([]byte, 1<<20)
	data := fill(0, 1<<20)
	args := sunrpc.AppendOpaque(nil, []byte("the file"))
	args = sunrpc.AppendUint64(args, 0)
	readArgs := func(n uint32) []byte { return sunrpc.AppendUint32(bytes.Clone(args), n) }
	writeArgs := func(n uint32) []byte {
		b := sunrpc.AppendUint32(bytes.Clone(args), n)
		b = sunrpc.AppendUint32(b, 2)
		return sunrpc.AppendUint32(b, n)
	}
	readCall := func(n uint32) sunrpc.Message {
		return sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred, Args: readArgs(n), ResultData: read[:n],
			MaxResult: 104}
	}
	writeCall := func(n uint32) sunrpc.Message {
		return sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 7, Cred: noCred, Args: writeArgs(n),
			ArgDataPos: len(args) + 12, ArgData: data[:n], MaxResult: 136}
	}
	piecesCall := readCall(1 << 20)
	piecesCall.ResultData = nil
	for n := len(read); n > 0; n -= 4096 {
		piecesCall.ResultPieces = append(piecesCall.ResultPieces, read[n-4096:n])
	}
	cases := []struct {
		name string
		m    sunrpc.Message
	}{
		{"NULL", sunrpc.Message{Prog: nfsProg, Vers: 3, Cred: noCred}},
		{"READ 4 KiB", readCall(4096)},
		{"READ 1 MiB", readCall(1 << 20)},
		{"READ 1 MiB in pages", piecesCall},
		{"WRITE 4 KiB", writeCall(4096)},
		{"WRITE 1 MiB", writeCall(1 << 20)},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			m := c.m
			m.Result = make([]byte, 0, 8192)
			call := func() {
				if err := tr.Call(ctx, &m); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 * DefaultSlots { // allocate the MR of every slot
				call()
			}
			before := tr.Stats()
			const runs = 200
			allocs := testing.AllocsPerRun(runs-1, call)
			after := tr.Stats()
			if posts := after.PostedChains - before.PostedChains; posts != runs {
				t.Errorf("posts of %d RPCs: got %d, want one each", runs, posts)
			}
			if n := after.SendCompletions - before.SendCompletions; n > runs/4 {
				t.Errorf("Send completions of %d RPCs: got %d, want at most %d", runs, n, runs/4)
			}
			if allocs != 0 {
				t.Errorf("allocations per RPC: got %v, want 0", allocs)
			}
		})
	}
}

// A lastID keeps only the ID of the last call.
type lastID struct {
	context.Context
	id sunrpc.CallID
}

func (*lastID) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) { return sunrpc.CallID{}, false }

func (l *lastID) KeepCall(_ *sunrpc.Message, id sunrpc.CallID) { l.id = id }
