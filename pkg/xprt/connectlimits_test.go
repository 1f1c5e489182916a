package xprt

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestConnectLimits starts the connects of four mounts with 16 connections to one address. Those of
// the first mount are not delayed. The others wait, but not for those to another address.
func TestConnectLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		l, began := NewConnectLimits(50), time.Now()
		var mu sync.Mutex // guards after
		after := make(map[time.Duration]int)
		var work sync.WaitGroup
		for range 64 {
			work.Go(func() {
				if err := l.Wait(t.Context(), one); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				after[time.Since(began).Round(time.Millisecond)]++
			})
		}
		synctest.Wait()
		for range 16 {
			if err := l.Wait(t.Context(), other); err != nil || time.Since(began) != 0 {
				t.Errorf("other address: got error %v after %v, want none at once", err, time.Since(began))
			}
		}
		work.Wait()
		if after[0] != 16 || len(after) != 49 {
			t.Errorf("got %d connects at once and %d times in all; want 16 and 49", after[0], len(after))
		}
		for i := range 49 {
			if at := time.Duration(i) * 20 * time.Millisecond; after[at] == 0 {
				t.Errorf("no connect after %v; got %v", at, after)
			}
		}
	})
}

// TestConnectLimitsEndWithContext checks that a wait ends with its context. If its deadline would
// come first, the wait fails at once and says why.
func TestConnectLimitsEndWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, began := netip.MustParseAddr("192.0.2.1"), time.Now()
		l := NewConnectLimits(1)
		for range connectBurst {
			if err := l.Wait(t.Context(), a); err != nil {
				t.Fatal(err)
			}
		}
		short, cancel := context.WithTimeout(t.Context(), 999*time.Millisecond)
		defer cancel()
		if err := l.Wait(short, a); err == nil || !strings.Contains(err.Error(), "connect_rate = 1 per second") ||
			time.Since(began) != 0 {
			t.Errorf("deadline before the turn: got error %v after %v, want one with connect_rate at once", err,
				time.Since(began))
		}
		canceled, cancel := context.WithCancel(t.Context())
		time.AfterFunc(500*time.Millisecond, cancel)
		if err := l.Wait(canceled, a); !errors.Is(err, context.Canceled) || time.Since(began) != 500*time.Millisecond {
			t.Errorf("canceled: got error %v after %v, want %v after 500ms", err, time.Since(began), context.Canceled)
		}
		// A wait that ended early does not count.
		if err := l.Wait(t.Context(), a); err != nil || time.Since(began) != time.Second {
			t.Errorf("next connect: got error %v after %v, want none after 1s", err, time.Since(began))
		}
	})
}

// TestDialWaitsForLimits checks that an attempt to connect waits for the limits, and that the wait
// for them is not a failure of the address.
func TestDialWaitsForLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := &stepDevice{maxMR: 100, granted: make(chan struct{}, 20), mrs: make(map[uint32]*stepMR)}
		cfg := Config{Provider: dev, Slots: MinSlots, KeepAlive: -1, IdleTimeout: -1,
			Servers: NewAddresses(netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")),
			// The second transport prefers the same address as the first one.
			ConnectLimits: NewConnectLimits(10)}
		began := time.Now()
		for i := range connectBurst + 1 {
			cfg.Index = uint32(2 * i)
			tr, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			dev.granted <- struct{}{}
			if i == connectBurst {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				if err := tr.Connect(ctx); err == nil || !strings.Contains(err.Error(), "connect_rate") {
					t.Errorf("connect with a short timeout: got %v, want an error that names connect_rate", err)
				}
				cancel()
				if !cfg.Servers.usable(0) {
					t.Error("the address counts as failed after a wait for the limits")
				}
			}
			if err := tr.Connect(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := tr.Address().Addr().String(); got != "192.0.2.1" {
				t.Errorf("connection %d: got address %s", i, got)
			}
			t.Cleanup(func() { tr.Close() })
		}
		if d := time.Since(began); d != 100*time.Millisecond {
			t.Errorf("%d connects took %v, want 100ms", connectBurst+1, d)
		}
	})
}

// TestRefusedConnectsDoNotCount requests more connects at once than the limits permit before the
// deadline. Those that are refused must not delay the next ones.
func TestRefusedConnectsDoNotCount(t *testing.T) {
	const perSecond, deadline = 50, 30 * time.Second
	const permitted = connectBurst + perSecond*int(deadline/time.Second)
	synctest.Test(t, func(t *testing.T) {
		l, a, began := NewConnectLimits(perSecond), netip.MustParseAddr("192.0.2.1"), time.Now()
		var work sync.WaitGroup
		var admitted atomic.Int32
		for range 5 * permitted {
			work.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				if l.Wait(ctx, a) == nil {
					admitted.Add(1)
				}
			})
		}
		synctest.Wait()
		work.Go(func() {
			err := l.Wait(t.Context(), a)
			waited := time.Since(began)
			if err != nil || waited.Round(time.Millisecond) > deadline+time.Second/perSecond {
				t.Errorf("next connect without a deadline: got error %v after %v, want none after %v", err, waited,
					deadline)
			}
		})
		work.Wait()
		if n := int(admitted.Load()); n != permitted && n != permitted-1 { // the last turn comes at the deadline
			t.Errorf("connects within %v: got %d, want %d or one less", deadline, n, permitted)
		}
	})
}
