package memreg

import (
	"math/rand/v2"
	"testing"
	"unsafe"
)

const testPage = 4096

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// randomSegments returns segments of mem. Some are adjacent, and some begin or end with a page.
func randomSegments(rng *rand.Rand, mem []byte) [][]byte {
	var segs [][]byte
	at := rng.IntN(2 * testPage)
	for range 1 + rng.IntN(6) {
		n := 1 + rng.IntN(3*testPage)
		if rng.IntN(2) == 0 {
			n = testPage - at%testPage + rng.IntN(2)*testPage
		}
		segs = append(segs, mem[at:at+n:at+n])
		at += n
		switch rng.IntN(3) {
		case 0:
			at += 1 + rng.IntN(testPage)
		case 1:
			at += testPage - at%testPage
		}
	}
	return segs
}

// TestMapFillsEachMR maps random segments. The MRs must hold all bytes in order, no MR may have
// more pages than its depth or a join that the device does not support, and each MR but the last
// must have no room for the next byte (S3).
func TestMapFillsEachMR(t *testing.T) {
	mem := pages(t, 64)
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 3000 {
		segs := randomSegments(rng, mem)
		p := Params{Depth: 1 + rng.IntN(4), Gaps: rng.IntN(3) == 0, Contiguous: rng.IntN(3) == 0, PageSize: testPage,
			MaxSegs: 200}
		var stats Counters
		pool := NewPool(&fakePD{}, p, &stats, Hooks{})
		var l List
		l.Use(pool)
		if _, err := l.Map(segs, true, 1); err != nil {
			t.Fatal(err)
		}
		for i, m := range l.Registered() {
			segs = checkLayout(t, &p, m, segs)
			if last := i == len(l.Registered())-1; last != (len(segs) == 0) || t.Failed() {
				t.Fatalf("round %d, %+v: MR %d of %d, %d segments left", round, p, i, len(l.Registered()), len(segs))
			}
		}
		if err := l.Unmap(); err != nil {
			t.Fatal(err)
		}
		pool.Destroy()
	}
}

// checkLayout checks that m holds the first bytes of segs, and as many as possible. It returns the
// rest of segs.
func checkLayout(t *testing.T, p *Params, m *MR, segs [][]byte) [][]byte {
	t.Helper()
	used, length, end := uintptr(0), 0, uintptr(0) // end of the bytes so far
	// pages returns how many more pages n bytes at a need. It returns false if they may not be
	// added.
	pages := func(a, n uintptr) (uintptr, bool) {
		switch {
		case a == end:
			return (a+n-1)/testPage - (a-1)/testPage, true
		case end == 0, p.Gaps, !p.Contiguous && a%testPage == 0 && end%testPage == 0:
			return (a+n-1)/testPage - a/testPage + 1, true
		}
		return 0, false
	}
	for _, s := range m.segs {
		if address(s) != address(segs[0]) || len(s) == 0 || len(s) > len(segs[0]) {
			t.Fatalf("got %d bytes at %#x, want the start of %d bytes at %#x", len(s), address(s), len(segs[0]),
				address(segs[0]))
		}
		more, allowed := pages(address(s), uintptr(len(s)))
		if !allowed {
			t.Errorf("an MR joins memory that ends at %#x and memory at %#x", end, address(s))
		}
		used, length, end = used+more, length+len(s), address(s)+uintptr(len(s))
		if segs[0] = segs[0][len(s):]; len(segs[0]) == 0 {
			segs = segs[1:]
		}
	}
	if used > uintptr(p.Depth) || int(m.Length()) != length {
		t.Errorf("got %d pages, length %d; want at most %d pages, length %d", used, m.Length(), p.Depth, length)
	}
	if len(segs) > 0 {
		if more, allowed := pages(address(segs[0]), 1); allowed && used+more <= uintptr(p.Depth) {
			t.Errorf("an MR with %d of %d pages has room for the next byte", used, p.Depth)
		}
	}
	return segs
}
