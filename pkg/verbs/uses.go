package verbs

import (
	"fmt"
	"sync"
)

// Uses counts the MRs and queue pairs of a provider's protection domain, which must not be
// deallocated under them. Safe for concurrent use.
type Uses struct {
	Provider string // for errors

	mu    sync.Mutex
	n     int  // guarded by mu
	ended bool // guarded by mu
}

// Take adds one. It fails with ErrInvalid when the protection domain was deallocated.
func (u *Uses) Take() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended {
		return u.deallocated()
	}
	u.n++
	return nil
}

// Drop takes one away.
func (u *Uses) Drop() {
	u.mu.Lock()
	u.n--
	u.mu.Unlock()
}

// End is the deallocation: of no use any more. It fails with ErrBusy while there are uses, and with
// ErrInvalid the second time.
func (u *Uses) End() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return u.deallocated()
	case u.n > 0:
		return fmt.Errorf("%s: deallocate protection domain: %d MRs and QPs use it: %w", u.Provider, u.n, ErrBusy)
	}
	u.ended = true
	return nil
}

func (u *Uses) deallocated() error {
	return fmt.Errorf("%s: protection domain was deallocated: %w", u.Provider, ErrInvalid)
}
