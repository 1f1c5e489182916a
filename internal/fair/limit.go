package fair

import (
	"errors"
	"sync"
	"time"
)

// Errors of Limit.Take.
var (
	// ErrShare means that the user has half of the table.
	ErrShare = errors.New("the user has its share of the table")
	// ErrFull means that the table is full, or that the places that are left are those of root.
	ErrFull = errors.New("the table is full")
)

const (
	// reserve is the part of a table that is left for root: 1/16.
	reserve = 16
	// warnInterval is the shortest time between two warnings of one Limit.
	warnInterval = time.Minute
)

// A Limit counts the places of a table that each user has. A user gets at most half of the places,
// and none of those that are left for root. Only the size of the table limits root, as that of the
// kernel's table of open files does not limit a process with CAP_SYS_ADMIN.
//
// The methods may be called concurrently.
type Limit struct {
	// Warn, if not nil, logs refusals, at most one a minute, with key-value pairs. It must not call
	// the Limit. Set it before the Limit is used.
	Warn func(msg string, args ...any)

	table string
	size  int

	mu    sync.Mutex // guards the fields below
	used  int
	users map[uint32]int
	quiet time.Time // no warning before
}

// NewLimit returns a Limit for a table with size places. Warnings name the table.
func NewLimit(table string, size int) *Limit {
	return &Limit{table: table, size: size, users: make(map[uint32]int)}
}

// Share returns the largest number of places of one user other than root.
func (l *Limit) Share() int { return max(l.size/2, 1) }

// Take takes one place for a user. The error is ErrShare or ErrFull.
func (l *Limit) Take(uid uint32) error {
	l.mu.Lock()
	err := l.check(uid)
	if err == nil {
		l.add(uid, 1)
	}
	warn := err != nil && l.Warn != nil && !time.Now().Before(l.quiet)
	if warn {
		l.quiet = time.Now().Add(warnInterval)
	}
	l.mu.Unlock()
	if warn {
		l.Warn("requests of a user fail: no room in a table", "table", l.table, "uid", uid, "share", l.Share(),
			"size", l.size, "error", err)
	}
	return err
}

// check returns the error of Take. The caller holds mu.
func (l *Limit) check(uid uint32) error {
	switch {
	case uid == 0 && l.used >= l.size, uid != 0 && l.used >= l.size-l.size/reserve:
		return ErrFull
	case uid != 0 && l.users[uid] >= l.Share():
		return ErrShare
	}
	return nil
}

// Used returns the number of places in use.
func (l *Limit) Used() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// Release returns one place of a user.
func (l *Limit) Release(uid uint32) { l.Add(uid, -1) }

// Add changes the number of places of a user by n, whatever the limit: a table of an earlier
// process has them already, or a change of the table has shown how many it needs.
func (l *Limit) Add(uid uint32, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(uid, n)
}

func (l *Limit) add(uid uint32, n int) {
	l.used += n
	if l.users[uid] += n; l.users[uid] == 0 {
		delete(l.users, uid)
	}
}
