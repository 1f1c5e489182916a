package nlm

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// createState returns a State that calls changed, if it is not nil, after each change of a record.
func createState(t *testing.T, specs []slotfile.TableSpec, changed func()) *State {
	t.Helper()
	f, err := slotfile.Create("nlm", 1, specs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	f.OnChange(changed)
	s := NewState(f)
	if _, err := s.identity(&clientRecord{}); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestInvalidRecordsAreIgnored loads records that no State writes, and one of the maximum size.
func TestInvalidRecordsAreIgnored(t *testing.T) {
	s := createState(t, StateTables(), nil)
	fh, _ := nfs3.NewFH(bytes.Repeat([]byte{0xfe}, nfs3.FHSize))
	key, cred := lockKey{fh, Owner{Posix, 1}}, bytes.Repeat([]byte{7}, maxCred)
	valid := newOwnerRecord(key, minSVID+1)
	valid.setCredential(cred)
	owner, err := s.owners.Add(&valid, 0)
	if err != nil {
		t.Fatal(err)
	}
	held := rangeRecord{seq: 1, end: 9, kind: rangeHeld, owner: owner}
	if _, err := s.ranges.Add(&held, 0); err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, change := range []func(*ownerRecord){
		func(*ownerRecord) {}, // the owner and the file exist
		func(r *ownerRecord) { r.id = 2 },
		func(r *ownerRecord) { r.kind, r.svid = 3, minSVID+3 },
		func(r *ownerRecord) { r.id, r.svid = 4, 4 },
		func(r *ownerRecord) { r.id, r.svid, r.fhLen = 5, minSVID+5, 0 },
		func(r *ownerRecord) { r.id, r.svid, r.fhLen = 6, minSVID+6, nfs3.FHSize+1 },
		func(r *ownerRecord) { r.id, r.svid, r.credLen = 7, minSVID+7, maxCred+1 },
	} {
		r := valid
		change(&r)
		if _, err := s.owners.Add(&r, 0); err != nil {
			t.Fatal(err)
		}
		want++
	}
	for _, change := range []func(*rangeRecord){
		func(r *rangeRecord) { r.owner = 1000 },
		func(r *rangeRecord) { r.kind = 0 },
		func(r *rangeRecord) { r.kind = rangeUnlock + 1 },
		func(r *rangeRecord) { r.start = 10 },
		func(r *rangeRecord) { r.end = maxOffset + 1 },
		func(r *rangeRecord) { r.seq = 1<<64 - 1 },
		func(r *rangeRecord) { r.exclusive = 2 },
	} {
		r := held
		change(&r)
		if _, err := s.ranges.Add(&r, 0); err != nil {
			t.Fatal(err)
		}
		want++
	}
	kept, invalid, err := s.load()
	if err != nil || invalid != want || len(kept) != 1 || len(kept[0].rows) != 1 || kept[0].rows[0].rec != held {
		t.Fatalf("got %d holders, %d invalid records, error %v; want 1, %d", len(kept), invalid, err, want)
	}
	if k := kept[0]; k.key != key || !bytes.Equal(k.h.rec.credential(), cred) {
		t.Errorf("got %+v, want %+v with the credential %x", k, key, cred)
	}
	if s.owners.Len() != 1 || s.ranges.Len() != 1 {
		t.Errorf("records left: got %d, %d; want 1, 1", s.owners.Len(), s.ranges.Len())
	}
}

const stepSpan = 24

// A stepModel has the mode of each byte of one owner: 0, rangeHeld*2 + exclusive, or rangeLost*2.
type stepModel [stepSpan]uint8

func (m *stepModel) paint(r *rangeRecord) {
	v := uint8(r.kind)*2 + r.exclusive
	if r.kind == rangeUnlock {
		v = 0
	}
	for i := r.start; i <= r.end; i++ {
		m[i] = v
	}
}

// recorded returns what the next process would restore.
func recorded(s *State) (m stepModel) {
	var all []rangeRecord
	_ = s.ranges.All(func(_ slotfile.Ref, r *rangeRecord) error {
		if r.kind != rangeLock {
			all = append(all, *r)
		}
		return nil
	})
	slices.SortFunc(all, func(a, b rangeRecord) int { return cmp.Compare(a.seq, b.seq) })
	for i := range all {
		m.paint(&all[i])
	}
	return m
}

// TestEachStepKeepsLocks checks the records after each store of random changes: outside the range
// of a change they are those of before, and in its range those of before or after the change.
func TestEachStepKeepsLocks(t *testing.T) {
	id := Owner{Posix, 1}
	fh, _ := nfs3.NewFH([]byte("file"))
	f, o := &file{fh: fh}, &owner{svid: minSVID + 1}
	rnd := rand.New(rand.NewPCG(1, 1))
	var before, after stepModel
	var op rangeRecord
	steps := 0
	var s *State
	s = createState(t, StateTables(), func() {
		steps++
		if s == nil {
			return
		}
		got := recorded(s)
		for i, v := range got {
			if v != before[i] && v != after[i] {
				t.Fatalf("%+v: got %v, want\n%v or\n%v", op, got, before, after)
			}
		}
	})
	for range 2000 {
		start := rnd.Uint64N(stepSpan)
		op = rangeRecord{start: start, end: min(stepSpan-1, start+rnd.Uint64N(12)), exclusive: uint8(rnd.IntN(2)),
			kind: []rangeKind{rangeLock, rangeLock, rangeUnlock, rangeLost, rangeLock}[rnd.IntN(5)]}
		withdraw := rnd.IntN(8) == 0 && op.kind == rangeLock
		l := op.lock(id)
		done := op
		if op.kind == rangeLock {
			done.kind = rangeHeld
		}
		if op.kind == rangeLost {
			op.exclusive, done.exclusive, l.Exclusive = 0, 0, false
		}
		if after = before; !withdraw {
			after.paint(&done)
		}
		change := &tableChange{id: id, start: l.Start, end: l.End, cred: sunrpc.AppendAuthNone(nil)}
		if op.kind.intent() {
			var err error
			if change.in, err = s.begin(keyOf(f, id), o, change.cred, op); err != nil {
				t.Fatal(err)
			}
		}
		if withdraw {
			s.withdraw(change.in)
		} else {
			f.locks.Clear(id, l.Start, l.End)
			f.lost.Clear(id, l.Start, l.End)
			switch op.kind {
			case rangeLock:
				f.locks.Set(l)
			case rangeLost:
				f.lost.Set(l)
			}
			if _, err := s.apply(f, o, change); err != nil {
				t.Fatal(err)
			}
		}
		if before = recorded(s); before != after {
			t.Fatalf("after %+v: got %v, want %v", op, before, after)
		}
		if n, want := s.ranges.Len(), f.locks.Len()+f.lost.Len(); n != want {
			t.Fatalf("after %+v: got %d records, want %d", op, n, want)
		}
	}
	if steps < 4000 {
		t.Errorf("got only %d steps", steps)
	}
}

// TestFailedAllocationKeepsRanges records lost parts of a lock in a table without room.
func TestFailedAllocationKeepsRanges(t *testing.T) {
	specs := StateTables()
	specs[2].MaxSlots = 2
	s := createState(t, specs, nil)
	fh, _ := nfs3.NewFH([]byte("file"))
	f, o, id := &file{fh: fh}, &owner{svid: minSVID + 1}, Owner{Posix, 1}
	key, cred := keyOf(f, id), sunrpc.AppendAuthNone(nil)
	l := Lock{Start: 0, End: 20, Exclusive: true, Owner: id}
	in, err := s.begin(key, o, cred, newRange(rangeLock, &l))
	if err != nil {
		t.Fatal(err)
	}
	f.locks.Set(l)
	if _, err := s.apply(f, o, &tableChange{id: id, end: 20, cred: cred, in: in}); err != nil {
		t.Fatal(err)
	}
	f.locks.Clear(id, 10, 12)
	f.lost.Set(Lock{Start: 10, End: 12, Owner: id})
	if _, err := s.apply(f, o, &tableChange{id: id, start: 10, end: 12}); err == nil {
		t.Error("got no error")
	}
	got := recorded(s)
	for i, v := range got[:21] {
		if v == 0 {
			t.Fatalf("byte %d is not recorded: %s", i, fmt.Sprint(got))
		}
	}
	f.lost.Clear(id, 10, 12) // the owner unlocks everything
	f.locks.Clear(id, 0, 20)
	_, err = s.apply(f, o, &tableChange{id: id, end: 20})
	if err != nil || s.ranges.Len() != 0 || s.owners.Len() != 0 {
		t.Errorf("got error %v, %d ranges, %d owners; want none", err, s.ranges.Len(), s.owners.Len())
	}
}

// TestLockAfterUnlockIntentIsRecorded locks a range that the owner has, while another request of
// the owner to unlock it waits.
func TestLockAfterUnlockIntentIsRecorded(t *testing.T) {
	s := createState(t, StateTables(), nil)
	fh, _ := nfs3.NewFH([]byte("file"))
	f, o, id := &file{fh: fh}, &owner{svid: minSVID + 1}, Owner{Posix, 1}
	key, cred := keyOf(f, id), sunrpc.AppendAuthNone(nil)
	l := Lock{Start: 0, End: 9, Owner: id}
	begin := func(kind rangeKind) *intent {
		in, err := s.begin(key, o, cred, newRange(kind, &l))
		if err != nil {
			t.Fatal(err)
		}
		return in
	}
	lock := func() {
		in := begin(rangeLock)
		f.locks.Set(l)
		if _, err := s.apply(f, o, &tableChange{id: id, end: 9, cred: cred, in: in}); err != nil {
			t.Fatal(err)
		}
	}
	lock()
	want := recorded(s)
	begin(rangeUnlock)
	lock()
	if got := recorded(s); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestChangeComparesNearRecords changes one of many locks of an owner: only the records near its
// range are compared. The table is that of the changes.
func TestChangeComparesNearRecords(t *testing.T) {
	const n = 4096
	s := createState(t, StateTables(), nil)
	fh, _ := nfs3.NewFH([]byte("file"))
	f, o, id := &file{fh: fh}, &owner{svid: minSVID + 1}, Owner{Posix, 1}
	for i := range uint64(n) {
		f.locks.Set(Lock{Start: 4 * i, End: 4*i + 1, Exclusive: true, Owner: id})
		c := &tableChange{id: id, start: 4 * i, end: 4*i + 1, cred: sunrpc.AppendAuthNone(nil)}
		if _, err := s.apply(f, o, c); err != nil {
			t.Fatal(err)
		}
		if got := len(rangesOf(f, id, c.start, c.end)); got != 1 {
			t.Fatalf("lock %d: got %d ranges to compare, want 1", i, got)
		}
	}
	rows := s.holders[keyOf(f, id)].rows
	inOrder := func(a, b row) int { return cmp.Compare(a.rec.start, b.rec.start) }
	if len(rows) != n || !slices.IsSortedFunc(rows, inOrder) {
		t.Errorf("got %d rows, want %d in order", len(rows), n)
	}
}
