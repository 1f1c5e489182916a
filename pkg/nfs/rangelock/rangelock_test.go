package rangelock

import (
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

func TestSetAndClear(t *testing.T) {
	type l = Lock[int]
	set := func(owner int, start, end uint64, exclusive bool) func(*Table[int]) {
		return func(t *Table[int]) { t.Set(l{Start: start, End: end, Exclusive: exclusive, Owner: owner}) }
	}
	through := func(open, start, end uint64) func(*Table[int]) {
		return func(t *Table[int]) { t.Set(l{Start: start, End: end, Exclusive: true, Owner: 1, Open: open}) }
	}
	clr := func(owner int, start, end uint64) func(*Table[int]) {
		return func(t *Table[int]) { t.Clear(owner, start, end) }
	}
	for _, x := range []struct {
		name  string
		steps []func(*Table[int])
		want  []l
	}{
		{"merge adjacent", []func(*Table[int]){set(1, 0, 9, true), set(1, 10, 19, true)}, []l{{0, 19, true, 1, 0, 0}}},
		{"merge adjacent on the left", []func(*Table[int]){set(1, 10, 19, true), set(1, 0, 9, true)},
			[]l{{0, 19, true, 1, 0, 0}}},
		{"merge over a gap", []func(*Table[int]){set(1, 0, 4, true), set(1, 8, 9, true), set(1, 3, 8, true)},
			[]l{{0, 9, true, 1, 0, 0}}},
		{"owners stay apart", []func(*Table[int]){set(1, 0, 9, false), set(2, 10, 19, false)},
			[]l{{0, 9, false, 1, 0, 0}, {10, 19, false, 2, 0, 0}}},
		{"open files stay apart", []func(*Table[int]){set(1, 0, 9, true), through(7, 5, 14), set(1, 20, 29, true),
			through(7, 15, 19)}, []l{{0, 4, true, 1, 0, 0}, {5, 19, true, 1, 0, 7}, {20, 29, true, 1, 0, 0}}},
		{"another mode splits", []func(*Table[int]){set(1, 0, 9, true), set(1, 3, 5, false)},
			[]l{{0, 2, true, 1, 0, 0}, {3, 5, false, 1, 0, 0}, {6, 9, true, 1, 0, 0}}},
		{"clear splits", []func(*Table[int]){set(1, 0, MaxOffset, true), clr(1, 3, 5)},
			[]l{{0, 2, true, 1, 0, 0}, {6, MaxOffset, true, 1, 0, 0}}},
		{"clear to the end", []func(*Table[int]){set(1, 5, MaxOffset, true), clr(1, 8, MaxOffset)},
			[]l{{5, 7, true, 1, 0, 0}}},
		{"clear of another owner", []func(*Table[int]){set(1, 0, 9, true), clr(2, 0, 9)}, []l{{0, 9, true, 1, 0, 0}}},
	} {
		var table Table[int]
		for _, step := range x.steps {
			step(&table)
		}
		if got := table.All(); !slices.Equal(got, x.want) {
			t.Errorf("%s: got locks %+v, want %+v", x.name, got, x.want)
		}
	}
}

func TestHolds(t *testing.T) {
	var table Table[int]
	table.Set(Lock[int]{Start: 0, End: 9, Owner: 1})
	table.Set(Lock[int]{Start: 10, End: 19, Exclusive: true, Owner: 1})
	for _, x := range []struct {
		l    Lock[int]
		want bool
	}{
		{Lock[int]{Start: 0, End: 19, Owner: 1}, true},
		{Lock[int]{Start: 0, End: 19, Owner: 1, Exclusive: true}, false},
		{Lock[int]{Start: 12, End: 15, Owner: 1, Exclusive: true}, true},
		{Lock[int]{Start: 0, End: 20, Owner: 1}, false},
		{Lock[int]{Start: 0, End: 9, Owner: 2}, false},
	} {
		if got := table.Holds(&x.l); got != x.want {
			t.Errorf("Holds(%+v): got %v, want %v", x.l, got, x.want)
		}
	}
}

// TestTableAgreesWithKernel compares random operations with the kernel's locks on a local file. An
// open file description is an owner (F_OFD_SETLK).
func TestTableAgreesWithKernel(t *testing.T) {
	const owners, span, steps, seeds = 4, 24, 300, 8
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(seeds) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var fds [owners + 1]int // the last one only asks
		for i := range fds {
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			fds[i] = fd
		}
		var table Table[int]
		for step := range steps {
			l := randomLock(rnd, owners, span)
			unlock := rnd.IntN(3) == 0
			k := flock(&l)
			if unlock {
				k.Type = unix.F_UNLCK
			}
			err := unix.FcntlFlock(uintptr(fds[l.Owner]), unix.F_OFD_SETLK, &k)
			switch conflict := table.Conflict(&l); {
			case unlock:
				table.Clear(l.Owner, l.Start, l.End)
			case (conflict != nil) != (err == unix.EAGAIN):
				t.Fatalf("seed %d, step %d: %+v: kernel says %v, conflict %+v", seed, step, l, err, conflict)
			case err == nil:
				table.Set(l)
			}
			compare(t, &table, fds[:], span)
			table.check(t)
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

// check compares what the table keeps for its searches with the locks.
func (t *Table[O]) check(tb testing.TB) {
	tb.Helper()
	var reach []uint64
	owned := make(map[O]int)
	for i, l := range t.locks {
		end := l.End
		if i > 0 {
			end = max(end, reach[i-1])
		}
		reach = append(reach, end)
		owned[l.Owner]++
	}
	if !slices.Equal(t.reach, reach) || !maps.Equal(t.owned, owned) {
		tb.Fatalf("got ends %v, numbers of locks %v; want %v, %v", t.reach, t.owned, reach, owned)
	}
}

func randomLock(rnd *rand.Rand, owners, span int) Lock[int] {
	a, b := uint64(rnd.IntN(span)), uint64(rnd.IntN(span))
	l := Lock[int]{Start: min(a, b), End: max(a, b), Exclusive: rnd.IntN(2) == 0, Owner: rnd.IntN(owners)}
	if rnd.IntN(8) == 0 {
		l.End = MaxOffset
	}
	return l
}

func flock(l *Lock[int]) unix.Flock_t {
	k := unix.Flock_t{Type: unix.F_RDLCK, Start: int64(l.Start), Len: int64(l.End - l.Start + 1)}
	if l.Exclusive {
		k.Type = unix.F_WRLCK
	}
	if l.End == MaxOffset {
		k.Len = 0
	}
	return k
}

// compare asks for every byte whether a stranger and each owner may lock it.
func compare(t *testing.T, table *Table[int], fds []int, span int) {
	t.Helper()
	for at := range span + 1 {
		for owner, fd := range fds {
			for _, exclusive := range []bool{false, true} {
				l := Lock[int]{Start: uint64(at), End: uint64(at), Exclusive: exclusive, Owner: owner}
				k := flock(&l)
				if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &k); err != nil {
					t.Fatal(err)
				}
				if got := table.Conflict(&l) != nil; got != (k.Type != unix.F_UNLCK) {
					t.Fatalf("byte %d, owner %d, exclusive %v: got conflict %v, kernel's lock %+v; table %+v", at,
						owner, exclusive, got, k, table.All())
				}
			}
		}
	}
}

func TestSplits(t *testing.T) {
	for _, x := range []struct {
		owner      int
		start, end uint64
		want       bool
	}{{1, 11, 18, true}, {1, 10, 18, false}, {1, 11, 19, false}, {1, 0, MaxOffset, false}, {1, 30, 31, false},
		{2, 11, 18, false}} {
		var table Table[int]
		table.Set(Lock[int]{Start: 10, End: 19, Owner: 1})
		if got := table.Splits(x.owner, x.start, x.end); got != x.want {
			t.Errorf("Splits(%d, %d, %d): got %v, want %v", x.owner, x.start, x.end, got, x.want)
		}
		table.Clear(x.owner, x.start, x.end)
		if got := table.Len() > 1; got != x.want {
			t.Errorf("Clear(%d, %d, %d): Len grew %v, want %v", x.owner, x.start, x.end, got, x.want)
		}
	}
}

// TestSearchesAreShort sets many locks of a file in random order. A search for a range must then
// look at the locks near the range only.
func TestSearchesAreShort(t *testing.T) {
	const n = 4096
	var table Table[int]
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(n) {
		table.Set(Lock[int]{Start: uint64(4 * i), End: uint64(4*i + 1), Exclusive: true, Owner: i % 7})
	}
	for i := range uint64(n) {
		if from, to := table.near(4*i, 4*i+5); to-from > 2 {
			t.Fatalf("bytes from %d: got %d locks, want at most 2", 4*i, to-from)
		}
	}
}
