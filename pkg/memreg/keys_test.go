package memreg

import (
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// minDistance is the least number of registrations between two uses of a key (S4).
const minDistance = 128

// A keyLog checks the keys of registrations in their order.
type keyLog struct {
	t       *testing.T
	uses    map[uint32]int          // registrations of an index
	last    map[verbs.RKey]int      // number of the last registration that used the key
	recency map[uint32][]verbs.RKey // keys of an index, least recently used first
	rank    [256 - minDistance]int  // how often a key of this rank was chosen
	nearest int                     // smallest distance that was seen
}

func newKeyLog(t *testing.T) *keyLog {
	return &keyLog{t: t, uses: map[uint32]int{}, last: map[verbs.RKey]int{}, recency: map[uint32][]verbs.RKey{},
		nearest: 1 << 30}
}

// add records a registration with key.
func (k *keyLog) add(key verbs.RKey) {
	k.t.Helper()
	index := uint32(key) >> 8
	if n, used := k.last[key]; used {
		between := k.uses[index] - n - 1
		k.nearest = min(k.nearest, between)
		if between < minDistance {
			k.t.Fatalf("key %#x: got %d registrations between two uses, want at least %d", uint32(key), between,
				minDistance)
		}
	}
	k.last[key] = k.uses[index]
	k.uses[index]++
	order := k.recency[index]
	if i := slices.Index(order, key); i >= 0 {
		if len(order) == 256 {
			k.rank[i]++
		}
		order = slices.Delete(order, i, i+1)
	}
	k.recency[index] = append(order, key)
}

// TestKeysReturnLate registers memory many times, also after reconnects whose new MRs have the
// indexes of the old ones (S4). The MRs are recovered or recycled.
func TestKeysReturnLate(t *testing.T) {
	var stats Counters
	pd := &fakePD{reuse: true}
	pool := NewPool(pd, Params{Depth: 1, PageSize: 4096, MaxSegs: 8}, &stats, Hooks{})
	var l List
	l.Use(pool)
	mem := pages(t, 3)
	log := newKeyLog(t)
	for i := range 30_000 {
		n := 1 + i%3
		if _, err := l.Map([][]byte{mem[:n*4096]}, false, 1); err != nil {
			t.Fatal(err)
		}
		for _, m := range l.Registered() {
			if m.handle == m.vmr.RKey() && i < 10_000 {
				t.Fatalf("registration %d: got key %#x, which the MR has already", i, m.Handle())
			}
			log.add(m.handle)
		}
		switch {
		case i < 10_000 && i%2 == 0: // LOCAL_INVs cannot be posted, so the MRs are recycled
			if err := l.Invalidate(&failingQP{failAt: 0}, func(bool) {}); err == nil {
				t.Fatal("Invalidate: got no error")
			}
		case i < 10_000: // the connection ends
			if !pool.Recover() {
				t.Fatal("Recover: got an unusable pool")
			}
		default:
			l.Unmap()
		}
	}
	if len(log.uses) != 3 {
		t.Errorf("indexes: got %d, want 3", len(log.uses))
	}
	// About 39,000 registrations selected one of 128 keys each, 300 times each with a standard
	// deviation of 17.
	for i, n := range log.rank {
		if n < 200 || n > 400 {
			t.Errorf("choices of the key at rank %d, least recently used first: got %d, want about 300", i, n)
		}
	}
	if log.nearest > minDistance+8 {
		t.Errorf("smallest distance: got %d, want about %d: the choice is smaller than promised", log.nearest,
			minDistance)
	}
	pool.Destroy()
}

// TestFirstKeysAreUnpredictable checks the first key of many MRs. All 256 values must occur.
func TestFirstKeysAreUnpredictable(t *testing.T) {
	var seen [256]int
	for i := range 256 * 40 {
		h := newKeyHistory()
		h.current = uint8(i)
		seen[h.next()]++
	}
	for k, n := range seen {
		if n < 10 || n > 90 {
			t.Errorf("first key %#x: got it %d times, want about 40", k, n)
		}
	}
}
