package base

import (
	"fmt"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Uses counts the MRs and queue pairs of a protection domain. The domain must not be deallocated
// while it has one. Uses is safe for concurrent use.
type Uses struct {
	Provider string // named in errors

	mu          sync.Mutex
	n           int  // guarded by mu
	deallocated bool // guarded by mu
}

// Take adds one use. Take fails with verbs.ErrInvalid after the protection domain was deallocated.
func (u *Uses) Take() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.deallocated {
		return u.errDeallocated()
	}
	u.n++
	return nil
}

// Drop removes one use.
func (u *Uses) Drop() {
	u.mu.Lock()
	u.n--
	u.mu.Unlock()
}

// End marks the protection domain as deallocated. End fails with verbs.ErrBusy while there are
// uses, and with verbs.ErrInvalid when the domain is already deallocated.
func (u *Uses) End() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.deallocated:
		return u.errDeallocated()
	case u.n > 0:
		return fmt.Errorf("%s: deallocate protection domain: %d MRs and QPs use it: %w", u.Provider, u.n,
			verbs.ErrBusy)
	}
	u.deallocated = true
	return nil
}

func (u *Uses) errDeallocated() error {
	return fmt.Errorf("%s: use protection domain: already deallocated: %w", u.Provider, verbs.ErrInvalid)
}
