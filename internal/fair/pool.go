package fair

import (
	"context"
	"slices"
	"sync"
)

// A Pool is an amount of a resource, such as memory. It may be used concurrently.
//
// A user gets more of a Pool only if it then has no more than the pool has left. One user therefore
// gets at most half of the pool. Two users who compete get a third each. A user who gives nothing
// back leaves as much to others as it has. A user who has nothing gets what is left.
type Pool struct {
	mu      sync.Mutex // guards the fields below, and those of the users
	free    int64
	waiters []*waiter // in the order in which they came
	pass    uint64    // number of the last call of grant
}

// A User is a user of one Pool. The zero User has nothing. It is kept while it has something.
type User struct {
	used    int64
	waiters int
	blocked uint64 // the call of grant in which a request of the user did not fit
}

// A waiter is a request that waits.
type waiter struct {
	user  *User
	n     int64
	ready chan struct{} // closed when the user has got n
}

// NewPool returns a pool with an amount.
func NewPool(total int64) *Pool { return &Pool{free: total} }

// TryTake takes n for u if u may have it now and no request of u waits. It reports whether it did.
func (p *Pool) TryTake(u *User, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tryTake(u, n)
}

func (p *Pool) tryTake(u *User, n int64) bool {
	if u.waiters > 0 || !p.fits(u, n) {
		return false
	}
	p.free -= n
	u.used += n
	return true
}

// fits reports whether u may have n more. mu is held.
func (p *Pool) fits(u *User, n int64) bool {
	return n <= p.free && (u.used == 0 || u.used+n <= p.free-n)
}

// Take takes n for u. It waits until u may have it, or until ctx ends: then it returns the error of
// ctx and has taken nothing. The requests of one user are served in order. n must not exceed the
// total of the pool.
func (p *Pool) Take(ctx context.Context, u *User, n int64) error {
	p.mu.Lock()
	if p.tryTake(u, n) {
		p.mu.Unlock()
		return nil
	}
	w := &waiter{user: u, n: n, ready: make(chan struct{})}
	p.waiters = append(p.waiters, w)
	u.waiters++
	p.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiters, w)
	if i < 0 {
		return nil // it has got n meanwhile
	}
	p.waiters = slices.Delete(p.waiters, i, i+1)
	u.waiters--
	p.grant() // the next request of u may be smaller
	return ctx.Err()
}

// Give gives n of u back.
func (p *Pool) Give(u *User, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free += n
	u.used -= n
	p.grant()
}

// grant serves the requests that fit now. mu is held.
func (p *Pool) grant() {
	if len(p.waiters) == 0 {
		return
	}
	p.pass++
	p.waiters = slices.DeleteFunc(p.waiters, func(w *waiter) bool {
		u := w.user
		if u.blocked == p.pass || !p.fits(u, w.n) {
			u.blocked = p.pass
			return false
		}
		p.free -= w.n
		u.used += w.n
		u.waiters--
		close(w.ready)
		return true
	})
}

// Used returns what u has.
func (p *Pool) Used(u *User) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return u.used
}

// Waiting reports whether a request waits.
func (p *Pool) Waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiters) > 0
}
