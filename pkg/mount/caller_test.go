package mount

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
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

// serveNull replies to every call without results.
func serveNull(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, _, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	return sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), nil
}

var noCred = sunrpc.AppendAuthNone(nil)

// startNullServer starts a server that replies without results. It ends with the test.
func startNullServer(t testing.TB) netip.AddrPort {
	t.Helper()
	return startServer(t, serveNull)
}

func startServer(t testing.TB, serve svcrdma.HandlerFunc) netip.AddrPort {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l, err := softiwarp.New(softiwarp.Config{}).Listen(ctx, netip.MustParseAddrPort("127.0.0.1:0"))
	kit.Must(t, err)
	var server sync.WaitGroup
	server.Go(func() {
		if err := svcrdma.Serve(ctx, l, svcrdma.Config{Handler: serve}); err != nil {
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
	return connectedTo(t, startNullServer(t), n)
}

func connectedTo(t testing.TB, server netip.AddrPort, n int) *mountStack {
	t.Helper()
	s := &mountStack{provider: softiwarp.New(softiwarp.Config{}), address: server,
		shared: &shared{}}
	s.opts.NConnect = n
	t.Cleanup(s.transports.close)
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	kit.Must(t, s.connect(ctx, hclog.NewNullLogger()))
	for _, tr := range s.transports.all {
		waitReady(t, tr, true)
	}
	return s
}

// callWith makes a call with the given ID of an earlier process, and returns the ID that it keeps.
func callWith(t *testing.T, c *caller, earlier *sunrpc.CallID) sunrpc.CallID {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	k := &callKeeper{Context: ctx, earlier: earlier}
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcRemove), Cred: noCred}
	kit.Must(t, c.Call(k, &m))
	if k.asked != 1 || len(k.kept) != 1 || k.kept[0].XID != m.XID {
		t.Fatalf("call with XID %#x: got %d questions, IDs %v; want 1, one with the XID", m.XID, k.asked, k.kept)
	}
	return k.kept[0]
}

// TestCallGoesToKeptTransport makes calls of earlier processes on one and on several transports. A
// call with a kept ID goes to the transport of the ID. Other calls, and those of a transport that
// does not exist, go to the first transport, because no other call is in flight.
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
			for range 2 {
				if got := callWith(t, c, earlier); got.Conn != 0 {
					t.Errorf("%d transports, kept ID %v: got transport %d, want 0", n, earlier, got.Conn)
				}
			}
		}
	}
}

// waitReady waits until a transport is ready, or is not.
func waitReady(t testing.TB, tr *carrier, want bool) {
	t.Helper()
	kit.Eventually(t, fmt.Sprint("transport that is ready: ", want), func() bool { return tr.Ready() == want })
}

// relayed returns a caller with n transports, each with a relay to one server. A transport whose
// relay is stopped has no connection.
func relayed(t *testing.T, n int) (*caller, []*kit.Relay) {
	t.Helper()
	server, c := startNullServer(t), &caller{}
	t.Cleanup(c.close)
	ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
	defer cancel()
	relays := make([]*kit.Relay, n)
	for i := range n {
		relays[i] = kit.StartRelay(t, server.String(), kit.RelayOptions{})
		tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: relays[i].Addr(),
			Index: uint32(i), ReconnectMin: time.Hour, ReconnectMax: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		c.add(tr)
		kit.Must(t, tr.Connect(ctx))
		waitReady(t, c.all[i], true)
	}
	return c, relays
}

// TestChooseTransport checks which transports get calls, by their loads and connections.
func TestChooseTransport(t *testing.T) {
	const small, bulk = bulkBytes - 1, bulkBytes
	c, relays := relayed(t, 4)
	for _, tt := range []struct {
		lost  string // transports that have lost their connections from here on
		loads [4]int64
		bytes int
		want  string // transports of the next calls
	}{
		{"", [4]int64{0, 0, 0, 0}, 0, "000"},
		{"", [4]int64{0, 0, 0, 0}, small, "000"},
		{"", [4]int64{2, 1, 0, 0}, small, "222"},
		{"", [4]int64{5, 5, 5, 5}, small, "000"},
		{"", [4]int64{0, 0, 0, 0}, bulk, "231231"},
		{"", [4]int64{0, 9, 9, 9}, bulk, "231"},
		{"", [4]int64{0, 9, 8, 9}, bulk, "222"},
		{"", [4]int64{0, 9, 8, 7}, bulk, "333"},
		{"2", [4]int64{0, 9, 8, 9}, bulk, "3313"},
		{"2", [4]int64{9, 9, 8, 9}, small, "000"},
		{"1", [4]int64{0, 1, 0, 99}, bulk, "333"},
		{"0", [4]int64{0, 1, 0, 99}, small, "333"},
		{"3", [4]int64{7, 5, 4, 6}, small, "222"}, // all are lost
		{"3", [4]int64{7, 5, 4, 6}, bulk, "222"},
	} {
		for _, i := range tt.lost {
			relays[i-'0'].Stop()
			waitReady(t, c.all[i-'0'], false)
		}
		for i, load := range tt.loads {
			c.all[i].load.Store(load)
		}
		got := ""
		for range tt.want {
			got += fmt.Sprint(slices.Index(c.all, c.choose(tt.bytes)))
		}
		if got != tt.want {
			t.Errorf("%d bytes, loads %v: got transports %s, want %s", tt.bytes, tt.loads, got, tt.want)
		}
	}
}

// TestCallCountsLoad checks the load of a transport during a call, and after it.
func TestCallCountsLoad(t *testing.T) {
	for _, tt := range []struct {
		args, result int
		pieces       int // of the buffer for the result
		want         [2]int64
	}{{4096, 0, 1, [2]int64{1, 0}}, {0, 1 << 20, 4, [2]int64{0, 65}}, {bulkBytes, 0, 1, [2]int64{0, 5}}} {
		c := &connected(t, 2).transports
		ctx, cancel := context.WithTimeout(context.Background(), kit.Timeout)
		var during [2]int64
		k := &loadKeeper{ctx, func() {
			for i := range during {
				during[i] = c.all[i].load.Load()
			}
		}}
		args := sunrpc.AppendUint64(sunrpc.AppendOpaque(nil, []byte("the file")), 0)
		args = sunrpc.AppendUint32(sunrpc.AppendUint32(args, uint32(tt.args)), 0)
		args = sunrpc.AppendUint32(args, uint32(tt.args))
		m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcWrite), Cred: noCred,
			Args: args, ArgDataPos: len(args), ArgData: make([]byte, tt.args), ResultData: make([]byte, tt.result)}
		if tt.pieces > 1 {
			m.ResultPieces = slices.Collect(slices.Chunk(m.ResultData, tt.result/tt.pieces))
			m.ResultData = nil
		}
		if err := c.Call(k, &m); err != nil {
			t.Error(err)
		}
		cancel()
		if during != tt.want || c.all[0].load.Load() != 0 || c.all[1].load.Load() != 0 {
			t.Errorf("%d and %d bytes in %d pieces: got loads %v, and %d, %d after the call; want %v, and none",
				tt.args, tt.result, tt.pieces, during, c.all[0].load.Load(), c.all[1].load.Load(), tt.want)
		}
	}
}

// A loadKeeper is the context of a call. It calls keep before the call is sent.
type loadKeeper struct {
	context.Context
	keep func()
}

func (k *loadKeeper) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) { return sunrpc.CallID{}, false }
func (k *loadKeeper) KeepCall(*sunrpc.Message, sunrpc.CallID)        { k.keep() }

// TestChooseDoesNotAllocate checks the hot path of calls over several transports.
func TestChooseDoesNotAllocate(t *testing.T) {
	c := &connected(t, 3).transports
	if n := testing.AllocsPerRun(100, func() { c.choose(bulkBytes); c.choose(0) }); n != 0 {
		t.Errorf("got %v allocations, want 0", n)
	}
}

// TestMountsShareConnectLimits checks that a mount with 16 connections connects without delay, and
// that the limits then apply to the next mount, whose error names the configuration key.
func TestMountsShareConnectLimits(t *testing.T) {
	server := startNullServer(t)
	common := &shared{connects: xprt.NewConnectLimits(1)}
	connect := func(n int, timeout time.Duration) error {
		s := &mountStack{provider: softiwarp.New(softiwarp.Config{}), address: server, shared: common}
		s.opts.NConnect = n
		t.Cleanup(s.transports.close)
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return s.connect(ctx, hclog.NewNullLogger())
	}
	kit.Must(t, connect(16, time.Minute))
	const want = "connect 127.0.0.1: too many other connects to this address wait (connect_rate = 1 per second); " +
		"mount again later, or increase connect_rate"
	if err := connect(16, 3*time.Second); err == nil || err.Error() != want {
		t.Errorf("16 further connects in 3 s: got error %v, want %v", err, want)
	}
}
