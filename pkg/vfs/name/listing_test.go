package name

import (
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// TestWalkStartsWithoutVerifier checks the verifier of a renewal from the start of the directory.
func TestWalkStartsWithoutVerifier(t *testing.T) {
	dir := &Dir{listing: &listing{cookies: []uint64{0, 9}, verf: nfs.Verifier{1}, credit: walkMax, at: time.Now()}}
	for index, want := range map[uint32]nfs.Verifier{0: {}, Chunk: {1}} {
		if _, verf, ok := dir.BeginRenewal(index); !ok || verf != want {
			t.Errorf("renewal of entry %d: got verifier %v, %v, want %v", index, verf, ok, want)
		}
		dir.listing.busy = false
	}
}

// TestWalkCredit checks when a renewal may begin.
func TestWalkCredit(t *testing.T) {
	now := time.Now()
	next := func(i int) (uint32, time.Duration) { return uint32(i), 0 }
	for _, c := range []struct {
		name     string
		request  func(i int) (index uint32, pause time.Duration)
		requests int
		want     int // renewals
	}{
		{"few files in order", next, 3, 0},
		{"files in order", next, 4, 1},
		{"files in order with gaps", func(i int) (uint32, time.Duration) { return uint32(i * walkGap), 0 }, 4, 1},
		{"files in order, slowly", func(i int) (uint32, time.Duration) { return uint32(i), 2 * walkPause }, 100, 0},
		{"one file", func(int) (uint32, time.Duration) { return 7, 0 }, 23, 0},
		// Renewals do not help these requests.
		{"random files", func(i int) (uint32, time.Duration) { return uint32(i * 7919 % 100000 * 100), 0 }, 800, 98},
	} {
		var w listing
		at, renewals := now, 0
		for i := range c.requests {
			index, pause := c.request(i)
			if at = at.Add(pause); w.earn(index, at) {
				w.credit -= walkCost
				renewals++
			}
		}
		if renewals != c.want {
			t.Errorf("%s: got %d renewals, want %d", c.name, renewals, c.want)
		}
	}
}
