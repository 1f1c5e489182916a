package trace

import (
	_ "embed" // testdata
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
)

func status(s uint8) string { return []string{"success", "flushed"}[s] }

func TestRingKeepsNewestEvents(t *testing.T) {
	r := NewRing(8, status)
	for i := range 20 {
		r.Add(Event{Kind: Map, N: uint16(i), XID: 7, MR: 3, Handle: 0x1234, A: uint64(i) << 40, B: ^uint64(0)})
	}
	events, next, lost := r.Read(5, nil)
	if len(events) != 8 || next != 20 || lost != 7 {
		t.Fatalf("Read(5): got %d events, next %d, %d lost; want 8, 20, 7", len(events), next, lost)
	}
	for i, e := range events {
		if n := uint64(12 + i); e.Seq != n || e.N != uint16(n) || e.A != n<<40 || e.B != ^uint64(0) || e.XID != 7 ||
			e.MR != 3 || e.Handle != 0x1234 {
			t.Errorf("event %d: got %+v", n, e)
		}
		if i > 0 && e.Time.Before(events[i-1].Time) {
			t.Errorf("time of event %d: got %v, want at least %v", e.Seq, e.Time, events[i-1].Time)
		}
	}
	if last := r.Last(3); len(last) != 3 || last[2].Seq != 19 {
		t.Errorf("Last(3): got %+v, want 3 events up to 19", last)
	}
	if events, next, lost := r.Read(20, nil); len(events) != 0 || next != 20 || lost != 0 {
		t.Errorf("Read(20): got %d events, next %d, %d lost; want 0, 20, 0", len(events), next, lost)
	}
}

func TestNilRingRecordsNothing(t *testing.T) {
	var r *Ring
	r.Add(Event{Kind: Map})
	if events, _, _ := r.Read(0, nil); len(events)+len(r.Last(5)) != 0 || r.Next() != 0 || NewRing(0, nil) != nil {
		t.Error("nil ring: got events, want none")
	}
}

// TestConcurrentEventsAreWhole reads while many goroutines write. Read must return whole events in
// order and count the others as lost.
func TestConcurrentEventsAreWhole(t *testing.T) {
	const writers, each = 8, 5000
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
			t.Fatalf("Read from %d to %d: got %d events and %d lost", was, from, len(events), lost)
		}
		for _, e := range events {
			if v := uint64(e.XID)<<32 | uint64(e.MR); e.A != v || e.B != ^v || e.N != uint16(e.MR) ||
				e.Handle != e.XID || e.Kind != FastReg {
				t.Fatalf("got a torn event: %+v", e)
			}
		}
		got, lostAll = got+uint64(len(events)), lostAll+lost
		if finished && from == r.Next() {
			break
		}
	}
	if got+lostAll != writers*each {
		t.Errorf("got %d events and %d lost, want a sum of %d", got, lostAll, writers*each)
	}
	if got == 0 {
		t.Error("events read: got 0, want some")
	}
}

// TestReadSkipsDroppedEvents checks that a dropped event counts as lost and does not hide the
// events after it.
func TestReadSkipsDroppedEvents(t *testing.T) {
	const size = 8
	r := NewRing(size, status)
	for i := range size {
		r.Add(Event{Kind: Map, N: uint16(i)})
	}
	_, from, _ := r.Read(0, nil)
	// The writer of event 2 is still writing when the ring wraps around.
	r.cells[2].lap.Store(2*2 + 1)
	for i := size; i < size+4; i++ {
		r.Add(Event{Kind: Map, N: uint16(i)})
	}
	events, next, lost := r.Read(from, nil)
	if r.Dropped() != 1 || lost != 1 || next != size+4 || len(events) != 3 || events[1].Seq != size+1 ||
		events[2].Seq != size+3 {
		t.Errorf("got %d dropped, %d lost, next %d, events %+v", r.Dropped(), lost, next, events)
	}
	if last := r.Last(2); len(last) != 1 || last[0].Seq != size+3 {
		t.Errorf("Last(2): got %+v, want event %d", last, size+3)
	}
	// The writer finishes, and its cell is used again. A reader must still wait for an event that
	// is being written in the cell of a dropped event.
	r.cells[2].lap.Store(2*2 + 2)
	for range size - 2 {
		r.Add(Event{Kind: Map})
	}
	late := r.next.Add(1) - 1 // its writer has a sequence number and no cell yet
	if late != 2*size+2 {
		t.Fatalf("late event: got %d, want %d", late, 2*size+2)
	}
	r.Add(Event{Kind: Map})
	if events, next, lost := r.Read(next, nil); len(events) != size-2 || next != late || lost != 0 {
		t.Errorf("before a late event: got %d events, next %d, %d lost; want %d, %d, 0", len(events), next, lost,
			size-2, late)
	}
}

//go:embed testdata/names.golden
var goldenNames string

// TestNamesAreStable compares the names of all events with testdata/names.golden. Users search and
// parse traces by these names.
func TestNamesAreStable(t *testing.T) {
	golden := strings.Fields(goldenNames)
	var got []string
	for k := None + 1; k < kinds; k++ {
		got = append(got, k.String())
	}
	if !slices.Equal(got, golden) {
		t.Errorf("names of events:\n got %v\nwant %v", got, golden)
	}
	r := NewRing(1, status)
	for i, name := range golden {
		e := Event{Kind: None + 1 + Kind(i), Status: 1}
		if text := strings.Fields(r.Text(&e)); len(text) < 2 || text[1] != name {
			t.Errorf("Text of event %d: got %v, want name %s", i, text, name)
		}
	}
}

func TestTextAndJSONNameFields(t *testing.T) {
	r := NewRing(1, status)
	seen := map[string]bool{}
	for k := None; k < kinds; k++ {
		if k.String() == "" || seen[k.String()] {
			t.Errorf("name of kind %d: got %q, want a unique name", k, k)
		}
		seen[k.String()] = true
	}
	e := Event{Kind: WCLocalInv, Status: 1, XID: 0xbeef, MR: 2, Handle: 0x100}
	if text := r.Text(&e); !strings.Contains(text, "wc_li") ||
		!strings.Contains(text, "xid=0xbeef mr=2 handle=0x100 status=flushed") {
		t.Errorf("Text: got %q", text)
	}
	var m map[string]any
	if err := json.Unmarshal(r.JSON(&e), &m); err != nil || m["event"] != "wc_li" || m["xid"] != "0xbeef" ||
		m["mr"] != 2.0 || m["status"] != "flushed" {
		t.Errorf("JSON: got %s, %v", r.JSON(&e), err)
	}
}

func TestAddAllocatesNothing(t *testing.T) {
	r := NewRing(64, status)
	if n := testing.AllocsPerRun(1000, func() { r.Add(Event{Kind: Map, XID: 1}) }); n != 0 {
		t.Errorf("allocations of Add: got %v, want 0", n)
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
