package xprt

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

const (
	// addressTimeout bounds one attempt to connect to one of several addresses. It doubles with
	// each failure, up to Config.ConnectTimeout, when no address works.
	addressTimeout = 5 * time.Second
	// An address that failed is tried last for avoidMin. This time doubles with each failure after
	// it, up to avoidMax. It is longer by up to half of it, by a random part of each mount, so that
	// the clients of a server do not all return to an address at the same moment.
	avoidMin = 10 * time.Second
	avoidMax = 5 * time.Minute
	// returnIdle is the time without a call after which a connection to another address than the
	// preferred one ends, if the preferred one can be tried again.
	returnIdle = 5 * time.Second
)

// Addresses are the addresses of one server, and which of them failed lately. The transports of a
// mount share them, so that an address that failed for one transport delays no other. Safe for
// concurrent use.
type Addresses struct {
	all    []netip.AddrPort // does not change
	longer float64          // random part of half of the avoided time, from 0 to 1

	mu     sync.Mutex // guards health; no other lock is taken while it is held
	health []addressHealth
}

// An addressHealth describes one address. The zero value is an address that works.
type addressHealth struct {
	failures int       // since the address last worked, without those while it was avoided
	avoid    time.Time // the address is tried last before this time
}

// NewAddresses returns the addresses of a server. The transport with index i prefers address i,
// modulo their number.
func NewAddresses(all ...netip.AddrPort) *Addresses {
	return &Addresses{all: all, longer: rand.Float64(), health: make([]addressHealth, len(all))}
}

// choose returns the address of the next attempt to connect, and the timeout of the attempt. It
// prefers the given address, then those behind it in the list. If all of them failed lately, it
// returns the one that can be tried again first.
func (a *Addresses) choose(preferred int, connectTimeout time.Duration) (i int, timeout time.Duration) {
	if len(a.all) == 1 {
		return 0, connectTimeout
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now, best := time.Now(), preferred
	for n := range a.all {
		i := (preferred + n) % len(a.all)
		if !a.health[i].avoid.After(now) {
			return i, min(addressTimeout, connectTimeout)
		}
		if a.health[i].avoid.Before(a.health[best].avoid) {
			best = i
		}
	}
	return best, min(addressTimeout<<min(a.health[best].failures, 8), connectTimeout)
}

// failed records that no connection to address i was possible, or that the server was silent there.
func (a *Addresses) failed(i int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h, now := &a.health[i], time.Now()
	if !h.avoid.After(now) { // several transports may notice one failure
		h.failures++
	}
	avoid := min(avoidMin<<min(h.failures-1, 8), avoidMax)
	h.avoid = now.Add(avoid + time.Duration(a.longer*float64(avoid/2)))
}

// worked records that address i works.
func (a *Addresses) worked(i int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.health[i] = addressHealth{}
}

// usable reports whether address i can be tried.
func (a *Addresses) usable(i int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.health[i].avoid.After(time.Now())
}

// preferred returns the index of the preferred address of t.
func (t *Transport) preferred() int { return int(t.cfg.Index) % len(t.cfg.Servers.all) }

// Address returns the address of the current connection, or that of the last attempt.
func (t *Transport) Address() netip.AddrPort { return t.cfg.Servers.all[t.address.Load()] }

// Preferred returns the address that the transport prefers.
func (t *Transport) Preferred() netip.AddrPort { return t.cfg.Servers.all[t.preferred()] }

// rateAddress records what the end of a connection says about its address. An address that did not
// answer, or that became silent, is tried last.
func (t *Transport) rateAddress(cn *conn, use usefulness) {
	switch {
	case errors.Is(cn.err, ErrClosed), errors.Is(cn.err, errIdle), errors.Is(cn.err, errReturn):
	case use == useNone, isSilence(cn.err):
		t.cfg.Servers.failed(int(t.address.Load()))
	case use == useProgress:
		t.cfg.Servers.worked(int(t.address.Load()))
	}
}

// isSilence reports whether a connection ended because the server did not answer, so that an
// attempt to connect to the same address would probably wait too.
func isSilence(err error) bool {
	var timeout *TimeoutError
	return errors.As(err, &timeout) || errors.Is(err, syscall.ETIMEDOUT)
}

// mayReturn reports whether a connection that has no call should end, because the preferred address
// may work again.
func (t *Transport) mayReturn(now int64) bool {
	return int(t.address.Load()) != t.preferred() && now-t.lastCall.Load() > int64(returnIdle) &&
		t.cfg.Servers.usable(t.preferred())
}
