package slotfile

import (
	"errors"
	"os"
	"slices"
	"testing"
	"unsafe"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const testSchema = 7

// testSpecs has one table with an odd record size and one without counters.
var testSpecs = []TableSpec{
	{Name: "nodes", RecordBytes: 37, Counters: 2, MaxSlots: 100},
	{Name: "locks", RecordBytes: 8, Counters: 0, MaxSlots: 3},
}

func mustCreate(tb testing.TB, specs []TableSpec) *File {
	tb.Helper()
	f, err := Create("test", testSchema, specs)
	kit.Must(tb, err)
	tb.Cleanup(func() {
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			tb.Error(err)
		}
	})
	return f
}

func mustDescriptor(tb testing.TB, f *File) *os.File {
	tb.Helper()
	d, err := f.Descriptor()
	kit.Must(tb, err)
	tb.Cleanup(func() { d.Close() })
	return d
}

// mustOpen opens the file of d. It waits while the kernel releases the lock of a killed process.
func mustOpen(tb testing.TB, d *os.File, specs []TableSpec) (f *File) {
	tb.Helper()
	kit.Eventually(tb, "lock of the file", func() bool {
		var err error
		if f, err = Open(d, testSchema, specs); err != nil && !errors.Is(err, ErrLocked) {
			tb.Fatal(err)
		}
		return err == nil
	})
	tb.Cleanup(func() { f.Close() })
	return f
}

// reopened closes f and opens the file again.
func reopened(tb testing.TB, f *File, specs []TableSpec) *File {
	tb.Helper()
	d := mustDescriptor(tb, f)
	kit.Must(tb, f.Close())
	return mustOpen(tb, d, specs)
}

// aligned returns n zero bytes whose address is a multiple of 8.
func aligned(n int) []byte {
	words := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}

// heapFile returns an empty file in the heap, where the race detector sees the accesses.
func heapFile(tb testing.TB, specs []TableSpec) *File {
	tb.Helper()
	offsets, size, err := place(specs)
	kit.Must(tb, err)
	mem := aligned(int(size))
	copy(mem, header(testSchema, specs, offsets, size))
	f, err := load(mem, testSchema, specs, func(int64, int64) error { return nil })
	kit.Must(tb, err)
	return f
}

// loadCopy loads a copy of mem. Its tables cannot grow.
func loadCopy(mem []byte, specs []TableSpec) (*File, error) {
	b := aligned(len(mem))
	copy(b, mem)
	return load(b, testSchema, specs, func(int64, int64) error { return errors.New("no memory") })
}

func mustAlloc(tb testing.TB, table *Table) Slot {
	tb.Helper()
	s, err := table.Alloc()
	kit.Must(tb, err)
	return s
}

func mustPut(tb testing.TB, table *Table, record string) Slot {
	tb.Helper()
	s := mustAlloc(tb, table)
	table.Put(s, pad(table, record))
	return s
}

// pad returns a record that starts with text.
func pad(table *Table, text string) []byte {
	b := make([]byte, table.record)
	copy(b, text)
	return b
}

// records returns the records of the table by slot, without the padding of pad.
func records(tb testing.TB, table *Table) map[Slot]string {
	tb.Helper()
	all := make(map[Slot]string)
	if err := table.Each(func(s Slot, record []byte) {
		n := slices.Index(record, 0)
		if n < 0 {
			n = len(record)
		}
		all[s] = string(record[:n])
	}); err != nil {
		tb.Error(err)
	}
	if table.Len() != len(all) {
		tb.Errorf("length of table %s: got %d, want %d", table.name, table.Len(), len(all))
	}
	return all
}
