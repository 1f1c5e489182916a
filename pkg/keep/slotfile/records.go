package slotfile

import (
	"errors"
	"unsafe"
)

// A Ref is the number of a slot plus 1. 0 refers to no slot.
type Ref uint32

// Records is a table whose records have the type T, a struct of integers and arrays without
// pointers. The methods have the rules of those of Table.
type Records[T any] struct{ *Table }

// RecordsOf returns a table of a file. The file has the table SpecOf[T].
func RecordsOf[T any](f *File, name string) Records[T] { return Records[T]{f.Table(name)} }

// SpecOf describes a table of records of type T.
func SpecOf[T any](name string, counters, slots int) TableSpec {
	var r T
	return TableSpec{Name: name, RecordBytes: int(unsafe.Sizeof(r)), Counters: counters, MaxSlots: slots}
}

// Add stores a new record, whose counter 0, if there is one, is counter. The errors are those of
// Table.Alloc.
func (t Records[T]) Add(r *T, counter uint64) (Ref, error) {
	s, err := t.Alloc()
	if err != nil {
		return 0, err
	}
	if t.counters > 0 {
		t.StoreUint64(s, 0, counter)
	}
	t.Put(s, Bytes(r))
	t.noteChange()
	return Ref(s) + 1, nil
}

// Reserve allocates a slot for a later Set. The slot is free for the next process until then.
func (t Records[T]) Reserve() (Ref, error) {
	s, err := t.Alloc()
	if err != nil {
		return 0, err
	}
	return Ref(s) + 1, nil
}

// Set stores a record or replaces it. It does nothing if ref is 0.
func (t Records[T]) Set(ref Ref, r *T) {
	if ref != 0 {
		t.Put(Slot(ref-1), Bytes(r))
		t.noteChange()
	}
}

// Remove removes a record and sets the reference to 0. It does nothing if the reference is 0.
func (t Records[T]) Remove(ref *Ref) {
	if *ref != 0 {
		t.Free(Slot(*ref - 1))
		*ref = 0
		t.noteChange()
	}
}

// SetCounter sets counter 0 of a record. It does nothing if ref is 0.
func (t Records[T]) SetCounter(ref Ref, v uint64) {
	if ref != 0 {
		t.StoreUint64(Slot(ref-1), 0, v)
		t.noteChange()
	}
}

// Counter returns counter 0 of a record.
func (t Records[T]) Counter(ref Ref) uint64 { return t.LoadUint64(Slot(ref-1), 0) }

// All calls f with a copy of each record. It stops at the first error.
func (t Records[T]) All(f func(ref Ref, r *T) error) error {
	var failed error
	err := t.Each(func(s Slot, b []byte) {
		var r T
		copy(Bytes(&r), b)
		if failed == nil {
			failed = f(Ref(s)+1, &r)
		}
	})
	return errors.Join(err, failed)
}

// OnChange makes all Records of the file call f after each change. Tests kill the process there.
// Call OnChange before the file is used.
func (f *File) OnChange(changed func()) {
	for _, t := range f.tables {
		t.changed = changed
	}
}

func (t *Table) noteChange() {
	if t.changed != nil {
		t.changed()
	}
}

// Bytes returns the memory of a record.
func Bytes[T any](r *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(r)), unsafe.Sizeof(*r))
}
