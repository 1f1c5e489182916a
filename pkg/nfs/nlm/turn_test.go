package nlm

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestTurnIsInOrder checks that places get the turn in the order in which they queued, whatever the
// order in which they wait, and that a place whose context ends is left out.
func TestTurnIsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turn turn
		if err := turn.queue().wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		var order []int
		places := []*place{turn.queue(), turn.queue(), turn.queue(), turn.queue()}
		for i := len(places) - 1; i >= 0; i-- {
			ctx := t.Context()
			if i == 1 {
				ctx = ended
			}
			go func() {
				if places[i].wait(ctx) == nil {
					order = append(order, i)
					turn.release()
				}
			}()
			synctest.Wait()
		}
		turn.release()
		synctest.Wait()
		if len(order) != 3 || order[0] != 0 || order[1] != 2 || order[2] != 3 {
			t.Errorf("got the turn in the order %v, want [0 2 3]", order)
		}
	})
}

// TestTurnLeftLate ends the context of a place that has just got the turn. The next place must get
// it.
func TestTurnLeftLate(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 100 {
		var turn turn
		if turn.queue().wait(ended) == nil { // both cases of its select are ready
			turn.release()
		}
		if err := turn.queue().wait(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
