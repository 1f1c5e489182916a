package slotfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
)

// damagedSpecs give a small file with free slots, slots with records, and unused slots.
var damagedSpecs = []TableSpec{
	{Name: "a", RecordBytes: 21, Counters: 1, MaxSlots: 8},
	{Name: "b", RecordBytes: 8, MaxSlots: 2},
}

// fileToDamage returns the bytes of a valid file, and the records of its tables.
func fileToDamage(tb testing.TB) ([]byte, []map[Slot]string) {
	tb.Helper()
	f := heapFile(tb, damagedSpecs)
	a, b := f.Table("a"), f.Table("b")
	for _, text := range []string{"zero", "one", "two", "three"} {
		s := mustPut(tb, a, "old "+text)
		a.Put(s, pad(a, text))
	}
	a.Free(2)
	mustPut(tb, b, "b")
	return f.mem, []map[Slot]string{records(tb, a), records(tb, b)}
}

// checkDamaged loads a damaged file. It reports a change of the file, and a record that the
// valid file does not have.
func checkDamaged(t *testing.T, what string, at int, mem []byte, valid []map[Slot]string) (detected bool) {
	t.Helper()
	b := aligned(len(mem))
	copy(b, mem)
	f, err := load(b, testSchema, damagedSpecs, nil)
	if !bytes.Equal(b, mem) {
		t.Errorf("%s at %d: load changed the file", what, at)
	}
	if err != nil {
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
			t.Errorf("%s at %d: got %v", what, at, err)
		}
		return true
	}
	for i, table := range f.tables {
		for s, text := range records(t, table) {
			if valid[i][s] != text {
				t.Errorf("%s at %d: table %d, slot %d: got record %q, want %q", what, at, i, s, text, valid[i][s])
			}
		}
	}
	return false
}

func TestDamageIsDetected(t *testing.T) {
	valid, want := fileToDamage(t)
	for at := range valid {
		mask := []byte{1, 0x80, 0xff}[at%3]
		mem := bytes.Clone(valid)
		mem[at] ^= mask
		if !checkDamaged(t, "byte changed", at, mem, want) && at < headerBytes {
			t.Errorf("byte %d of the header changed by %#x: not detected", at, mask)
		}
	}
	words := rand.New(rand.NewPCG(1, 1))
	for at := 0; at+8 <= len(valid); at += 8 {
		mem := bytes.Clone(valid)
		binary.NativeEndian.PutUint64(mem[at:], words.Uint64())
		checkDamaged(t, "word changed", at, mem, want)
	}
}

// FuzzOpen opens any content as a file. With fix it first corrects the checksum of the header.
func FuzzOpen(f *testing.F) {
	valid, _ := fileToDamage(f)
	f.Add(valid, false)
	f.Add(valid, true)
	f.Add(valid[:headerBytes], true)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, content []byte, fix bool) {
		content = bytes.Clone(content)
		if fix && len(content) >= headerBytes {
			order.PutUint32(content[atSum:], headerSum(content))
		}
		d := memfdOf(t, content, int64(len(content)), membuf.Sealed)
		defer d.Close()
		file, err := Open(d, testSchema, damagedSpecs)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Fatal(err)
			}
			if len(content) > 0 && !bytes.Equal(readAll(t, d), content) {
				t.Error("Open changed the file and returned an error")
			}
			return
		}
		defer file.Close()
		for _, table := range file.tables {
			records(t, table)
			if s, err := table.Alloc(); err == nil {
				table.Put(s, make([]byte, table.record))
				table.Free(s)
			}
		}
	})
}
