package softiwarp

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestManyConnectsToSlowServerEnd makes more connects at a time than a server can complete within
// their timeout, twice as fast as it completes them. Each connect is tried again after a failure.
// The server must not spend its time on connects whose timeout is about to expire.
func TestManyConnectsToSlowServerEnd(t *testing.T) {
	const (
		connects  = 3000
		interval  = 20 * time.Millisecond // between the attempts
		handshake = 2 * interval
		timeout   = 30 * time.Second
	)
	synctest.Test(t, func(t *testing.T) {
		limiter := connectLimiter{addrs: make(map[netip.AddrPort]*addrLimit)}
		addr, began := netip.MustParseAddrPort("192.0.2.1:1"), time.Now()
		end, cancel := context.WithTimeout(t.Context(), 10*connects*handshake)
		defer cancel()
		var mu sync.Mutex // guards the variables below
		next, left := time.Now(), connects
		await := func() {
			mu.Lock()
			if now := time.Now(); next.Before(now) {
				next = now
			}
			at := next
			next = next.Add(interval)
			mu.Unlock()
			time.Sleep(time.Until(at))
		}
		attempt := func() bool {
			ctx, cancel := context.WithTimeout(end, timeout)
			defer cancel()
			release, err := limiter.acquire(ctx, nil, addr)
			if err != nil {
				return false
			}
			defer release()
			time.Sleep(handshake)
			return ctx.Err() == nil
		}
		var work sync.WaitGroup
		for range connects {
			work.Go(func() {
				for await(); !attempt(); await() {
					if end.Err() != nil {
						return
					}
				}
				mu.Lock()
				left--
				mu.Unlock()
			})
		}
		work.Wait()
		if took := time.Since(began); left > 0 || took > 2*connects*handshake {
			t.Errorf("got %d of %d connects in %v, want all in %v", connects-left, connects, took, connects*handshake)
		}
	})
}
