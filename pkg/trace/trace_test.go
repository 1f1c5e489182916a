package trace

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"
)

func status(s uint8) string { return []string{"success", "flushed"}[s] }

func TestRingKeepsTheLast(t *testing.T) {
	r := NewRing(8, status)
	for i := range 20 {
		r.Add(Event{Kind: Map, N: uint16(i), XID: 7, MR: 3, Handle: 0x1234, A: uint64(i) << 40, B: ^uint64(0)})
	}
	events, next, lost := r.Read(5, nil)
	if len(events) != 8 || next != 20 || lost != 7 {
		t.Fatalf("%d events, next %d, %d lost; want 8, 20, 7", len(events), next, lost)
	}
	for i, e := range events {
		if n := uint64(12 + i); e.Seq != n || e.N != uint16(n) || e.A != n<<40 || e.B != ^uint64(0) || e.XID != 7 ||
			e.MR != 3 || e.Handle != 0x1234 {
			t.Errorf("event %d: %+v", n, e)
		}
		if i > 0 && e.Time.Before(events[i-1].Time) {
			t.Errorf("event %d is older than the one before", e.Seq)
		}
	}
	if last := r.Last(3); len(last) != 3 || last[2].Seq != 19 {
		t.Errorf("Last(3) = %+v", last)
	}
	if events, next, lost := r.Read(20, nil); len(events) != 0 || next != 20 || lost != 0 {
		t.Errorf("at the end: %d events, next %d, %d lost", len(events), next, lost)
	}
}

func TestNilRingIsOff(t *testing.T) {
	var r *Ring
	r.Add(Event{Kind: Map})
	if events, _, _ := r.Read(0, nil); len(events)+len(r.Last(5)) != 0 || r.Next() != 0 || NewRing(0, nil) != nil {
		t.Error("a nil ring has events")
	}
}

// TestConcurrentEventsAreWhole reads while many write: every event that comes out is one that went
// in, in order, and those that do not come out are counted.
func TestConcurrentEventsAreWhole(t *testing.T) {
	const writers, each = 8, 20000
	r := NewRing(256, status)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				v := uint64(w)<<32 | uint64(i)
				r.Add(Event{Kind: FastReg, N: uint16(i), XID: uint32(w), MR: uint32(i), Handle: uint32(w), A: v, B: ^v})
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	var from, got, lostAll uint64
	var events []Event
	for finished := false; ; {
		select {
		case <-done:
			finished = true
		default:
		}
		var lost uint64
		was := from
		events, from, lost = r.Read(from, events[:0])
		if from-was != uint64(len(events))+lost {
			t.Fatalf("from %d to %d: %d events and %d lost", was, from, len(events), lost)
		}
		for _, e := range events {
			if v := uint64(e.XID)<<32 | uint64(e.MR); e.A != v || e.B != ^v || e.N != uint16(e.MR) ||
				e.Handle != e.XID || e.Kind != FastReg {
				t.Fatalf("torn event: %+v", e)
			}
		}
		got, lostAll = got+uint64(len(events)), lostAll+lost
		if finished && from == r.Next() {
			break
		}
	}
	if got+lostAll != writers*each {
		t.Errorf("%d read and %d lost of %d", got, lostAll, writers*each)
	}
	if got == 0 {
		t.Error("nothing was read")
	}
}

// Events that were dropped are counted as lost, and hide none of those behind them from who
// follows.
func TestDroppedEventsAreNotWaitedFor(t *testing.T) {
	const size = 8
	r := NewRing(size, status)
	for i := range size {
		r.Add(Event{Kind: Map, N: uint16(i)})
	}
	_, from, _ := r.Read(0, nil)
	// The writer of event 2 has not come to its end when the ring comes round.
	r.cells[2].lap.Store(2*2 + 1)
	for i := size; i < size+4; i++ {
		r.Add(Event{Kind: Map, N: uint16(i)})
	}
	events, next, lost := r.Read(from, nil)
	if r.Dropped() != 1 || lost != 1 || next != size+4 || len(events) != 3 || events[1].Seq != size+1 ||
		events[2].Seq != size+3 {
		t.Errorf("%d dropped, %d lost, next %d, events %+v", r.Dropped(), lost, next, events)
	}
	if last := r.Last(2); len(last) != 1 || last[0].Seq != size+3 {
		t.Errorf("Last(2) = %+v", last)
	}
	// It ends, and its cell is used again. An event that is on its way, in the cell of one that was
	// dropped, is still waited for.
	r.cells[2].lap.Store(2*2 + 2)
	for range size - 2 {
		r.Add(Event{Kind: Map})
	}
	late := r.next.Add(1) - 1 // of a writer that has its number and not yet its cell
	if late != 2*size+2 {
		t.Fatalf("event %d", late)
	}
	r.Add(Event{Kind: Map})
	if events, next, lost := r.Read(next, nil); len(events) != size-2 || next != late || lost != 0 {
		t.Errorf("with one on its way: %d events, next %d, %d lost", len(events), next, lost)
	}
}

func TestForms(t *testing.T) {
	r := NewRing(1, status)
	seen := map[string]bool{}
	for k := None; k < kinds; k++ {
		if k.String() == "" || seen[k.String()] {
			t.Errorf("kind %d has no name of its own: %q", k, k)
		}
		seen[k.String()] = true
	}
	e := Event{Kind: WCLocalInv, Status: 1, XID: 0xbeef, MR: 2, Handle: 0x100}
	if text := r.Text(&e); !strings.Contains(text, "wc_li") ||
		!strings.Contains(text, "xid=0xbeef mr=2 handle=0x100 status=flushed") {
		t.Errorf("text %q", text)
	}
	var m map[string]any
	if err := json.Unmarshal(r.JSON(&e), &m); err != nil || m["event"] != "wc_li" || m["xid"] != "0xbeef" ||
		m["mr"] != 2.0 || m["status"] != "flushed" {
		t.Errorf("json %s: %v", r.JSON(&e), err)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	r := NewRing(64, status)
	if n := testing.AllocsPerRun(1000, func() { r.Add(Event{Kind: Map, XID: 1}) }); n != 0 {
		t.Errorf("%v allocations per event", n)
	}
}

func BenchmarkAdd(b *testing.B) {
	b.Run("on", func(b *testing.B) {
		r := NewRing(1024, status)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				r.Add(Event{Kind: Map, XID: 1, MR: 2})
			}
		})
	})
	b.Run("off", func(b *testing.B) {
		var r *Ring
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				r.Add(Event{Kind: Map, XID: 1, MR: 2})
			}
		})
	})
}
