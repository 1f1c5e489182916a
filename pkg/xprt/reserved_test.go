package xprt

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A keeper is the context of one call that keeps the ID of the call.
type keeper struct {
	context.Context
	earlier *sunrpc.CallID // nil for a new call

	mu    sync.Mutex // guards the fields below
	asked int
	kept  []sunrpc.CallID
}

func (k *keeper) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked++
	if k.earlier == nil {
		return sunrpc.CallID{}, false
	}
	return *k.earlier, true
}

func (k *keeper) KeepCall(m *sunrpc.Message, id sunrpc.CallID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.XID != id.XID {
		panic("KeepCall: the ID is not that of the message")
	}
	k.kept = append(k.kept, id)
}

// ids returns the IDs that were kept so far.
func (k *keeper) ids() []sunrpc.CallID {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.kept)
}

// An xidServer records the calls that it executes.
type xidServer struct {
	service
	gate chan struct{} // calls wait here; nil if they do not wait

	mu    sync.Mutex // guards calls
	calls [][]byte
}

func (x *xidServer) ServeRPC(ctx context.Context, peer netip.AddrPort, call, reply []byte) ([]byte, error) {
	x.mu.Lock()
	x.calls = append(x.calls, bytes.Clone(call))
	x.mu.Unlock()
	if x.gate != nil {
		select {
		case <-x.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return x.service.ServeRPC(ctx, peer, call, reply)
}

// received returns the calls so far.
func (x *xidServer) received() [][]byte {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.calls)
}

// xids returns the XIDs of the calls so far.
func (x *xidServer) xids() (xids []uint32) {
	for _, c := range x.received() {
		xids = append(xids, binary.BigEndian.Uint32(c))
	}
	return xids
}

// create is a CREATE, which servers must not execute twice.
func create() *sunrpc.Message {
	return &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 8, Cred: noCred, Args: fill(0, 40)}
}

// reservedXID returns the n-th XID for slot i of a transport with few slots.
func reservedXID(i, n uint32) uint32 { return 0x5a000000 + n<<10 + i }

// slots changes a configuration to 4 slots with the given XIDs.
func slots(xids ...uint32) func(*Config) {
	return func(c *Config) { c.Slots, c.Reserved = 4, xids }
}

// TestRepeatedCallHasSameXID closes a transport whose call has no reply, and repeats the call on
// the next transport. Both calls must be the same bytes with the same XID. The server executes a
// CREATE once and answers the second call from its cache. It executes other calls twice.
func TestRepeatedCallHasSameXID(t *testing.T) {
	for _, c := range []struct {
		name    string
		m       func() *sunrpc.Message
		execute int
	}{
		{"CREATE", create, 1},
		{"echo", func() *sunrpc.Message { return echo(1, fill(0, 8), 8) }, 2},
		{"echo of a read chunk", func() *sunrpc.Message { return echo(1, fill(0, 9000), 9000) }, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			var replies atomic.Int64
			var cut atomic.Bool
			hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
				replies.Add(1)
				if cut.Load() {
					return svcrdma.Drop
				}
				return svcrdma.Send
			}}
			srv := &xidServer{}
			addr := serve(t, svcrdma.Config{Handler: srv, Hooks: hooks})
			cut.Store(true)
			former := &keeper{Context: context.Background()}
			first := dial(t, addr, func(c *Config) { c.Index = 7 })
			returned := make(chan error, 1)
			go func() { returned <- first.Call(former, c.m()) }()
			kit.Eventually(t, "reply that is lost", func() bool { return replies.Load() == 1 })
			first.Close()
			if err := <-returned; !errors.Is(err, ErrClosed) {
				t.Fatalf("first call: got %v, want ErrClosed", err)
			}
			cut.Store(false)
			kept := former.ids()
			if len(kept) != 1 || kept[0].Conn != 7 || former.asked != 1 {
				t.Fatalf("first call: kept %v, asked %d times; want one ID of transport 7, once", kept, former.asked)
			}
			second := dial(t, addr, func(c *Config) { c.Index, c.Reserved = 7, []uint32{kept[0].XID} })
			again := &keeper{Context: testContext(t), earlier: &kept[0]}
			if err := second.Call(again, c.m()); err != nil {
				t.Fatalf("repeated call: %v", err)
			}
			if !slices.Equal(again.ids(), kept) || again.asked != 1 {
				t.Errorf("repeated call: kept %v, asked %d times; want %v, once", again.ids(), again.asked, kept)
			}
			calls := srv.received()
			if len(calls) != c.execute || !bytes.Equal(calls[0], calls[c.execute-1]) {
				t.Errorf("calls at the server: got %x, want %d equal ones", calls, c.execute)
			}
			if got := srv.xids(); got[0] != kept[0].XID {
				t.Errorf("XID at the server: got %#x, want %#x", got[0], kept[0].XID)
			}
			m := c.m()
			if err := second.Call(testContext(t), m); err != nil || m.XID == kept[0].XID {
				t.Errorf("next call: got %v, XID %#x; want another XID", err, m.XID)
			}
		})
	}
}

// TestRepeatedCallsShareSlot repeats two calls that an earlier process made in one slot, at the
// same time. The second call waits until the slot of the first is free.
func TestRepeatedCallsShareSlot(t *testing.T) {
	srv := &xidServer{gate: make(chan struct{})}
	want := []uint32{reservedXID(1, 1), reservedXID(1, 2)}
	tr := dial(t, serve(t, svcrdma.Config{Handler: srv}), slots(want...))
	errs := make(chan error, len(want))
	for i, xid := range want {
		go func() { errs <- tr.Repeat(testContext(t), create(), xid) }()
		kit.Eventually(t, "call", func() bool { return len(tr.Calls()) == i+1 })
	}
	kit.Eventually(t, "call at the server", func() bool { return len(srv.xids()) == 1 })
	calls := tr.Calls()
	if calls[0].XID != want[0] || calls[0].Slot != 1 || calls[1].XID != 0 || calls[1].Waits != WaitSlot {
		t.Errorf("pending calls: got %+v; want the first in slot 1, and the second waiting for the slot", calls)
	}
	if n := tr.Stats().SlotsInUse; n != 1 {
		t.Errorf("slots in use: got %d, want 1", n)
	}
	close(srv.gate)
	for range want {
		if err := <-errs; err != nil {
			t.Errorf("repeated call: %v", err)
		}
	}
	if got := srv.xids(); !slices.Equal(got, want) {
		t.Errorf("XIDs at the server: got %#x, want %#x", got, want)
	}
	if s := tr.Stats(); len(tr.free) != 3 || s.SlotsInUse != 0 {
		t.Errorf("after the calls: got %d free slots, %d in use; want 3, 0", len(tr.free), s.SlotsInUse)
	}
}

// TestReleaseReserved releases an idle slot, a slot in use, and one whose repeated call has ended.
// Each must reach the free list once, and its next call must have a random XID.
func TestReleaseReserved(t *testing.T) {
	srv := &xidServer{gate: make(chan struct{})}
	idle, busy := reservedXID(0, 1), reservedXID(2, 1)
	tr := dial(t, serve(t, svcrdma.Config{Handler: srv}), slots(idle, busy))
	returned := make(chan error, 1)
	go func() { returned <- tr.Repeat(testContext(t), create(), busy) }()
	kit.Eventually(t, "call at the server", func() bool { return len(srv.xids()) == 1 })
	if s := tr.Stats(); len(tr.free) != 2 || s.SlotsInUse != 1 {
		t.Errorf("before: got %d free slots, %d in use; want 2, 1", len(tr.free), s.SlotsInUse)
	}
	for range 2 {
		tr.ReleaseReserved()
		if s := tr.Stats(); len(tr.free) != 3 || s.SlotsInUse != 1 {
			t.Errorf("after release: got %d free slots, %d in use; want 3, 1", len(tr.free), s.SlotsInUse)
		}
	}
	close(srv.gate)
	if err := <-returned; err != nil {
		t.Errorf("repeated call: %v", err)
	}
	if s := tr.Stats(); len(tr.free) != 4 || s.SlotsInUse != 0 {
		t.Errorf("at the end: got %d free slots, %d in use; want 4, 0", len(tr.free), s.SlotsInUse)
	}
	// An XID near that of an earlier call could be the XID of another earlier call.
	near := func(xid uint32) bool { return xid-busy < 100*tr.xidStep || xid-idle < 100*tr.xidStep }
	for range 8 {
		m := create()
		if err := tr.Repeat(testContext(t), m, busy); err != nil || near(m.XID) {
			t.Errorf("call after release: got %v, XID %#x; want one far from %#x", err, m.XID, busy)
		}
	}
}

// TestXIDAfterRepeatedCall checks the XIDs in a slot: that of the repeated call, and then random
// ones, before and after the release.
func TestXIDAfterRepeatedCall(t *testing.T) {
	xid := reservedXID(3, 1)
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), slots(xid))
	for range 2 {
		m := create()
		if err := tr.Repeat(testContext(t), m, xid); err != nil || m.XID != xid {
			t.Errorf("repeated call: got %v, XID %#x; want %#x", err, m.XID, xid)
		}
		if got := tr.slots[3].xid; got-xid < 100*tr.xidStep || tr.slotOf(got) != tr.slots[3] {
			t.Errorf("XID of the slot after the call: got %#x, want a random one of the slot", got)
		}
	}
}

// TestInterruptedRepeatedCall interrupts a repeated call, and releases the slots before or after
// the late reply. The slot is in use until the late reply, and then it is reserved or free, once.
func TestInterruptedRepeatedCall(t *testing.T) {
	for _, releaseFirst := range []bool{false, true} {
		srv := &xidServer{gate: make(chan struct{})}
		xid := reservedXID(1, 1)
		tr := dial(t, serve(t, svcrdma.Config{Handler: srv}), slots(xid))
		ctx, cancel := context.WithCancel(context.Background())
		returned := make(chan error, 1)
		go func() { returned <- tr.Repeat(ctx, create(), xid) }()
		kit.Eventually(t, "call at the server", func() bool { return len(srv.xids()) == 1 })
		cancel()
		var interrupted *InterruptedError
		if err := <-returned; !errors.As(err, &interrupted) {
			t.Fatalf("interrupted call: got %v, want an InterruptedError", err)
		}
		if s := tr.Stats(); len(tr.free) != 3 || s.SlotsInUse != 1 {
			t.Errorf("before the late reply: got %d free slots, %d in use; want 3, 1", len(tr.free), s.SlotsInUse)
		}
		if releaseFirst {
			tr.ReleaseReserved()
		}
		close(srv.gate)
		kit.Eventually(t, "late reply", func() bool { return tr.Stats().SlotsInUse == 0 })
		if !releaseFirst {
			if n := len(tr.free); n != 3 {
				t.Errorf("after the late reply: got %d free slots, want 3", n)
			}
			m := create()
			if err := tr.Repeat(testContext(t), m, xid); err != nil || m.XID != xid {
				t.Errorf("call that is repeated again: got %v, XID %#x; want %#x", err, m.XID, xid)
			}
			tr.ReleaseReserved()
		}
		if n := len(tr.free); n != 4 {
			t.Errorf("at the end, released first %v: got %d free slots, want 4", releaseFirst, n)
		}
	}
}

// TestReservedSlotsAreLimited reserves more XIDs than possible. At most half of the slots is
// reserved. The slot of the keepalive call, and slots that do not exist, are not reserved.
func TestReservedSlotsAreLimited(t *testing.T) {
	for _, c := range []struct {
		name  string
		slots int
		xids  []uint32
		want  []uint32 // XIDs that are reserved
		free  int
		logs  bool
	}{
		{"none", 4, nil, nil, 4, false},
		{"half", 4, []uint32{0x100, 0x101}, []uint32{0x100, 0x101}, 2, false},
		{"more than half", 4, []uint32{0x103, 0x101, 0x100, 0x102}, []uint32{0x103, 0x101}, 2, true},
		{"half of an odd number", 5, []uint32{0x100, 0x101, 0x102}, []uint32{0x100, 0x101}, 3, true},
		{"more XIDs of the same slots", 4, []uint32{0x100, 0x101, 0x108, 0x102, 0x111},
			[]uint32{0x100, 0x101, 0x108, 0x111}, 2, true},
		{"equal XIDs", 4, []uint32{0x100, 0x100, 0x100}, []uint32{0x100}, 3, false},
		{"XID 0", 4, []uint32{0}, []uint32{0}, 3, false},
		{"keepalive slot", 4, []uint32{0x104}, nil, 4, true},
		{"slots that do not exist", 4, []uint32{0x105, 0x106, 0x107, 0xffffffff}, nil, 4, true},
	} {
		var log bytes.Buffer
		tr := unconnected(t, func(cfg *Config) {
			cfg.Slots, cfg.Reserved = c.slots, c.xids
			cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
		})
		var got []uint32
		for xid, s := range tr.reserved.byXID {
			got = append(got, xid)
			if s != tr.slotOf(xid) || len(s.reserved) != 1 {
				t.Errorf("%s: XID %#x has slot %d with %d in its list, want its slot with 1", c.name, xid, s.index,
					len(s.reserved))
			}
		}
		slices.Sort(got)
		slices.Sort(c.want)
		if n := tr.Stats().SlotsInUse; !slices.Equal(got, c.want) || len(tr.free) != c.free || n != 0 {
			t.Errorf("%s: got XIDs %#x, %d free slots, %d in use; want %#x, %d, 0", c.name, got, len(tr.free), n,
				c.want, c.free)
		}
		if logs := log.Len() > 0; logs != c.logs {
			t.Errorf("%s: got log %q, want one: %v", c.name, &log, c.logs)
		}
		tr.ReleaseReserved()
		if len(tr.free) != c.slots || len(tr.pingSlot) != 1 {
			t.Errorf("%s: after release: got %d free slots, %d for keepalive calls; want %d, 1", c.name, len(tr.free),
				len(tr.pingSlot), c.slots)
		}
	}
}

// TestOtherCallsAreNew checks calls without a reserved XID: they get an XID of a free slot.
func TestOtherCallsAreNew(t *testing.T) {
	xid := reservedXID(1, 1)
	tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(c *Config) { slots(xid)(c); c.Index = 2 })
	for _, c := range []struct {
		name string
		call func(m *sunrpc.Message) error
	}{
		{"unknown XID", func(m *sunrpc.Message) error { return tr.Repeat(testContext(t), m, xid+tr.xidStep) }},
		{"XID of another transport", func(m *sunrpc.Message) error {
			return tr.Call(&keeper{Context: testContext(t), earlier: &sunrpc.CallID{Conn: 1, XID: xid}}, m)
		}},
		{"new call", func(m *sunrpc.Message) error { return tr.Call(&keeper{Context: testContext(t)}, m) }},
		{"new call without a question", func(m *sunrpc.Message) error {
			return tr.CallNew(&keeper{Context: testContext(t), earlier: &sunrpc.CallID{Conn: 2, XID: xid}}, m)
		}},
	} {
		m := create()
		if err := c.call(m); err != nil || tr.slotOf(m.XID) == tr.slots[1] {
			t.Errorf("%s: got %v, XID %#x; want an XID of another slot", c.name, err, m.XID)
		}
	}
}

// TestWaitForReservedSlotEnds has a reserved slot in use. A second call that waits for it ends with
// its context, with the timeout of a soft mount, and with Close. After ReleaseReserved it is a new
// call.
func TestWaitForReservedSlotEnds(t *testing.T) {
	var interrupted *InterruptedError
	xid := reservedXID(1, 1)
	for _, c := range []struct {
		name    string
		end     func(tr *Transport, cancel context.CancelFunc)
		soft    bool
		isRight func(err error, got uint32) bool
	}{
		{"context", func(_ *Transport, cancel context.CancelFunc) { cancel() }, false,
			func(err error, _ uint32) bool {
				return errors.As(err, &interrupted) && errors.Is(err, context.Canceled)
			}},
		{"Close", func(tr *Transport, _ context.CancelFunc) { tr.Close() }, false,
			func(err error, _ uint32) bool { return errors.Is(err, ErrClosed) }},
		{"soft timeout", func(*Transport, context.CancelFunc) {}, true,
			func(err error, _ uint32) bool { return isTimeout(err) }},
		{"release", func(tr *Transport, _ context.CancelFunc) { tr.ReleaseReserved() }, false,
			func(err error, got uint32) bool { return err == nil && got&7 != 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := dial(t, serve(t, svcrdma.Config{Handler: &service{}}), func(cfg *Config) {
				slots(xid)(cfg)
				if c.soft {
					cfg.Recovery, cfg.Timeout = Soft, 300*time.Millisecond
				}
			})
			s := <-tr.slots[1].reserved // an earlier call
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			returned := make(chan error, 1)
			m := create()
			go func() { returned <- tr.Repeat(ctx, m, xid) }()
			kit.Eventually(t, "waiting call", func() bool { return len(tr.Calls()) == 1 })
			if got := tr.Calls()[0]; got.Waits != WaitSlot || got.Slot != -1 || got.Ctx != ctx {
				t.Errorf("waiting call: got %+v, want one that waits for a slot", got)
			}
			c.end(tr, cancel)
			if err := <-returned; !c.isRight(err, m.XID) {
				t.Errorf("waiting call: got %v, XID %#x", err, m.XID)
			}
			if n := len(tr.Calls()); n != 0 {
				t.Errorf("pending calls: got %d, want 0", n)
			}
			s.end()
			if n := len(s.reserved) + len(tr.free); n != 4 {
				t.Errorf("idle slots: got %d, want 4", n)
			}
		})
	}
}

// TestCallIsKeptOncePerCall loses the connection of a call with a kept ID. The transport sends the
// call again with the same XID, and keeps its ID once.
func TestCallIsKeptOncePerCall(t *testing.T) {
	var replies atomic.Int64
	hooks := svcrdma.Hooks{Reply: func(*rpcrdma.Header) svcrdma.Verdict {
		if replies.Add(1) == 1 {
			return svcrdma.Disconnect
		}
		return svcrdma.Send
	}}
	srv := &xidServer{}
	xid := reservedXID(1, 1)
	tr := dial(t, serve(t, svcrdma.Config{Handler: srv, Hooks: hooks}), slots(xid))
	k := &keeper{Context: testContext(t), earlier: &sunrpc.CallID{XID: xid}}
	if err := tr.Call(k, create()); err != nil {
		t.Fatal(err)
	}
	if want := []sunrpc.CallID{{XID: xid}}; !slices.Equal(k.ids(), want) || k.asked != 1 {
		t.Errorf("kept IDs: got %v, asked %d times; want %v, once", k.ids(), k.asked, want)
	}
	if s := tr.Stats(); s.Resends != 1 || !slices.Equal(srv.xids(), []uint32{xid}) {
		t.Errorf("got %d resends, calls %#x; want 1, one", s.Resends, srv.xids())
	}
}

// A blockedKeeper checks that no call is sent before KeepCall returns.
type blockedKeeper struct {
	context.Context
	srv *xidServer
	t   *testing.T
}

func (*blockedKeeper) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) { return sunrpc.CallID{}, false }

func (k *blockedKeeper) KeepCall(*sunrpc.Message, sunrpc.CallID) {
	time.Sleep(20 * time.Millisecond)
	if n := len(k.srv.xids()); n != 0 {
		k.t.Errorf("calls at the server before KeepCall returns: got %d, want 0", n)
	}
}

// TestCallIsKeptBeforeItIsSent delays KeepCall.
func TestCallIsKeptBeforeItIsSent(t *testing.T) {
	srv := &xidServer{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: srv}), nil)
	if err := tr.Call(&blockedKeeper{testContext(t), srv, t}, create()); err != nil || len(srv.xids()) != 1 {
		t.Errorf("got %v, %d calls at the server; want one", err, len(srv.xids()))
	}
}

// TestReleaseDuringCalls releases the slots while many calls are repeated and interrupted. Every
// slot must reach the free list once.
func TestReleaseDuringCalls(t *testing.T) {
	var xids []uint32
	for n := range uint32(8) {
		xids = append(xids, reservedXID(0, n), reservedXID(1, n))
	}
	addr := serve(t, svcrdma.Config{Handler: &service{}})
	for round := range 20 {
		tr := dial(t, addr, slots(xids...))
		var wg sync.WaitGroup
		for i, xid := range xids {
			wg.Go(func() {
				ctx, cancel := context.WithCancel(testContext(t))
				defer cancel()
				if i%3 == 0 {
					time.AfterFunc(time.Duration(i*100)*time.Microsecond, cancel)
				}
				var interrupted *InterruptedError
				if err := tr.Repeat(ctx, create(), xid); err != nil && !errors.As(err, &interrupted) {
					t.Errorf("repeated call: %v", err)
				}
			})
		}
		time.Sleep(time.Duration(round*50) * time.Microsecond)
		tr.ReleaseReserved()
		wg.Wait()
		kit.Eventually(t, "4 free slots", func() bool { return len(tr.free) == 4 && tr.Stats().SlotsInUse == 0 })
		tr.Close()
	}
}

// TestKeptCallsDoNotAllocate measures calls with a keeper.
func TestKeptCallsDoNotAllocate(t *testing.T) {
	tr := dial(t, startServerProcess(t), nil)
	ctx, m := &lastID{Context: context.Background()}, create()
	call := func() {
		if err := tr.Call(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 * DefaultSlots {
		call()
	}
	if n := testing.AllocsPerRun(200, call); n != 0 {
		t.Errorf("allocations per call: got %v, want 0", n)
	}
	if ctx.id.XID != m.XID {
		t.Errorf("kept XID: got %#x, want %#x", ctx.id.XID, m.XID)
	}
}

// A lastID keeps only the ID of the last call.
type lastID struct {
	context.Context
	id sunrpc.CallID
}

func (*lastID) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) { return sunrpc.CallID{}, false }

func (l *lastID) KeepCall(_ *sunrpc.Message, id sunrpc.CallID) { l.id = id }
