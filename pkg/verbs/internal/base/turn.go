package base

import (
	"context"
	"slices"
	"sync"
)

// A Turn is held by one connect at a time. Its zero value is free.
//
// The newest of the connects that wait has the next turn. In order of arrival, a server that is
// slower than the connects arrive would get only connects whose timeout is about to expire, as soon
// as the wait is as long as the timeout. No connect would succeed, and all would be tried again.
type Turn struct {
	mu      sync.Mutex // guards the fields below
	held    bool
	waiting []chan struct{} // the newest last
}

// Acquire waits until no other connect holds the turn. It returns the error of ctx when ctx ends
// first, and ErrClosed when closed or removed, which may be nil, is closed first.
func (t *Turn) Acquire(ctx context.Context, closed, removed <-chan struct{}) error {
	if err := ctx.Err(); err != nil { // even when no connect is running
		return err
	}
	select {
	case <-closed:
		return ErrClosed
	default:
	}
	turn := t.queue()
	if turn == nil {
		return nil
	}
	var err error
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-closed:
		err = ErrClosed
	case <-removed:
		err = ErrClosed
	}
	t.mu.Lock()
	i := slices.Index(t.waiting, turn)
	if i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
	}
	t.mu.Unlock()
	if i < 0 { // it has just got the turn
		t.Release()
	}
	return err
}

// queue takes a free turn and returns nil. Otherwise the channel that it returns is closed when the
// caller gets the turn.
func (t *Turn) queue() chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.held {
		t.held = true
		return nil
	}
	turn := make(chan struct{})
	t.waiting = append(t.waiting, turn)
	return turn
}

// Release gives the turn to the newest connect that waits.
func (t *Turn) Release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := len(t.waiting) - 1
	if last < 0 {
		t.held = false
		return
	}
	close(t.waiting[last])
	t.waiting = slices.Delete(t.waiting, last, last+1)
}
