package nfsserve

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// connect opens n connections from an address of this host and sends first on each.
func connect(t *testing.T, addr, from string, n int, first []byte) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	for range n {
		c, err := d.Dial("tcp", addr)
		kit.Must(t, err)
		t.Cleanup(func() { c.Close() })
		_, _ = c.Write(first) // the server may have closed it
	}
}

// Connections that send nothing, or part of a call, keep out neither clients of the same address
// nor others.
func TestSilentClientsKeepNoOneOut(t *testing.T) {
	part := make([]byte, 20)
	rpctcp.PutMark(part, 1<<20)
	for name, first := range map[string][]byte{"silent": nil, "part of a call": part} {
		t.Run(name, func(t *testing.T) {
			s, _ := start(t, nil)
			for _, from := range []string{"127.0.0.2", "127.0.0.3", "127.0.0.1"} {
				connect(t, s.TCPAddr, from, maxTCPConns/2+10, first)
			}
			c := dial(t, s.TCPAddr)
			var a nfs3.Attr
			c.OK(c.GetAttr(c.Ctx, c.Cred, c.Root, &a))
			fh := c.MustCreate(c.Cred, c.Root, "small", 0o644)
			var w nfs3.WriteResult
			c.OK(c.Write(c.Ctx, c.Cred, fh, 0, []byte("x"), nfs3.FileSync, &w))
		})
	}
}

// Large calls that stop half-way take at most half of the memory for large calls.
func TestHalfSentCallsLeaveMemory(t *testing.T) {
	part := make([]byte, 20)
	rpctcp.PutMark(part, 1<<20)
	s, _ := start(t, nil)
	connect(t, s.TCPAddr, "127.0.0.2", maxTCPConns/2, part)
	c := dial(t, s.TCPAddr)
	fh := c.MustCreate(c.Cred, c.Root, "large", 0o644)
	var w nfs3.WriteResult
	c.OK(c.Write(c.Ctx, c.Cred, fh, 0, make([]byte, 1<<20), nfs3.Unstable, &w))
	if w.Count != 1<<20 {
		t.Errorf("WRITE: got %d bytes, want all", w.Count)
	}
}

// TestStalledCallsGiveMemoryBack fills the memory of an address with incomplete calls. A complete
// call of the address must be executed before the deadline of the incomplete ones.
func TestStalledCallsGiveMemoryBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := pipes(t, echo)
		part := make([]byte, 20)
		rpctcp.PutMark(part, 1<<20)
		for range 128 {
			c := l.dial(1)
			defer c.Close()
			_, err := c.Write(part)
			kit.Must(t, err)
		}
		synctest.Wait()
		began := time.Now()
		c := l.dial(1)
		defer c.Close()
		kit.Must(t, rpctcp.WriteRecord(c, make([]byte, 1<<20)))
		if reply, err := rpctcp.ReadRecord(c, nil, maxRecord); err != nil || len(reply) != 1<<20 {
			t.Errorf("large call: got %d bytes, %v", len(reply), err)
		}
		if took := time.Since(began); took > recordTimeout-2*progressTimeout {
			t.Errorf("large call: took %v", took)
		}
	})
}

// readOfMiB is a READ of 1 MiB.
func readOfMiB() []byte {
	b := sunrpc.AppendCall(nil, 1, nfs3.Program, nfs3.Version, uint32(nfs3.ProcRead), sunrpc.AppendAuthNone(nil))
	return sunrpc.AppendUint32(sunrpc.AppendUint64(sunrpc.AppendOpaque(b, []byte("file")), 0), 1<<20)
}

// callFrom makes a call from an address and returns the time that it took.
func callFrom(t *testing.T, l *pipeListener, from byte, call []byte) time.Duration {
	t.Helper()
	began := time.Now()
	c := l.dial(from)
	defer c.Close()
	_ = c.SetDeadline(began.Add(time.Hour))
	err := rpctcp.WriteRecord(c, call)
	if err == nil {
		_, err = rpctcp.ReadRecord(c, nil, maxRecord)
	}
	if err != nil {
		t.Errorf("call from address %d: %v", from, err)
	}
	return time.Since(began)
}

// TestUnreadRepliesHoldNoPlaces lets two addresses make as many calls as the server executes at a
// time, and read no replies. A call of another address must not wait.
func TestUnreadRepliesHoldNoPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := pipes(t, echo)
		for i := range callsAtOnce {
			c := l.dial(byte(i % 2))
			defer c.Close()
			kit.Must(t, rpctcp.WriteRecord(c, []byte("call")))
		}
		synctest.Wait()
		if took := callFrom(t, l, 2, []byte("call")); took > 0 {
			t.Errorf("call of another address: took %v, want no wait", took)
		}
	})
}

// TestMountHasPlaces lets calls of NFS use all places that an address can have. A call of MOUNT of
// the same address must not wait.
func TestMountHasPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		l := pipes(t, handlerFunc(func(call, reply []byte) ([]byte, error) {
			if h, _, err := sunrpc.ParseCall(call); err != nil || h.Prog != progMount {
				<-hold
			}
			return append(reply, call...), nil
		}))
		for range callsAtOnce / callsPerConn {
			c := l.dial(1)
			defer c.Close()
			go func() {
				for range callsPerConn {
					_ = rpctcp.WriteRecord(c, []byte("call"))
				}
			}()
		}
		synctest.Wait()
		mnt := sunrpc.AppendCall(nil, 1, progMount, versMount, mountMnt, sunrpc.AppendAuthNone(nil))
		if took := callFrom(t, l, 1, mnt); took > 0 {
			t.Errorf("call of MOUNT: took %v, want no wait", took)
		}
		close(hold)
	})
}

// countingHandler answers calls at once, and counts the bytes.
type countingHandler struct {
	handlerFunc
	size  int
	bytes atomic.Int64
}

func (h *countingHandler) TryServe(_ netip.AddrPort, _, reply []byte) ([]byte, bool) {
	h.bytes.Add(int64(h.size))
	return append(reply, make([]byte, h.size)...), true
}

// TestUnreadRepliesAreBounded opens all connections from two addresses and reads no reply. The
// replies of 1 MiB must leave memory to another address, and a connection.
func TestUnreadRepliesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &countingHandler{size: 1 << 20}
		l := pipes(t, h)
		for i := range maxTCPConns {
			c := l.dial(byte(i % 2))
			defer c.Close()
			kit.Must(t, rpctcp.WriteRecord(c, readOfMiB()))
		}
		synctest.Wait()
		if n := h.bytes.Load(); n > 3*tcpMemory/4 {
			t.Errorf("replies in memory: got %d MiB, want at most %d", n>>20, 3*tcpMemory/4>>20)
		}
		if took := callFrom(t, l, 2, readOfMiB()); took > 0 {
			t.Errorf("READ of another address: took %v, want no wait", took)
		}
	})
}

// TestStalledRepliesFreeConnections opens all connections from two addresses and reads no reply.
// After a few seconds another address must get a connection.
func TestStalledRepliesFreeConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := pipes(t, &countingHandler{size: 1})
		for i := range maxTCPConns {
			c := l.dial(byte(i % 2))
			defer c.Close()
			kit.Must(t, rpctcp.WriteRecord(c, []byte("call")))
		}
		time.Sleep(progressTimeout + 2*clockTick)
		callFrom(t, l, 2, []byte("call"))
	})
}

func TestDeadlines(t *testing.T) {
	seconds := func(d time.Duration) int64 { return int64(d / clockTick) }
	for _, tt := range []struct {
		name    string
		phase   int32
		running int32
		writing bool
		limit   time.Duration // 0: none
	}{
		{name: "silent", phase: phaseSilent, limit: firstCallTimeout},
		{name: "part of a call", phase: phasePart, limit: recordTimeout},
		{name: "idle", phase: phaseIdle, limit: idleTimeout},
		{name: "idle, but executes calls", phase: phaseIdle, running: 1},
		{name: "waits for memory", phase: phaseWaiting, limit: memoryTimeout},
		{name: "waits for other calls", phase: phaseBusy},
		{name: "client does not take a reply", phase: phaseIdle, running: 1, writing: true, limit: writeTimeout},
	} {
		c := &tcpConn{tcpServer: newTCPServer(nil, hclog.NewNullLogger())}
		c.enter(tt.phase)
		c.running.Store(tt.running)
		if tt.writing {
			c.writing.Store(c.clock.Load())
		}
		at := seconds(tt.limit)
		if tt.limit == 0 {
			at = seconds(24 * time.Hour)
		}
		if c.late(c.clock.Load() + at) {
			t.Errorf("%s: closed within the limit", tt.name)
		}
		if tt.limit != 0 && !c.late(c.clock.Load()+at+1) {
			t.Errorf("%s: kept beyond %v", tt.name, tt.limit)
		}
	}
}

// The allow list holds for both ports.
func TestAllowList(t *testing.T) {
	s, _ := start(t, func(c *Config) { c.Allow = []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")} })
	x, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: s.RDMAAddr, Slots: 4})
	kit.Must(t, err)
	defer x.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := x.Connect(ctx); err == nil {
		t.Error("RDMA connection from an address that is not allowed succeeded")
	}
	r, err := rpctcp.Dial(t.Context(), s.TCPAddr, rpctcp.Options{})
	kit.Must(t, err)
	defer r.Close()
	err = nfs3.NewClient(r).GetAttr(t.Context(), mounts.Credential(0, 0), nfs3.FH{}, new(nfs3.Attr))
	if err == nil || errors.Is(err, nfs3.ErrMalformed) {
		t.Errorf("GETATTR from an address that is not allowed: got %v", err)
	}
}
