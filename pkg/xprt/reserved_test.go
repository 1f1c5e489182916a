package xprt

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A keeper is the context of one call that keeps the ID of the call.
type keeper struct {
	context.Context
	earlier *sunrpc.CallID // nil for a new call
	keep    func()         // called by KeepCall; may be nil
	asked   int
	kept    []sunrpc.CallID
}

func (k *keeper) KeptCall(*sunrpc.Message) (sunrpc.CallID, bool) {
	k.asked++
	if k.earlier == nil {
		return sunrpc.CallID{}, false
	}
	return *k.earlier, true
}

func (k *keeper) KeepCall(m *sunrpc.Message, id sunrpc.CallID) {
	if m.XID != id.XID {
		panic("KeepCall: the ID is not that of the message")
	}
	if k.keep != nil {
		k.keep()
	}
	k.kept = append(k.kept, id)
}

// create is a CREATE, which servers must not execute twice.
func create() *sunrpc.Message {
	return &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 8, Cred: noCred, Args: fill(0, 40)}
}

// reservedXID returns the n-th XID for slot i of a transport with few slots.
func reservedXID(i, n uint32) uint32 { return 0x5a000000 + n<<10 + i }

// reserving changes a configuration to 4 slots with the given XIDs of earlier calls.
func reserving(xids ...uint32) func(*Config, *stepServer) {
	return func(c *Config, _ *stepServer) { c.Reserved = xids }
}

// repeatCall starts a CREATE of an earlier process.
func (b *bubble) repeatCall(xid uint32) *pending {
	return b.startWith(create(), func(ctx context.Context, m *sunrpc.Message) error { return b.tr.Repeat(ctx, m, xid) })
}

// xids returns the XIDs of the calls at the server so far.
func (b *bubble) xids() (all []uint32) {
	for _, c := range b.calls {
		all = append(all, c.Header.XID)
	}
	return all
}

// usableSlots returns how many calls can run at once.
func (b *bubble) usableSlots() int {
	b.handleWith(drop)
	before := len(b.calls)
	for range MinSlots {
		b.start(create())
	}
	return len(b.calls) - before
}

// TestRepeatedCallHasSameXID closes a transport whose call has no reply, and repeats the call on
// the next transport. Both calls must be the same bytes with the same XID. The ID of a call is kept
// once, before the call is sent.
func TestRepeatedCallHasSameXID(t *testing.T) {
	for _, m := range []*sunrpc.Message{create(), echo(1, fill(0, 8), 8), echo(1, fill(0, 9000), 9000)} {
		inBubble(t, func(c *Config, _ *stepServer) { c.Index = 7 }, func(t *testing.T, b *bubble) {
			b.handleWith(drop)
			former := &keeper{Context: t.Context(), keep: func() {
				settle()
				if n := len(b.calls); n > 0 {
					t.Errorf("calls at the server before KeepCall returns: got %d, want 0", n)
				}
			}}
			go func() {
				time.Sleep(time.Second)
				b.tr.Close()
			}()
			if err := b.tr.Call(former, m); !errors.Is(err, ErrClosed) {
				t.Fatalf("first call: got %v, want ErrClosed", err)
			}
			if len(former.kept) != 1 || former.kept[0].Conn != 7 || former.asked != 1 {
				t.Fatalf("first call: kept %v, asked %d times; want one ID of transport 7, once", former.kept,
					former.asked)
			}
			id := former.kept[0]
			b.cfg.Reserved = []uint32{id.XID}
			b.open()
			lost := b.qp()
			b.handleWith(func(c *stepCall) outcome {
				if c.qp == lost {
					return disconnected
				}
				return answered
			})
			again := &keeper{Context: t.Context(), earlier: &id}
			if err := b.tr.Call(again, m); err != nil && !isMalformed(err) { // the server writes no long reply
				t.Fatalf("repeated call: %v", err)
			}
			if !slices.Equal(again.kept, former.kept) || again.asked != 1 {
				t.Errorf("repeated call: kept %v, asked %d times; want %v, once", again.kept, again.asked, former.kept)
			}
			if got := b.xids(); !slices.Equal(got, []uint32{id.XID, id.XID, id.XID}) ||
				!bytes.Equal(b.calls[0].body, b.calls[1].body) || !bytes.Equal(b.calls[0].body, b.calls[2].body) {
				t.Errorf("XIDs at the server: got %#x, want three equal calls with %#x", got, id.XID)
			}
			next := create()
			if b.mustSucceed(next); next.XID == id.XID {
				t.Errorf("next call: got XID %#x, want another", next.XID)
			}
		})
	}
}

// TestRepeatedCallsShareSlot repeats two calls that an earlier process made in one slot, at the
// same time. The second call waits until the slot of the first is free.
func TestRepeatedCallsShareSlot(t *testing.T) {
	want := []uint32{reservedXID(1, 1), reservedXID(1, 2)}
	inBubble(t, reserving(want...), func(t *testing.T, b *bubble) {
		hold := make(chan struct{})
		b.handleWith(answerAfter(hold))
		first, second := b.repeatCall(want[0]), b.repeatCall(want[1])
		calls := b.tr.Calls()
		if len(calls) != 2 || calls[0].Slot < 0 && calls[1].Slot < 0 || len(b.calls) != 1 ||
			b.tr.Stats().SlotsInUse != 1 {
			t.Errorf("pending calls: got %+v; want the first in slot 1, and the second waiting for the slot", calls)
		}
		close(hold)
		settle()
		if !first.done || !second.done || first.err != nil || second.err != nil || !slices.Equal(b.xids(), want) {
			t.Errorf("got returned %v, %v, XIDs %#x; want %#x", first.done, second.done, b.xids(), want)
		}
		if n := b.tr.Stats().SlotsInUse; n != 0 {
			t.Errorf("slots in use after the calls: got %d, want 0", n)
		}
	})
}

// TestReservedSlotsAreLimited reserves more XIDs than possible. At most half of the slots is
// reserved. The slot of the keepalive call, and slots that do not exist, are not reserved. A call
// with a reserved XID has this XID. Other calls, and those after ReleaseReserved, have random XIDs
// of other slots: an XID near that of an earlier call could be the XID of another earlier call.
func TestReservedSlotsAreLimited(t *testing.T) {
	for _, c := range []struct {
		name       string
		xids, want []uint32 // to reserve, and reserved
		free       int
	}{
		{"none", nil, nil, 4},
		{"half", []uint32{0x100, 0x101}, []uint32{0x100, 0x101}, 2},
		{"more than half", []uint32{0x103, 0x101, 0x100, 0x102}, []uint32{0x103, 0x101}, 2},
		{"more XIDs of the same slots", []uint32{0x100, 0x101, 0x108, 0x102, 0x111},
			[]uint32{0x100, 0x101, 0x108, 0x111}, 2},
		{"equal XIDs", []uint32{0x100, 0x100, 0x100}, []uint32{0x100}, 3},
		{"XID 0", []uint32{0}, []uint32{0}, 3},
		{"keepalive slot", []uint32{0x104}, nil, 4},
		{"slots that do not exist", []uint32{0x105, 0x106, 0x107, 0xffffffff}, nil, 4},
	} {
		inBubble(t, reserving(c.xids...), func(t *testing.T, b *bubble) {
			used := make(map[uint32]bool) // slots of reserved XIDs
			for _, xid := range append(slices.Clone(c.xids), 0x110) {
				p := b.repeatCall(xid)
				if got := p.XID == xid; !p.done || p.err != nil || got != slices.Contains(c.want, xid) {
					t.Errorf("%s: call %#x: got returned %v, %v, XID %#x", c.name, xid, p.done, p.err, p.XID)
				}
				used[xid&7] = used[xid&7] || p.XID == xid
			}
			for range 8 {
				m := create()
				if b.mustSucceed(m); used[m.XID&7] || m.XID < 0x10000 {
					t.Errorf("%s: new call: got XID %#x, want a random one of another slot", c.name, m.XID)
				}
			}
			before := len(b.calls)
			if got := b.usableSlots(); got != c.free {
				t.Errorf("%s: slots of other calls: got %d, want %d", c.name, got, c.free)
			}
			b.tr.ReleaseReserved()
			b.tr.ReleaseReserved()
			settle() // the waiting calls take the released slots
			if got := len(b.calls) - before; got != MinSlots {
				t.Errorf("%s: slots after the release: got %d, want %d", c.name, got, MinSlots)
			}
			for _, xid := range b.xids()[before:] {
				if xid < 0x10000 {
					t.Errorf("%s: new call: got XID %#x, want a random one", c.name, xid)
				}
			}
		})
	}
}

// TestOtherCallsAreNew checks calls with the ID of another transport, and calls that were not asked
// for their ID: they get another XID.
func TestOtherCallsAreNew(t *testing.T) {
	xid := reservedXID(1, 1)
	inBubble(t, func(c *Config, _ *stepServer) { c.Reserved, c.Index = []uint32{xid}, 2 },
		func(t *testing.T, b *bubble) {
			other, same := &sunrpc.CallID{Conn: 1, XID: xid}, &sunrpc.CallID{Conn: 2, XID: xid}
			for name, call := range map[string]func(m *sunrpc.Message) error{
				"transport": func(m *sunrpc.Message) error {
					return b.tr.Call(&keeper{Context: t.Context(), earlier: other}, m)
				},
				"CallNew": func(m *sunrpc.Message) error {
					return b.tr.CallNew(&keeper{Context: t.Context(), earlier: same}, m)
				},
			} {
				m := create()
				if err := call(m); err != nil || m.XID&7 == xid&7 {
					t.Errorf("%s: got %v, XID %#x; want an XID of another slot", name, err, m.XID)
				}
			}
		})
}

// TestWaitForReservedSlotEnds has a reserved slot in use. A second call that waits for it ends with
// its context, with the timeout of a soft mount, and with Close. After ReleaseReserved it is a new
// call.
func TestWaitForReservedSlotEnds(t *testing.T) {
	var interrupted *InterruptedError
	xid := reservedXID(1, 1)
	for _, c := range []struct {
		name    string
		end     func(b *bubble, p *pending)
		isRight func(p *pending) bool
	}{
		{"context", func(_ *bubble, p *pending) { p.interrupt() }, func(p *pending) bool {
			return errors.As(p.err, &interrupted) && errors.Is(p.err, context.Canceled)
		}},
		{"Close", func(b *bubble, _ *pending) { b.tr.Close() }, func(p *pending) bool {
			return errors.Is(p.err, ErrClosed)
		}},
		{"soft timeout", func(*bubble, *pending) { sleep(62 * time.Second) }, func(p *pending) bool {
			return isTimeout(p.err)
		}},
		{"release", func(b *bubble, _ *pending) {
			b.handleWith(nil)
			b.tr.ReleaseReserved()
		}, func(p *pending) bool { return p.err == nil && p.XID != xid }},
	} {
		inBubble(t, func(cfg *Config, _ *stepServer) { cfg.Reserved, cfg.Recovery = []uint32{xid}, Soft },
			func(t *testing.T, b *bubble) {
				b.handleWith(drop)
				b.repeatCall(xid)
				p := b.repeatCall(xid)
				if p.done {
					t.Errorf("%s: the call did not wait: %v", c.name, p.err)
				}
				c.end(b, p)
				settle()
				if !p.done || !c.isRight(p) {
					t.Errorf("%s: got returned %v, %v, XID %#x", c.name, p.done, p.err, p.XID)
				}
			})
	}
}

// TestInterruptedRepeatedCall interrupts a repeated call, and releases the slots before or after
// the late reply. The slot is in use until the late reply, and then it is reserved or free, once.
func TestInterruptedRepeatedCall(t *testing.T) {
	xid := reservedXID(1, 1)
	for _, releaseFirst := range []bool{false, true} {
		inBubble(t, reserving(xid), func(t *testing.T, b *bubble) {
			hold := make(chan struct{})
			b.handleWith(answerAfter(hold))
			p := b.repeatCall(xid)
			p.interrupt()
			if s := b.tr.Stats(); !p.done || s.SlotsInUse != 1 {
				t.Errorf("before the late reply: got returned %v, %d slots in use; want true, 1", p.done, s.SlotsInUse)
			}
			if releaseFirst {
				b.tr.ReleaseReserved()
			}
			close(hold)
			settle()
			again := b.repeatCall(xid)
			if !again.done || again.err != nil || again.XID == xid == releaseFirst {
				t.Errorf("released first %v: repeated again: got returned %v, %v, XID %#x", releaseFirst, again.done,
					again.err, again.XID)
			}
			b.tr.ReleaseReserved()
			if n := b.usableSlots(); n != MinSlots {
				t.Errorf("released first %v: got %d usable slots, want %d", releaseFirst, n, MinSlots)
			}
		})
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
	for round := range 10 {
		tr := dial(t, addr, func(c *Config) { c.Slots, c.Reserved = 4, xids })
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
		kit.Eventually(t, "4 free slots", func() bool { return len(tr.free.idle) == 4 && tr.Stats().SlotsInUse == 0 })
		tr.Close()
	}
}
