package mount

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// A callKeeper is the context of one call that keeps the ID of the call.
type callKeeper struct {
	context.Context
	earlier *sunrpc.CallID // nil for a new call
	asked   int
	kept    []sunrpc.CallID
}

func (k *callKeeper) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) {
	k.asked++
	if k.earlier == nil {
		return sunrpc.CallID{}, false
	}
	return *k.earlier, true
}

func (k *callKeeper) KeepCall(_ *sunrpc.Message, id sunrpc.CallID) { k.kept = append(k.kept, id) }

// startNullServer starts a server that replies without results. It ends with the test.
func startNullServer(t *testing.T) netip.AddrPort {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l, err := softiwarp.New(softiwarp.Config{}).Listen(ctx, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() {
		if err := svcrdma.Serve(ctx, l, svcrdma.Config{Handler: svcrdma.HandlerFunc(serveNull)}); err != nil {
			t.Errorf("server: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		server.Wait()
	})
	return l.Addr()
}

// connected returns a mount stack with n connected transports.
func connected(t *testing.T, n int) *mountStack {
	t.Helper()
	s := &mountStack{provider: softiwarp.New(softiwarp.Config{}), address: startNullServer(t)}
	s.opts.NConnect = n
	t.Cleanup(s.transports.close)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := s.connect(ctx, hclog.NewNullLogger()); err != nil {
		t.Fatal(err)
	}
	return s
}

// callWith makes a call with the given ID of an earlier process, and returns the ID that it keeps.
func callWith(t *testing.T, c *caller, earlier *sunrpc.CallID) sunrpc.CallID {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	k := &callKeeper{Context: ctx, earlier: earlier}
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRemove), Cred: noCred}
	if err := c.Call(k, &m); err != nil {
		t.Fatal(err)
	}
	if k.asked != 1 || len(k.kept) != 1 || k.kept[0].XID != m.XID {
		t.Fatalf("call with XID %#x: got %d questions, IDs %v; want 1, one with the XID", m.XID, k.asked, k.kept)
	}
	return k.kept[0]
}

// TestCallGoesToKeptTransport makes calls of earlier processes on one and on several transports. A
// call with a kept ID goes to the transport of the ID. Other calls, and those of a transport that
// does not exist, go to all transports in turn.
func TestCallGoesToKeptTransport(t *testing.T) {
	for _, n := range []int{1, 3} {
		c := &connected(t, n).transports
		for range 2 {
			for i := range uint32(n) {
				if got := callWith(t, c, &sunrpc.CallID{Conn: i, XID: 5}); got.Conn != i {
					t.Errorf("%d transports, call of transport %d: got transport %d", n, i, got.Conn)
				}
			}
		}
		for _, earlier := range []*sunrpc.CallID{nil, {Conn: uint32(n), XID: 5}, {Conn: 1<<32 - 1, XID: 5}} {
			var got []uint32
			for range n {
				got = append(got, callWith(t, c, earlier).Conn)
			}
			slices.Sort(got)
			if len(slices.Compact(got)) != n {
				t.Errorf("%d transports, kept ID %v: got transports %v, want each once", n, earlier, got)
			}
		}
	}
}

// TestCallHasKeptXID reserves an XID of the second of two transports.
func TestCallHasKeptXID(t *testing.T) {
	const xid = 0x5a000003
	addr := startNullServer(t)
	c := &caller{}
	t.Cleanup(c.close)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for i, reserved := range [][]uint32{nil, {xid}} {
		tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: addr, Index: uint32(i),
			Reserved: reserved})
		if err != nil {
			t.Fatal(err)
		}
		c.all = append(c.all, tr)
		if err := tr.Connect(ctx); err != nil {
			t.Fatal(err)
		}
	}
	id := sunrpc.CallID{Conn: 1, XID: xid}
	if got := callWith(t, c, &id); got != id {
		t.Errorf("repeated call: got ID %+v, want %+v", got, id)
	}
	for conn := range uint32(3) {
		other := sunrpc.CallID{Conn: conn, XID: xid - 1}
		if got := callWith(t, c, &other); got.XID == other.XID || got.XID == xid {
			t.Errorf("call with the kept ID %+v, which is not reserved: got XID %#x, want another one", other, got.XID)
		}
	}
}
