package slotfile

import (
	"fmt"
	"hash/crc32"
	"sync"
	"sync/atomic"
)

// A Slot is the number of a slot of a table, from 0.
type Slot uint32

// chunkBytes is the memory that a table allocates at once, except for large slots.
const chunkBytes = 256 << 10

// Elements of Table.next that are not the number of a free slot.
const (
	allocated = ^uint32(0)
	lastFree  = ^uint32(1)
)

// A Table holds records of one size in numbered slots. See the package comment about concurrency.
//
// A call with a slot that is not allocated, or with a record of a wrong size, is an error of the
// program: the methods then panic before they change anything.
type Table struct {
	name      string
	seed      uint32 // initial value of checksums, for this table
	step      func() // for tests: runs between the stores of Put
	mem       []byte // slots of the table, up to the maximum
	offset    int64  // of mem in the file
	slotBytes int
	copyBytes int
	copies    int // offset of copy 0 in a slot
	record    int // bytes
	counters  int
	max       int
	chunk     int    // slots
	changed   func() // see OnChange

	backed   *atomic.Uint64 // checked word in the header: slots that have memory
	allocate func(offset, n int64) error
	live     atomic.Int64 // slots that have a record

	mu   sync.Mutex
	free uint32 // the first free slot, or lastFree; guarded by mu
	// next has an element for each slot that has memory: the next free slot, lastFree, or
	// allocated. mu guards changes. The user of an allocated slot reads its element without mu.
	next atomic.Pointer[[]uint32]
}

func newTable(s *TableSpec, id uint32, file []byte, offset int64, backed *atomic.Uint64,
	allocate func(offset, n int64) error) *Table {
	n := s.slotBytes() * int64(s.MaxSlots)
	t := &Table{
		name:      s.Name,
		seed:      (id + 1) * 0x85ebca6b,
		mem:       file[offset:][:n:n],
		offset:    offset,
		slotBytes: int(s.slotBytes()),
		copyBytes: int(s.copyBytes()),
		copies:    8 + 8*s.Counters,
		record:    s.RecordBytes,
		counters:  s.Counters,
		max:       s.MaxSlots,
		chunk:     max(1, int(chunkBytes/s.slotBytes())),
		backed:    backed,
		allocate:  allocate,
		free:      lastFree,
	}
	t.next.Store(&[]uint32{})
	return t
}

// scan checks all slots and lists the free ones.
func (t *Table) scan() error {
	backed, ok := value(t.backed.Load())
	if !ok || int64(backed) > int64(t.max) {
		return corrupt("number of slots is %#x", t.backed.Load())
	}
	next := make([]uint32, backed)
	buf := make([]byte, t.record)
	live := 0
	for s := int(backed) - 1; s >= 0; s-- { // so that Alloc takes the lowest slot first
		state, err := t.read(Slot(s), buf)
		if err != nil {
			return err
		}
		if state != 0 {
			next[s] = allocated
			live++
			continue
		}
		next[s] = t.free
		t.free = uint32(s)
	}
	t.next.Store(&next)
	t.live.Store(int64(live))
	return nil
}

// read copies the record of slot s to buf, checks the copy, and returns the state word.
func (t *Table) read(s Slot, buf []byte) (state uint64, err error) {
	b := t.slot(s)
	state = word(b).Load()
	if state == 0 {
		return 0, nil
	}
	seq := uint32(state)
	copy(buf, t.copyOf(b, seq))
	if sum, want := uint32(state>>32), t.sum(s, seq, buf); seq == 0 || sum != want {
		return 0, corrupt("slot %d: checksum is %#x, want %#x", s, sum, want)
	}
	return state, nil
}

// Alloc returns a free slot, whose counters are 0. The slot is free for the next process until Put.
// Alloc returns an error with ErrFull at the maximum of slots, and another error when the host
// has no memory. An error changes nothing.
func (t *Table) Alloc() (Slot, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.free == lastFree {
		if err := t.grow(); err != nil {
			return 0, fmt.Errorf("slotfile: table %s: allocate slot: %w", t.name, err)
		}
	}
	next := *t.next.Load()
	s := t.free
	b := t.slot(Slot(s))
	for i := range t.counters {
		counter(b, i).Store(0)
	}
	t.free, next[s] = next[s], allocated
	return Slot(s), nil
}

// grow adds a chunk of free slots. The caller holds mu, and there is no free slot.
func (t *Table) grow() error {
	next := *t.next.Load()
	from := len(next)
	to := min(from+t.chunk, t.max)
	if from == to {
		return fmt.Errorf("%w: maximum is %d slots", ErrFull, t.max)
	}
	n := int64(to-from) * int64(t.slotBytes)
	if err := t.allocate(t.offset+int64(from)*int64(t.slotBytes), n); err != nil {
		return err
	}
	// The new slots are zero, which means free. A process that is killed here leaves memory that
	// the next process allocates again.
	t.backed.Store(checked(uint32(to)))
	for s := from; s < to-1; s++ {
		next = append(next, uint32(s+1))
	}
	next = append(next, lastFree)
	t.free = uint32(from)
	t.next.Store(&next)
	return nil
}

// Put stores the record of slot s, atomically. The record must have the size of the table's
// records.
// Put does not change the counters.
func (t *Table) Put(s Slot, record []byte) {
	b := t.own(s)
	if len(record) != t.record {
		panic(fmt.Sprintf("slotfile: table %s: put record of %d bytes, want %d", t.name, len(record), t.record))
	}
	state := word(b)
	old := state.Load()
	seq := following(uint32(old))
	c := t.copyOf(b, seq)
	copy(c, record)
	if t.step != nil {
		t.step()
	}
	// The checksum is that of c and not of record, so that the caller's record stays on its stack.
	state.Store(uint64(t.sum(s, seq, c))<<32 | uint64(seq))
	if old == 0 {
		t.live.Add(1)
	}
}

// Free removes the record of slot s, atomically, and frees the slot.
func (t *Table) Free(s Slot) {
	state := word(t.own(s))
	if state.Load() != 0 {
		state.Store(0)
		t.live.Add(-1)
	}
	t.mu.Lock()
	(*t.next.Load())[s] = t.free
	t.free = uint32(s)
	t.mu.Unlock()
}

// StoreUint64 sets counter i of slot s to v. The counters have no checksum. Their values survive as
// the records do, but a counter and a record do not change together: use StoreUint64 before the first
// Put for the initial value.
func (t *Table) StoreUint64(s Slot, i int, v uint64) { t.counter(s, i).Store(v) }

// LoadUint64 returns counter i of slot s.
func (t *Table) LoadUint64(s Slot, i int) uint64 { return t.counter(s, i).Load() }

func (t *Table) counter(s Slot, i int) *atomic.Uint64 {
	if uint(i) >= uint(t.counters) {
		t.noCounter(i)
	}
	return counter(t.own(s), i)
}

// Each calls f for each slot that has a record, in the order of the slots. The record is a copy,
// valid until f returns. f may call all methods of the table except Each. Each returns an error
// with ErrCorrupt, and stops, when a record was damaged after Open.
func (t *Table) Each(f func(s Slot, record []byte)) error {
	buf := make([]byte, t.record)
	for s := range len(*t.next.Load()) {
		switch state, err := t.read(Slot(s), buf); {
		case err != nil:
			return fmt.Errorf("slotfile: table %s: %w", t.name, err)
		case state != 0:
			f(Slot(s), buf)
		}
	}
	return nil
}

// Len returns the number of slots that have a record.
func (t *Table) Len() int { return int(t.live.Load()) }

// MaxSlots returns the maximum number of slots, which is that of Create.
func (t *Table) MaxSlots() int { return t.max }

// slot returns the bytes of slot s.
func (t *Table) slot(s Slot) []byte {
	at := int(s) * t.slotBytes
	return t.mem[at:][:t.slotBytes:t.slotBytes]
}

// own returns the bytes of slot s, and panics if the slot is not allocated.
func (t *Table) own(s Slot) []byte {
	if next := *t.next.Load(); uint(s) >= uint(len(next)) || next[s] != allocated {
		t.notAllocated(s)
	}
	return t.slot(s)
}

func (t *Table) notAllocated(s Slot) {
	panic(fmt.Sprintf("slotfile: table %s: slot %d is not allocated", t.name, s))
}

func (t *Table) noCounter(i int) {
	panic(fmt.Sprintf("slotfile: table %s: counter %d of %d", t.name, i, t.counters))
}

// copyOf returns the copy of the record that seq selects in the slot with the bytes b.
func (t *Table) copyOf(b []byte, seq uint32) []byte {
	return b[t.copies+int(seq&1)*t.copyBytes:][:t.record]
}

// sum returns the checksum of a record. Different sequence numbers always give different checksums.
func (t *Table) sum(s Slot, seq uint32, record []byte) uint32 {
	return crc32.Update(t.seed^uint32(s)*0x9e3779b1^seq, castagnoli, record)
}

// following returns the sequence number after seq. It selects the other copy, and it is not 0.
func following(seq uint32) uint32 {
	if seq++; seq == 0 {
		return 2
	}
	return seq
}

// counter returns counter i of the slot with the bytes b.
func counter(b []byte, i int) *atomic.Uint64 { return word(b[8+8*i:]) }
