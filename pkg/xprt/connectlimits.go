package xprt

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// connectBurst is the number of connects to one address that no limit delays. It is the largest
// number of connections of a mount.
const connectBurst = 16

// ConnectLimits bound the rate of connects to each address of servers. All transports of a daemon
// share them, so that the mounts of one server do not all connect at once when they lost their
// connections. Safe for concurrent use.
type ConnectLimits struct {
	perSecond int

	// mu guards byAddress and makes a refusal atomic: a turn that is given back counts if another
	// connect has got one behind it. No other lock of this package is taken while mu is held.
	mu        sync.Mutex
	byAddress map[netip.Addr]*rate.Limiter
}

// NewConnectLimits returns limits of the given number of connects per second to each address, after
// connectBurst connects without delay. 0 is no limit.
func NewConnectLimits(perSecond int) *ConnectLimits {
	return &ConnectLimits{perSecond: perSecond, byAddress: make(map[netip.Addr]*rate.Limiter)}
}

// A ConnectLimitError means that the limits of connects to Address do not permit the connects
// before their timeout.
type ConnectLimitError struct {
	Address   netip.Addr
	PerSecond int
}

func (e *ConnectLimitError) Error() string {
	return fmt.Sprintf("connect %s: too many other connects to this address wait (connect_rate = %d per second); "+
		"mount again later, or increase connect_rate", e.Address, e.PerSecond)
}

// Wait waits until one connect to each of the addresses may begin. An address may occur several
// times, at most connectBurst times. Connects that are requested together have their turn together,
// so a mount with several connections does not keep some of them while it waits for the others.
//
// Wait returns an error when ctx ends first, and a *ConnectLimitError at once if its deadline would
// come first. Then the connects do not count. Without limits, also if l is nil, it does not wait.
func (l *ConnectLimits) Wait(ctx context.Context, addresses ...netip.Addr) error {
	if l == nil || l.perSecond == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	connects := make(map[netip.Addr]int)
	for _, a := range addresses {
		connects[a]++
	}
	now := time.Now()
	turns, delay, err := l.reserve(ctx, now, connects)
	if err != nil || delay == 0 {
		return err
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		giveBack(turns, now)
		return ctx.Err()
	}
}

// reserve takes the turns of connects, which come together after delay. It takes none with an error.
func (l *ConnectLimits) reserve(ctx context.Context, now time.Time,
	connects map[netip.Addr]int) (turns []*rate.Reservation, delay time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	deadline, bounded := ctx.Deadline()
	for a, n := range connects {
		r := l.limiter(a).ReserveN(now, n)
		turns = append(turns, r)
		delay = max(delay, r.DelayFrom(now))
		if bounded && now.Add(delay).After(deadline) || !r.OK() {
			giveBack(turns, now)
			return nil, 0, &ConnectLimitError{a, l.perSecond}
		}
	}
	return turns, delay, nil
}

// giveBack gives turns back, those without delay, too.
func giveBack(turns []*rate.Reservation, now time.Time) {
	for _, r := range turns {
		r.CancelAt(now)
	}
}

// limiter returns the limiter of an address. The caller holds mu.
func (l *ConnectLimits) limiter(address netip.Addr) *rate.Limiter {
	limiter := l.byAddress[address]
	if limiter == nil {
		for a, other := range l.byAddress { // forget those that are as new, so that their number is bounded
			if other.Tokens() >= connectBurst {
				delete(l.byAddress, a)
			}
		}
		limiter = rate.NewLimiter(rate.Limit(l.perSecond), connectBurst)
		l.byAddress[address] = limiter
	}
	return limiter
}
