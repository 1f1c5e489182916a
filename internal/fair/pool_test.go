package fair

import (
	"context"
	"testing"
	"testing/synctest"
)

// fill takes one for u until it may have no more, and returns what u has then.
func fill(p *Pool, u *User) int64 {
	for p.TryTake(u, 1) {
	}
	return p.Used(u)
}

func TestSharesLeaveRoomForTheNextUser(t *testing.T) {
	p := NewPool(120)
	for n, want := range []int64{60, 30, 15} { // each half of what is left
		if got := fill(p, new(User)); got != want {
			t.Errorf("user %d: got %d, want %d", n, got, want)
		}
	}
	p = NewPool(120)
	var a, b User
	for p.TryTake(&a, 1) || p.TryTake(&b, 1) {
		p.TryTake(&b, 1)
	}
	if a, b := p.Used(&a), p.Used(&b); a != 40 || b != 40 {
		t.Errorf("two users at the same time: got %d and %d, want 40 each", a, b)
	}
}

// A user who has nothing gets what is left, also if it is more than half.
func TestUserWithoutAnythingGetsTheRest(t *testing.T) {
	p := NewPool(2)
	var a, b User
	if !p.TryTake(&a, 2) {
		t.Fatal("first user: got nothing, want all")
	}
	if p.TryTake(&b, 1) {
		t.Error("second user: got something from an empty pool")
	}
	p.Give(&a, 2)
	if !p.TryTake(&b, 1) || p.TryTake(&b, 1) {
		t.Error("second user: want half of the pool")
	}
}

// Requests of a user that is at its limit wait in order, and delay no other user.
func TestRequestsOfOneUserWaitInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool(16)
		var a, b User
		fill(p, &a) // 8
		got := make(chan int64, 8)
		take := func(ctx context.Context, n int64) {
			go func() {
				if p.Take(ctx, &a, n) == nil {
					got <- n
				}
			}()
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(t.Context())
		take(ctx, 5)
		take(t.Context(), 3)
		take(t.Context(), 1)
		if p.TryTake(&a, 0) || !p.TryTake(&b, 1) || !p.Waiting() {
			t.Error("want the requests of the first user to wait, and those of the second not")
		}
		p.Give(&b, 1)
		p.Give(&a, 2) // one has room, but not before the others
		synctest.Wait()
		if len(got) != 0 {
			t.Errorf("got %d before the requests that came first", <-got)
		}
		cancel() // now three is the first, and does not fit
		synctest.Wait()
		if len(got) != 0 {
			t.Errorf("got %d, want the requests to wait", <-got)
		}
		p.Give(&a, 2)
		if n := <-got + <-got; n != 4 {
			t.Errorf("got %d, want 3 and 1", n)
		}
		if n := p.Used(&a); n != 8 || p.Waiting() {
			t.Errorf("first user: got %d, want 8 and no request that waits", n)
		}
		p.Give(&a, 1)
		if !p.TryTake(&a, 1) {
			t.Error("first user, after its requests were served: got nothing, want 1")
		}
	})
}
