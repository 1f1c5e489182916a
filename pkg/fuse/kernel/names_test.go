package kernel

import (
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestNames checks that names stay as they are when the memory of their request is used again, also
// when many names have the same slot.
func TestNames(t *testing.T) {
	n := newNames()
	var work sync.WaitGroup
	for worker := range 4 {
		work.Go(func() {
			for i := range 4 * nameSlots {
				want := strconv.Itoa(worker*nameSlots + i)
				b := []byte(want)
				first, second := n.get(b), n.get(b)
				clear(b)
				if first != want || second != want {
					t.Errorf("got %q and %q, want %q", first, second, want)
				}
			}
		})
	}
	work.Wait()
	b := []byte(strings.Repeat("n", 255))
	n.get(b)
	if got := testing.AllocsPerRun(100, func() { n.get(b) }); got != 0 {
		t.Errorf("a known name: got %v allocations, want 0", got)
	}
}
