package slotfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/memfd"
)

// A model is shared memory in which the writers of a child process tell what they do in each slot.
// It survives the child.
//
// The writer stores an operation in intent, then calls the package, and then stores the operation
// in done. The parent accepts the state after done, the state after intent, and nothing else.
type model struct {
	mem   []byte
	ops   *atomic.Uint64 // completed operations of all processes
	start *atomic.Uint64 // not 0: the writers may start
	slots []slotModel
}

// A slotModel has the operations of a slot. The low bit of an operation tells whether the slot has
// a record after it. The other bits are its version, which increases.
type slotModel struct {
	intent, done               *atomic.Uint64
	counterIntent, counterDone *atomic.Uint64
}

const modelWords = 4 // for each slot, and before the slots

func modelBytes(slots int) int { return 8 * modelWords * (slots + 1) }

// newModel returns a file for a model.
func newModel(tb testing.TB, slots int) (*os.File, *model) {
	tb.Helper()
	f := memfdOf(tb, nil, int64(modelBytes(slots)), memfd.Sealed)
	m, err := mapModel(f, slots)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(m.mem) })
	return f, m
}

func mapModel(f *os.File, slots int) (*model, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, modelBytes(slots), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	m := &model{mem: mem, ops: word(mem), start: word(mem[8:])}
	for s := range slots {
		b := mem[8*modelWords*(s+1):]
		m.slots = append(m.slots, slotModel{word(b), word(b[8:]), word(b[16:]), word(b[24:])})
	}
	return m, nil
}

// acknowledge sets done to op, unless a later operation is done.
func (m *slotModel) acknowledge(op uint64) {
	for {
		old := m.done.Load()
		if old >= op || m.done.CompareAndSwap(old, op) {
			return
		}
	}
}

// fill writes the record of a version: the version, the slot, and bytes that depend on both.
func fill(record []byte, s Slot, version uint64) {
	binary.LittleEndian.PutUint64(record, version)
	binary.LittleEndian.PutUint32(record[8:], uint32(s))
	x := version<<32 | uint64(s) | 1<<63
	for i := 12; i < len(record); i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		record[i] = byte(x >> 24)
	}
}

// A writer changes random slots of a table.
type writer struct {
	table  *Table
	model  *model
	rng    *rand.Rand
	own    []Slot
	most   int // slots in use at the same time
	record []byte
}

func (w *writer) step() error {
	var at int
	if len(w.own) > 0 {
		at = w.rng.IntN(len(w.own))
	}
	switch op := w.rng.IntN(16); {
	case len(w.own) == 0, op < 2 && len(w.own) < w.most:
		s, err := w.table.Alloc()
		if err != nil {
			return err
		}
		m := &w.model.slots[s]
		m.acknowledge(m.intent.Load()) // the slot was free: the Free of another writer is done
		c := w.rng.Uint64N(1000)
		w.table.StoreUint64(s, 0, c)
		m.counterIntent.Store(c)
		m.counterDone.Store(c)
		w.put(s)
		w.own = append(w.own, s)
	case op < 4:
		s := w.own[at]
		w.own[at] = w.own[len(w.own)-1]
		w.own = w.own[:len(w.own)-1]
		m := &w.model.slots[s]
		free := (m.intent.Load()>>1 + 1) << 1
		m.intent.Store(free)
		w.table.Free(s)
		m.acknowledge(free)
	case op < 8:
		m := &w.model.slots[w.own[at]]
		m.counterIntent.Add(1)
		w.table.AddUint64(w.own[at], 0, 1)
		m.counterDone.Add(1)
	default:
		w.put(w.own[at])
	}
	w.model.ops.Add(1)
	return nil
}

func (w *writer) put(s Slot) {
	m := &w.model.slots[s]
	version := m.intent.Load()>>1 + 1
	fill(w.record, s, version)
	m.intent.Store(version<<1 | 1)
	w.table.Put(s, w.record)
	m.acknowledge(version<<1 | 1)
}

// check compares the table with the model. If settle is true, check then makes the model equal to
// the table.
func (m *model) check(table *Table, settle bool) error {
	found := make([]uint64, len(m.slots)) // versions
	want := make([]byte, table.record)
	var errs []error
	if err := table.Each(func(s Slot, record []byte) {
		v := binary.LittleEndian.Uint64(record)
		if fill(want, s, v); string(record) != string(want) {
			errs = append(errs, fmt.Errorf("slot %d: the record is not one that was written: %x", s, record))
		}
		found[s] = v
	}); err != nil {
		return err
	}
	for i := range m.slots {
		s, v := &m.slots[i], found[i]
		intent, done := s.intent.Load(), s.done.Load()
		// In the states without a record, 0 is found.
		after := func(op uint64) uint64 { return (op >> 1) * (op & 1) }
		if v != after(intent) && v != after(done) {
			errs = append(errs, fmt.Errorf("slot %d: got version %d, want that of %#x or %#x", i, v, done, intent))
		}
		if v != 0 {
			c, least, most := table.LoadUint64(Slot(i), 0), s.counterDone.Load(), s.counterIntent.Load()
			if c < least || c > most {
				errs = append(errs, fmt.Errorf("slot %d: got counter %d, want %d to %d", i, c, least, most))
			}
			if settle {
				s.counterDone.Store(c)
				s.counterIntent.Store(c)
			}
		}
		if settle {
			op := intent &^ 1
			if v != 0 {
				op = v<<1 | 1
			}
			s.intent.Store(op)
			s.done.Store(op)
		}
	}
	return errors.Join(errs...)
}
