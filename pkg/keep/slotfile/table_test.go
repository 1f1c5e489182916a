package slotfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestRecordsSurviveReopen(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes, locks := f.Table("nodes"), f.Table("locks")
	a, b, c := mustPut(t, nodes, "a"), mustPut(t, nodes, "b"), mustPut(t, nodes, "c")
	nodes.Put(a, pad(nodes, "a2"))
	nodes.Put(c, pad(nodes, "c2"))
	nodes.Put(c, pad(nodes, "c3"))
	nodes.Free(b)
	allocated := mustAlloc(t, nodes)
	mustAlloc(t, nodes)
	if allocated != b {
		t.Errorf("slot after Free: got %d, want %d", allocated, b)
	}
	nodes.StoreUint64(a, 0, 41)
	nodes.StoreUint64(a, 1, math.MaxUint64)
	l := mustPut(t, locks, "12345678")

	f = reopened(t, f, testSpecs)
	nodes, locks = f.Table("nodes"), f.Table("locks")
	if got, want := records(t, nodes), map[Slot]string{a: "a2", c: "c3"}; !maps.Equal(got, want) {
		t.Errorf("nodes: got %v, want %v", got, want)
	}
	if got, want := records(t, locks), map[Slot]string{l: "12345678"}; !maps.Equal(got, want) {
		t.Errorf("locks: got %v, want %v", got, want)
	}
	if x, y := nodes.LoadUint64(a, 0), nodes.LoadUint64(a, 1); x != 41 || y != math.MaxUint64 {
		t.Errorf("counters: got %d and %d, want 41 and %d", x, y, uint64(math.MaxUint64))
	}
	if s := mustAlloc(t, nodes); s != b {
		t.Errorf("slot without a record: got %d, want %d", s, b)
	}
	if f.Table("none") != nil {
		t.Error("table with an unknown name: got one, want nil")
	}
}

// TestTypedRecords checks Records through a reopened file.
func TestTypedRecords(t *testing.T) {
	type point struct{ x, y uint32 }
	specs := []TableSpec{SpecOf[point]("points", 1, 4)}
	f := mustCreate(t, specs)
	points := RecordsOf[point](f, "points")
	add := func(p point, counter uint64) Ref {
		ref, err := points.Add(&p, counter)
		kit.Must(t, err)
		return ref
	}
	a, b, c := add(point{1, 2}, 10), add(point{3, 4}, 20), add(point{5, 6}, 30)
	points.Set(c, &point{7, 8})
	points.SetCounter(c, 31)
	kept := b
	points.Remove(&b)
	if b != 0 || points.Len() != 2 {
		t.Errorf("after Remove: got reference %d and %d records, want 0 and 2", b, points.Len())
	}
	points.Remove(&b)
	points.Set(b, &point{9, 9})
	points.SetCounter(b, 99)

	f = reopened(t, f, specs)
	points = RecordsOf[point](f, "points")
	got := make(map[Ref]point)
	kit.Must(t, points.All(func(ref Ref, p *point) error { got[ref] = *p; return nil }))
	if want := map[Ref]point{a: {1, 2}, c: {7, 8}}; !maps.Equal(got, want) {
		t.Errorf("records: got %v, want %v", got, want)
	}
	if x, y := points.Counter(a), points.Counter(c); x != 10 || y != 31 {
		t.Errorf("counters: got %d and %d, want 10 and 31", x, y)
	}
	if ref := add(point{}, 0); ref != kept {
		t.Errorf("reference after Remove: got %d, want %d", ref, kept)
	}
}

func TestCountersOfNewSlotAreZero(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	s := mustPut(t, nodes, "a")
	nodes.StoreUint64(s, 0, 1)
	nodes.StoreUint64(s, 1, 2)
	nodes.Free(s)
	if again := mustAlloc(t, nodes); again != s || nodes.LoadUint64(s, 0) != 0 || nodes.LoadUint64(s, 1) != 0 {
		t.Errorf("counters of slot %d: got %d and %d, want 0", again, nodes.LoadUint64(s, 0), nodes.LoadUint64(s, 1))
	}
}

func TestTableGrowsToMaximum(t *testing.T) {
	specs := []TableSpec{{Name: "a", RecordBytes: 8, MaxSlots: 25}, {Name: "b", RecordBytes: 60000, MaxSlots: 12}}
	f := mustCreate(t, specs)
	want := map[string]map[Slot]string{"a": {}, "b": {}}
	for i := range 25 {
		for _, table := range f.tables {
			table.chunk = min(table.chunk, 7)
			if i >= table.max {
				continue
			}
			text := fmt.Sprint(table.name, i)
			want[table.name][mustPut(t, table, text)] = text
		}
	}
	for range 2 {
		for _, table := range f.tables {
			for range 2 {
				if _, err := table.Alloc(); !errors.Is(err, ErrFull) {
					t.Errorf("Alloc at the maximum: got %v, want %v", err, ErrFull)
				}
			}
			if got := records(t, table); !maps.Equal(got, want[table.name]) || len(got) != table.MaxSlots() {
				t.Errorf("records: got %v, want %v", got, want[table.name])
			}
		}
		f = reopened(t, f, specs)
	}
	a := f.Table("a")
	a.Free(13)
	if s := mustAlloc(t, a); s != 13 {
		t.Errorf("slot after Free in a full table: got %d, want 13", s)
	}
}

func TestAllocWithoutMemoryChangesNothing(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	nodes.chunk = 2
	want := map[Slot]string{mustPut(t, nodes, "a"): "a", mustPut(t, nodes, "b"): "b"}
	allocate := nodes.allocate
	nodes.allocate = func(int64, int64) error { return unix.ENOSPC }
	before := slices.Clone(f.mem)
	for range 3 {
		if _, err := nodes.Alloc(); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("Alloc without memory: got %v, want %v", err, unix.ENOSPC)
		}
	}
	if !slices.Equal(before, f.mem) {
		t.Error("Alloc without memory changed the file")
	}
	nodes.allocate = allocate
	want[mustPut(t, nodes, "c")] = "c"
	if got := records(t, f.Table("nodes")); !maps.Equal(got, want) {
		t.Errorf("records: got %v, want %v", got, want)
	}
}

// Only the memory of slots that were allocated is in use, also of a large table.
func TestMemoryIsAllocatedInChunks(t *testing.T) {
	specs := []TableSpec{{"a", 120, 0, 1 << 24}, {"b", 120, 0, 1 << 24}}
	f := mustCreate(t, specs)
	mustPut(t, f.Table("b"), "b")
	f = reopened(t, f, specs)
	var st unix.Stat_t
	kit.Must(t, unix.Fstat(f.fd, &st))
	if used := st.Blocks * 512; used < chunkBytes || used > 2*chunkBytes {
		t.Errorf("memory in use: got %d bytes, want a little more than %d", used, chunkBytes)
	}
}

func TestMisusePanics(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	s := mustPut(t, nodes, "a")
	free := mustPut(t, nodes, "b")
	nodes.Free(free)
	before := slices.Clone(f.mem)
	for name, call := range map[string]func(){
		"Put of a short record":      func() { nodes.Put(s, make([]byte, 36)) },
		"Put of a long record":       func() { nodes.Put(s, make([]byte, 38)) },
		"Put to a free slot":         func() { nodes.Put(free, make([]byte, 37)) },
		"Put to a slot never used":   func() { nodes.Put(free+1, make([]byte, 37)) },
		"Put after the maximum":      func() { nodes.Put(100, make([]byte, 37)) },
		"Put to the largest slot":    func() { nodes.Put(math.MaxUint32, make([]byte, 37)) },
		"second Free":                func() { nodes.Free(free) },
		"counter of a free slot":     func() { nodes.StoreUint64(free, 0, 1) },
		"counter after the last one": func() { nodes.StoreUint64(s, 2, 1) },
		"negative counter":           func() { nodes.LoadUint64(s, -1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			call()
		}()
	}
	if !slices.Equal(before, f.mem) {
		t.Error("misuse changed the file")
	}
	if got := records(t, nodes); !maps.Equal(got, map[Slot]string{s: "a"}) {
		t.Errorf("records: got %v", got)
	}
}

// The sequence number wraps, and still alternates between the copies.
func TestSequenceNumberWraps(t *testing.T) {
	f := heapFile(t, testSpecs)
	nodes := f.Table("nodes")
	s := mustPut(t, nodes, "a")
	b := nodes.slot(s)
	const last = math.MaxUint32
	copy(nodes.copyOf(b, last), pad(nodes, "last"))
	word(b).Store(uint64(nodes.sum(s, last, pad(nodes, "last")))<<32 | last)
	for _, text := range []string{"last", "x", "y", "z"} {
		if got := records(t, nodes)[s]; got != text {
			t.Errorf("record: got %q, want %q", got, text)
		}
		old := uint32(word(b).Load())
		nodes.Put(s, pad(nodes, string(text[0]+1)))
		if seq := uint32(word(b).Load()); seq == 0 || seq&1 == old&1 {
			t.Errorf("sequence number after %#x: got %#x", old, seq)
		}
		if text == "last" {
			nodes.Put(s, pad(nodes, "w"))
			nodes.Put(s, pad(nodes, "x"))
		}
	}
}

func TestEachAllowsChanges(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	for i := range 10 {
		mustPut(t, nodes, fmt.Sprint(i))
	}
	if err := nodes.Each(func(s Slot, record []byte) {
		if s%2 == 0 {
			nodes.Free(s)
		} else {
			record[0]++
			nodes.Put(s, record)
		}
	}); err != nil {
		t.Fatal(err)
	}
	want := map[Slot]string{1: "2", 3: "4", 5: "6", 7: "8", 9: ":"}
	if got := records(t, reopened(t, f, testSpecs).Table("nodes")); !maps.Equal(got, want) {
		t.Errorf("records: got %v, want %v", got, want)
	}
}

func TestOperationsDoNotAllocate(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	s := mustPut(t, nodes, "a")
	for name, op := range map[string]func(){
		"Put": func() {
			var record [37]byte
			nodes.Put(s, record[:])
		},
		"StoreUint64": func() { nodes.StoreUint64(s, 0, 1) },
		"Alloc and Free": func() {
			n, err := nodes.Alloc()
			kit.Must(t, err)
			nodes.Free(n)
		},
	} {
		if n := testing.AllocsPerRun(1000, op); n != 0 {
			t.Errorf("%s: got %v allocations, want 0", name, n)
		}
	}
}

// The race detector sees only memory of the heap, so the file is there.
func TestSlotsAreIndependent(t *testing.T) {
	specs := []TableSpec{{Name: "a", RecordBytes: 16, Counters: 1, MaxSlots: 4000}}
	f := heapFile(t, specs)
	a := f.Table("a")
	a.chunk = 3
	shared := mustPut(t, a, "shared")
	want := make(map[Slot]string)
	var mu sync.Mutex
	var work sync.WaitGroup
	const writers, rounds = 4, 500
	for g := range writers {
		work.Go(func() {
			own := make(map[Slot]string)
			for i := range rounds {
				s, err := a.Alloc()
				if err != nil {
					t.Error(err)
					return
				}
				text := fmt.Sprint(g, " ", i)
				for range 3 {
					a.Put(s, pad(a, text))
				}
				own[s] = text
				a.StoreUint64(s, 0, uint64(i))
				a.StoreUint64(shared, 0, rounds-1)
				if i%3 == 0 {
					a.Free(s)
					delete(own, s)
				}
				_ = a.Len()
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(want, own)
		})
	}
	for range rounds {
		a.Put(shared, pad(a, "shared")) // while the writers change its counter
	}
	work.Wait()
	want[shared] = "shared"
	if got := records(t, a); !maps.Equal(got, want) {
		t.Errorf("got %d records, want %d; or other ones", len(got), len(want))
	}
	if n := a.LoadUint64(shared, 0); n != rounds-1 {
		t.Errorf("shared counter: got %d, want %d", n, rounds-1)
	}
}

// TestLayout compares the bytes of a slot with the package comment.
func TestLayout(t *testing.T) {
	f := mustCreate(t, testSpecs)
	nodes := f.Table("nodes")
	mustPut(t, nodes, "zero")
	s := mustPut(t, nodes, "old")
	nodes.Put(s, pad(nodes, "new"))
	nodes.StoreUint64(s, 1, 0x1122)
	const slotBytes = 8 + 2*8 + 2*40
	b := f.mem[4096+slotBytes:][:slotBytes]
	state := binary.NativeEndian.Uint64(b)
	seed := uint32(1*0x85ebca6b) ^ uint32(0x9e3779b1) ^ 2
	sum := crc32.Update(seed, crc32.MakeTable(crc32.Castagnoli), pad(nodes, "new"))
	if s != 1 || state != uint64(sum)<<32|2 {
		t.Errorf("state of slot %d: got %#x, want %#x", s, state, uint64(sum)<<32|2)
	}
	if got := binary.NativeEndian.Uint64(b[16:]); got != 0x1122 {
		t.Errorf("counter 1: got %#x, want 0x1122", got)
	}
	if c0, c1 := string(b[24:27]), string(b[64:67]); c0 != "new" || c1 != "old" {
		t.Errorf("copies: got %q and %q, want new and old", c0, c1)
	}
	const entry1 = 128
	if name := string(f.mem[entry1 : entry1+6]); name != "locks\x00" {
		t.Errorf("name of table 1: got %q", name)
	}
	want := uint64(4096 + 12288) // 100 slots of table 0 need 10,400 bytes
	if at := binary.NativeEndian.Uint64(f.mem[entry1+48:]); at != want || len(f.mem) != int(want)+4096 {
		t.Errorf("offset of table 1: got %d, want %d; size %d", at, want, len(f.mem))
	}
}
