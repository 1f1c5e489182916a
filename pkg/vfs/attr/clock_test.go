package attr

import (
	"sync"
	"testing"
	"time"
)

// TestClock checks that marks at the same time never set a Moment back, and which renames are the
// only ones since a time.
func TestClock(t *testing.T) {
	var c Clock
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for last := uint64(0); last < 1000; {
				c.Mark(&c.Removal)
				at := c.Removal.At()
				if at <= last || at > c.Now() {
					t.Errorf("moment after a mark: got %d, want more than %d and at most %d", at, last, c.Now())
					return
				}
				last = at
			}
		})
	}
	wg.Wait()
	start := c.Now()
	first := c.RenameEnded()
	if seen, only := c.OnlyRename(start, first); !only || seen != c.Now() || c.LastRename() != first.now {
		t.Errorf("only rename: got %d, %v, want %d, true", seen, only, c.Now())
	}
	second := c.RenameEnded()
	for _, e := range []Rename{first, second} {
		if _, only := c.OnlyRename(start, e); only {
			t.Errorf("rename %+v of two: got the only one", e)
		}
	}
}

func TestInstant(t *testing.T) {
	from := Now()
	if d := from.Add(time.Second).Sub(from); d != time.Second || Now() < from {
		t.Errorf("time between two instants: got %v, want %v", d, time.Second)
	}
}
