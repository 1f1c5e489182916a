package nlm

import (
	"context"
	"slices"
	"sync"
	"syscall"
)

// A turn is a mutex whose waiters get it in the order in which they queued. Its zero value is free.
type turn struct {
	mu      sync.Mutex // guards the fields below
	taken   bool
	waiting []*place
}

// A place is a place in the queue for a turn.
type place struct {
	t   *turn
	got chan struct{} // closed when the place has the turn
}

// queue takes the last place of the queue, and does not wait. Each place needs one call of wait.
func (t *turn) queue() *place {
	p := &place{t, make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken {
		t.waiting = append(t.waiting, p)
	} else {
		t.taken = true
		close(p.got)
	}
	return p
}

// wait waits until the place has the turn, which the caller must release. The error is EINTR: ctx
// has ended, and the place has left the queue.
func (p *place) wait(ctx context.Context) error {
	select {
	case <-p.got:
		return nil
	case <-ctx.Done():
	}
	p.t.mu.Lock()
	i := slices.Index(p.t.waiting, p)
	if i >= 0 {
		p.t.waiting = slices.Delete(p.t.waiting, i, i+1)
	}
	p.t.mu.Unlock()
	if i < 0 { // it has just got the turn
		p.t.release()
	}
	return syscall.EINTR
}

// release gives the turn to the first place of the queue.
func (t *turn) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.waiting) == 0 {
		t.taken = false
		return
	}
	close(t.waiting[0].got)
	t.waiting = slices.Delete(t.waiting, 0, 1)
}
