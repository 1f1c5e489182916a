package nlm

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// createState returns a State that calls changed, if it is not nil, after each change of a record.
func createState(t *testing.T, specs []slotfile.TableSpec, changed func()) *State {
	t.Helper()
	f, err := slotfile.Create("nlm", 1, specs)
	kit.Must(t, err)
	t.Cleanup(func() { f.Close() })
	f.OnChange(changed)
	s := NewState(f)
	_, err = s.identity(&clientRecord{})
	kit.Must(t, err)
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
	kit.Must(t, err)
	held := rangeRecord{seq: 1, end: 9, kind: rangeHeld, owner: owner}
	_, err = s.ranges.Add(&held, 0)
	kit.Must(t, err)
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
		_, err := s.owners.Add(&r, 0)
		kit.Must(t, err)
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
		_, err := s.ranges.Add(&r, 0)
		kit.Must(t, err)
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

// A recorder has the tables of a file, whose owner records its locks in a State.
type recorder struct {
	*State
	t    *testing.T
	f    file
	id   Owner
	o    owner
	cred []byte
}

func newRecorder(t *testing.T, specs []slotfile.TableSpec, changed func()) *recorder {
	fh, _ := nfs3.NewFH([]byte("file"))
	return &recorder{createState(t, specs, changed), t, file{fh: fh}, Owner{Posix, 1}, owner{svid: minSVID + 1},
		sunrpc.AppendAuthNone(nil)}
}

func (r *recorder) begin(rec rangeRecord) *intent {
	in, err := r.State.begin(keyOf(&r.f, r.id), &r.o, r.cred, rec)
	kit.Must(r.t, err)
	return in
}

// apply records a change of the tables.
func (r *recorder) apply(start, end uint64, in *intent) error {
	_, err := r.State.apply(&r.f, &r.o, &tableChange{id: r.id, start: start, end: end, cred: r.cred, in: in})
	return err
}

// lock sets a lock of the owner.
func (r *recorder) lock(start, end uint64) {
	l := Lock{Start: start, End: end, Exclusive: true, Owner: r.id}
	in := r.begin(newRange(rangeLock, &l))
	r.f.locks.Set(l)
	kit.Must(r.t, r.apply(start, end, in))
}

// TestEachStepKeepsLocks checks the records after each store of random changes: outside the range
// of a change they are those of before, and in its range those of before or after the change.
func TestEachStepKeepsLocks(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	var before, after stepModel
	var op rangeRecord
	steps := 0
	var s *recorder
	s = newRecorder(t, StateTables(), func() {
		steps++
		if s == nil {
			return
		}
		got := recorded(s.State)
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
		if op.kind == rangeLost {
			op.exclusive = 0
		}
		l, done := op.lock(s.id), op
		if op.kind == rangeLock {
			done.kind = rangeHeld
		}
		if after = before; !withdraw {
			after.paint(&done)
		}
		var in *intent
		if op.kind.intent() {
			in = s.begin(op)
		}
		if withdraw {
			s.withdraw(in)
		} else {
			s.f.locks.Clear(s.id, l.Start, l.End)
			s.f.lost.Clear(s.id, l.Start, l.End)
			switch op.kind {
			case rangeLock:
				s.f.locks.Set(l)
			case rangeLost:
				s.f.lost.Set(l)
			}
			kit.Must(t, s.apply(l.Start, l.End, in))
		}
		if before = recorded(s.State); before != after {
			t.Fatalf("after %+v: got %v, want %v", op, before, after)
		}
		if n, want := s.ranges.Len(), s.f.locks.Len()+s.f.lost.Len(); n != want {
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
	s := newRecorder(t, specs, nil)
	s.lock(0, 20)
	s.f.locks.Clear(s.id, 10, 12)
	s.f.lost.Set(Lock{Start: 10, End: 12, Owner: s.id})
	if s.apply(10, 12, nil) == nil {
		t.Error("got no error")
	}
	got := recorded(s.State)
	if slices.Contains(got[:21], 0) {
		t.Fatalf("a byte is not recorded: %v", got)
	}
	s.f.lost.Clear(s.id, 10, 12) // the owner unlocks everything
	s.f.locks.Clear(s.id, 0, 20)
	if err := s.apply(0, 20, nil); err != nil || s.ranges.Len() != 0 || s.owners.Len() != 0 {
		t.Errorf("got error %v, %d ranges, %d owners; want none", err, s.ranges.Len(), s.owners.Len())
	}
}

// TestLockAfterUnlockIntentIsRecorded locks a range that the owner has, while another request of
// the owner to unlock it waits.
func TestLockAfterUnlockIntentIsRecorded(t *testing.T) {
	s := newRecorder(t, StateTables(), nil)
	s.lock(0, 9)
	want := recorded(s.State)
	s.begin(rangeRecord{kind: rangeUnlock, end: 9})
	s.lock(0, 9)
	if got := recorded(s.State); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestChangeComparesNearRecords changes one of many locks of an owner: only the records near its
// range are compared. The table is that of the changes.
func TestChangeComparesNearRecords(t *testing.T) {
	const n = 4096
	s := newRecorder(t, StateTables(), nil)
	for i := range uint64(n) {
		s.lock(4*i, 4*i+1)
		if got := len(rangesOf(&s.f, s.id, 4*i, 4*i+1)); got != 1 {
			t.Fatalf("lock %d: got %d ranges to compare, want 1", i, got)
		}
	}
	rows := s.holders[keyOf(&s.f, s.id)].rows
	inOrder := func(a, b row) int { return cmp.Compare(a.rec.start, b.rec.start) }
	if len(rows) != n || !slices.IsSortedFunc(rows, inOrder) {
		t.Errorf("got %d rows, want %d in order", len(rows), n)
	}
}
