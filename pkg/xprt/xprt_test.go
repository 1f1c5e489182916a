package xprt

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// serverEnv makes the test binary a server alone, so that what is measured in a test is the
// client's.
const serverEnv = "XPRT_TEST_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(serverEnv) != "" {
		if err := serveAlone(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testutil.Main(m)
}

// serveAlone serves on loopback until its standard input ends, and says where on its standard
// output.
func serveAlone() error {
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

// serveElsewhere starts a server in a process of its own that ends with the test.
func serveElsewhere(t testing.TB) netip.AddrPort {
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
	// proc 0: nothing; 1: the arguments back; 2: a reply of the size asked for
	echoProg = 0x20000001
	nfsProg  = 100003
)

// pattern is the octet at offset off of the file that the test server has.
func pattern(off uint64) byte { return byte(off*7 + off>>8 + off>>16) }

// first is the file's first MiB, made once: the benchmarks are not to measure how a pattern is
// made.
var first = fill(0, 1<<20)

func appendPattern(b []byte, off uint64, n int) []byte {
	if off == 0 && n <= len(first) {
		return append(b, first[:n]...)
	}
	return append(b, fill(off, n)...)
}

func matchesPattern(off uint64, data []byte) bool {
	if off == 0 && len(data) <= len(first) {
		return bytes.Equal(data, first[:len(data)])
	}
	return bytes.Equal(data, fill(off, len(data)))
}

// service is a small RPC server: the echo program, and READ and WRITE of one endless file.
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

// handlerFunc answers every call with nothing, when f returns.
type handlerFunc func(ctx context.Context, proc uint32)

func (f handlerFunc) ServeRPC(ctx context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, _, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	f(ctx, h.Proc)
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
}

// serve starts a server on loopback that ends with the test.
func serve(t testing.TB, cfg svcrdma.Config) netip.AddrPort {
	t.Helper()
	p := softiwarp.New(softiwarp.Config{})
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

func dial(t testing.TB, addr netip.AddrPort, change func(*Config)) *Transport {
	t.Helper()
	cfg := Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr, ReconnectMin: 10 * time.Millisecond,
		ReconnectMax: 50 * time.Millisecond,
		KeepAlive:    -1} // tests count the calls that they make
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
	// who mounts would be told; the tests want what comes after
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
						t.Fatalf("echo of %d octets: %v", n, err)
					}
					if !bytes.Equal(m.Result, args) {
						t.Fatalf("echo of %d octets came back as %d others", n, len(m.Result))
					}
					m = echo(2, binary.BigEndian.AppendUint32(nil, uint32(n)), n+100)
					if err := tr.Call(ctx, m); err != nil || !bytes.Equal(m.Result, fill(0, n)) {
						t.Fatalf("reply of %d octets: %v, got %d", n, err, len(m.Result))
					}
				}
				s := tr.Stats()
				if s.NomsgCall == 0 || s.ReplyChunks == 0 || s.ReadChunks == 0 {
					t.Errorf("forms not used: %d long calls, %d reply chunks, %d read chunks", s.NomsgCall,
						s.ReplyChunks, s.ReadChunks)
				}
				if inv && s.RemoteInvalidations == 0 {
					t.Error("the server never used Send With Invalidate")
				}
				if !inv && (s.RemoteInvalidations != 0 || s.LocalInvNeeded == 0) {
					t.Errorf("%d remote and %d local invalidations without the flag", s.RemoteInvalidations,
						s.LocalInvNeeded)
				}
			})
		}
	}
}

func TestReadWriteSizes(t *testing.T) {
	for _, pad := range []bool{false, true} {
		t.Run(fmt.Sprintf("write pad %v", pad), func(t *testing.T) {
			tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true}),
				func(c *Config) { c.WritePad = pad })
			c, ctx, fh := nfs3.NewClient(tr, nfs3.Options{}), testContext(t), testFH(t)
			for _, n := range []int{0, 1, 2, 3, 4, 5, 3700, 3701, 3702, 3703, 3900, 4095, 4096, 4097, 65535, 65537,
				1<<20 - 1, 1 << 20} {
				buf := make([]byte, n)
				var r nfs3.ReadResult
				if err := c.Read(ctx, noCred, fh, 5<<30+1, buf, &r); err != nil {
					t.Fatalf("read %d: %v", n, err)
				}
				if r.N != n || !bytes.Equal(buf, fill(5<<30+1, n)) {
					t.Fatalf("read %d returned %d octets, or wrong ones", n, r.N)
				}
				var w nfs3.WriteResult
				if err := c.Write(ctx, noCred, fh, 77, fill(77, n), nfs3.FileSync, &w); err != nil {
					t.Fatalf("write %d: %v", n, err)
				}
				if int(w.Count) != n {
					t.Fatalf("write %d: count %d", n, w.Count)
				}
			}
			s := tr.Stats()
			if s.WriteChunks == 0 || s.ReadChunks == 0 || s.MRStates["VALID"] > 1 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// TestSteadyState holds the hot path to its promises: no allocation, one post and well under one
// send completion per RPC.
func TestSteadyState(t *testing.T) {
	tr := dial(t, serveElsewhere(t), nil)
	ctx := context.Background()
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
	cases := []struct {
		name string
		m    sunrpc.Message
	}{
		{"NULL", sunrpc.Message{Prog: nfsProg, Vers: 3, Cred: noCred}},
		{"READ 4 KiB", sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred, Args: readArgs(4096),
			ResultData: read[:4096], MaxResult: 104}},
		{"READ 1 MiB", sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 6, Cred: noCred, Args: readArgs(1 << 20),
			ResultData: read, MaxResult: 104}},
		{"WRITE 4 KiB", sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 7, Cred: noCred, Args: writeArgs(4096),
			ArgDataPos: len(args) + 12, ArgData: data[:4096], MaxResult: 136}},
		{"WRITE 1 MiB", sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 7, Cred: noCred, Args: writeArgs(1 << 20),
			ArgDataPos: len(args) + 12, ArgData: data, MaxResult: 136}},
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
			for range 2 * DefaultSlots { // every slot has its MR
				call()
			}
			before := tr.Stats()
			const runs = 200
			allocs := testing.AllocsPerRun(runs-1, call)
			after := tr.Stats()
			if posts := after.PostedChains - before.PostedChains; posts != runs {
				t.Errorf("%d posts for %d RPCs", posts, runs)
			}
			if n := after.SendCompletions - before.SendCompletions; n > runs/4 {
				t.Errorf("%d send completions for %d RPCs", n, runs)
			}
			if allocs != 0 {
				t.Errorf("%v allocations per RPC", allocs)
			}
		})
	}
}

func TestReplayOverDisconnects(t *testing.T) {
	var n atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if n.Add(1)%97 == 0 {
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, RemoteInv: true, Hooks: hooks}), nil)
	c, ctx, fh := nfs3.NewClient(tr, nfs3.Options{}), testContext(t), testFH(t)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			buf := make([]byte, 70001)
			for i := range 60 {
				off := uint64(w*1000000 + i*777)
				size := (i*2711 + w) % len(buf)
				var r nfs3.ReadResult
				if err := c.Read(ctx, noCred, fh, off, buf[:size], &r); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if !bytes.Equal(buf[:size], fill(off, size)) {
					t.Errorf("worker %d: wrong octets at %d", w, off)
					return
				}
				var wr nfs3.WriteResult
				if err := c.Write(ctx, noCred, fh, off, buf[:size], nfs3.FileSync, &wr); err != nil {
					t.Errorf("write: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	s := tr.Stats()
	if s.Connects < 3 || s.Resends == 0 {
		t.Errorf("%d connections, %d calls sent again: the test cut nothing", s.Connects, s.Resends)
	}
	if s.MRsOrphaned != 0 || s.SlotsInUse != 0 || s.InFlight != 0 {
		t.Errorf("%d orphaned, %d slots in use, %d in flight", s.MRsOrphaned, s.SlotsInUse, s.InFlight)
	}
}

func TestInterruptFencesAndReturns(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, RemoteInv: true}), nil)
	c, fh := nfs3.NewClient(tr, nfs3.Options{}), testFH(t)
	warm := make([]byte, 4096)
	var r nfs3.ReadResult
	if err := c.Read(testContext(t), noCred, fh, 0, warm, &r); err != nil {
		t.Fatal(err)
	}
	svc.delay.Store(int64(300 * time.Millisecond))
	ctx, cancel := context.WithCancel(context.Background())
	buf := make([]byte, 100000)
	time.AfterFunc(30*time.Millisecond, cancel)
	err := c.Read(ctx, noCred, fh, 0, buf, &r)
	if !errors.Is(err, syscall.EINTR) || !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want EINTR", err)
	}
	for i := range buf {
		buf[i] = 0xee // the caller's again
	}
	svc.delay.Store(0)
	time.Sleep(500 * time.Millisecond) // the late reply comes, and its RDMA Write before it
	for i := range buf {
		if buf[i] != 0xee {
			t.Fatalf("octet %d was written after the call had returned", i)
		}
	}
	other := make([]byte, 50000)
	if err := c.Read(testContext(t), noCred, fh, 9, other, &r); err != nil || !bytes.Equal(other, fill(9, len(other))) {
		t.Fatalf("next read: %v, or wrong octets", err)
	}
	if s := tr.Stats(); s.Interrupted != 1 || s.SlotsInUse != 0 {
		t.Errorf("%d interrupted, %d slots in use; want 1, 0", s.Interrupted, s.SlotsInUse)
	}
}

func TestSoftMountTimesOut(t *testing.T) {
	for _, c := range []struct {
		mode Recovery
		want syscall.Errno
	}{{Soft, syscall.EIO}, {SoftErr, syscall.ETIMEDOUT}} {
		svc := &service{}
		svc.delay.Store(int64(time.Hour))
		tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(cfg *Config) {
			cfg.Recovery, cfg.Timeout, cfg.Retrans = c.mode, 150*time.Millisecond, 1
		})
		err := tr.Call(testContext(t), echo(1, nil, 0))
		var te *TimeoutError
		if !errors.As(err, &te) || !errors.Is(err, c.want) {
			t.Errorf("mode %d: %v, want %v", c.mode, err, c.want)
		}
		eventually(t, "another connection: a late call ends its own",
			func() bool { s := tr.Stats(); return s.Timeouts > 0 && s.Connects > 1 })
		tr.Close()
	}
}

// TestSoftMountTimesOutWithoutMemory has a device that never gives an MR: a call that cannot even
// be sent ends with the time of a soft mount, too, and does not fill the log meanwhile.
func TestSoftMountTimesOutWithoutMemory(t *testing.T) {
	plan, err := faults.Parse("alloc-fail=1")
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(cfg *Config) {
		cfg.Provider = faults.New(cfg.Provider, plan, nil)
		cfg.Recovery, cfg.Timeout, cfg.Retrans = Soft, 150*time.Millisecond, 1
		cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Warn, Mutex: &sync.Mutex{}})
	})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var r nfs3.ReadResult
	err = nfs3.NewClient(tr, nfs3.Options{}).Read(ctx, noCred, testFH(t), 0, make([]byte, 9000), &r)
	if !isTimeout(err) {
		t.Errorf("the call ended with %v, want its timeout", err)
	}
	tr.Close()
	if n := strings.Count(log.String(), "no memory"); n != 1 {
		t.Errorf("%d lines about one call", n)
	}
}

// TestSoftMountCountsTheWaitForASlot has more callers than slots, and a server that answers none:
// the time of those that wait for a slot passes, too, so that none of them is sent when a slot is
// free at last.
func TestSoftMountCountsTheWaitForASlot(t *testing.T) {
	const slots = 4
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), func(cfg *Config) {
		cfg.Recovery, cfg.Timeout, cfg.Slots = Soft, 2*time.Second, slots
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil { // brings the credits
		t.Fatal(err)
	}
	svc.delay.Store(int64(time.Hour))
	svc.calls.Store(0)
	var wg sync.WaitGroup
	for range 3 * slots {
		wg.Go(func() {
			if err := tr.Call(testContext(t), echo(1, nil, 0)); !isTimeout(err) {
				t.Errorf("the call ended with %v, want its timeout", err)
			}
		})
	}
	wg.Wait()
	if n := svc.calls.Load(); n > slots {
		t.Errorf("%d calls came to the server, %d had a slot in time", n, slots)
	}
}

func TestLyingServer(t *testing.T) {
	cases := []struct {
		name string
		lie  func(*rpcrdma.Header)
		err  func(error) bool
	}{
		{"write chunk longer than offered", func(h *rpcrdma.Header) { h.Writes[0][0].Length++ }, isProtocol},
		{"write chunk of another key", func(h *rpcrdma.Header) { h.Writes[0][0].Handle++ }, isProtocol},
		{"two write chunks", func(h *rpcrdma.Header) { h.Writes = append(h.Writes, h.Writes[0]) }, isProtocol},
		{"no write chunk", func(h *rpcrdma.Header) { h.Writes = nil }, isProtocol},
		{"write chunk said to be empty", func(h *rpcrdma.Header) { h.Writes[0][0].Length = 0 },
			func(err error) bool { return errors.Is(err, nfs3.ErrMalformed) }},
		{"read list in a reply", func(h *rpcrdma.Header) {
			h.Reads = append(h.Reads,
				rpcrdma.ReadSegment{Position: 4})
		}, isProtocol},
		{"reply chunk that was not offered", func(h *rpcrdma.Header) {
			h.HasReply, h.Reply = true,
				rpcrdma.Chunk{{Handle: 1, Length: 5}}
		}, isProtocol},
		{"long reply without a chunk", func(h *rpcrdma.Header) { h.Proc = rpcrdma.ProcNoMsg }, isProtocol},
		{"ERR_CHUNK", func(h *rpcrdma.Header) { h.Proc, h.Err = rpcrdma.ProcError, rpcrdma.ErrChunk }, isServer},
		{"ERR_VERS", func(h *rpcrdma.Header) {
			h.Proc, h.Err, h.Low, h.High = rpcrdma.ProcError, rpcrdma.ErrVers, 2,
				3
		}, isServer},
		{"unknown XID", func(h *rpcrdma.Header) { h.XID ^= 1 << 30 }, isTimeout},
		{"unknown slot", func(h *rpcrdma.Header) { h.XID |= 127 }, isTimeout},
		{"wrong version", func(h *rpcrdma.Header) { h.Vers = 9 }, isTimeout},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var lying atomic.Bool
			hooks := svcrdma.Hooks{Reply: func(h *rpcrdma.Header) svcrdma.Verdict {
				if lying.Load() {
					c.lie(h)
				}
				return svcrdma.Send
			}}
			tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}), func(cfg *Config) {
				cfg.Recovery, cfg.Timeout = SoftErr, 300*time.Millisecond
			})
			cl, fh := nfs3.NewClient(tr, nfs3.Options{}), testFH(t)
			buf := make([]byte, 60000)
			var r nfs3.ReadResult
			lying.Store(true)
			if err := cl.Read(testContext(t), noCred, fh, 0, buf, &r); !c.err(err) {
				t.Errorf("error %v", err)
			}
			lying.Store(false)
			if n := tr.Stats().BadReply; (n != 0) != (c.err(&ProtocolError{}) || c.err(&ServerError{})) &&
				c.name != "wrong version" {
				t.Errorf("%d bad replies were counted", n)
			}
			if err := cl.Read(testContext(t), noCred, fh, 1, buf, &r); err != nil ||
				!bytes.Equal(buf, fill(1, len(buf))) {
				t.Errorf("the next read: %v, or wrong octets", err)
			}
		})
	}
}

func isProtocol(err error) bool { var e *ProtocolError; return errors.As(err, &e) }
func isServer(err error) bool   { var e *ServerError; return errors.As(err, &e) }
func isTimeout(err error) bool  { var e *TimeoutError; return errors.As(err, &e) }

func TestCreditsBoundTheCallsInFlight(t *testing.T) {
	var now, most atomic.Int64
	h := svcrdma.HandlerFunc(func(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for {
			m := most.Load()
			if n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		time.Sleep(2 * time.Millisecond)
		return (&service{}).ServeRPC(ctx, peer, call, reply)
	})
	tr := dial(t, serve(t, svcrdma.Config{Handler: h, Credits: 4}), nil)
	ctx := testContext(t)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			for range 5 {
				if err := tr.Call(ctx, echo(1, fill(0, 8), 8)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if m := most.Load(); m > 4 || m < 2 {
		t.Errorf("%d calls at a time on 4 credits", m)
	}
	if s := tr.Stats(); s.Credits != 4 {
		t.Errorf("credits %d, want 4", s.Credits)
	}
}

func TestCloseEndsWaitingCalls(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc}), nil)
	svc.delay.Store(int64(time.Hour))
	errs := make(chan error, 3)
	for range cap(errs) {
		go func() { errs <- tr.Call(context.Background(), echo(1, nil, 0)) }()
	}
	time.Sleep(50 * time.Millisecond)
	tr.Close()
	for range cap(errs) {
		if err := <-errs; !errors.Is(err, ErrClosed) {
			t.Errorf("error %v, want ErrClosed", err)
		}
	}
	if err := tr.Call(context.Background(), echo(1, nil, 0)); !errors.Is(err, ErrClosed) {
		t.Errorf("call after Close: %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{Slots: 3}, {Slots: MaxSlots + 1}, {InlineBytes: 1000}, {InlineBytes: 512},
		{InlineBytes: MaxInlineBytes + 1024}} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
	if n := leakcheck.Count(leakcheck.Slot); n != 0 {
		t.Errorf("%d slots left by refused configurations", n)
	}
}

// TestJunkDoesNotFillTheLog has a server answer many calls with messages that are to be discarded.
func TestJunkDoesNotFillTheLog(t *testing.T) {
	const calls = 20
	var replies atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(h *rpcrdma.Header) svcrdma.Verdict {
		if replies.Add(1) > 1 { // the first brings the credits
			h.Vers = 9
		}
		return svcrdma.Send
	}}
	var log bytes.Buffer
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}, Hooks: hooks}), func(cfg *Config) {
		cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log, Level: hclog.Warn, Mutex: &sync.Mutex{}})
	})
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	ctx, cancel := context.WithCancel(testContext(t))
	var wg sync.WaitGroup
	for range calls {
		wg.Go(func() { tr.Call(ctx, echo(1, nil, 0)) })
	}
	eventually(t, "all discarded", func() bool { return tr.Stats().BadReply == calls })
	cancel()
	wg.Wait()
	tr.Close()
	if n, most := strings.Count(log.String(), "discarded"), 1+int(time.Since(began)/discardPause); n == 0 || n > most {
		t.Errorf("%d lines in the log, want 1 to %d", n, most)
	}
}
