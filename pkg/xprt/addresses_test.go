package xprt

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestConnectTimeoutOfAddresses connects to three addresses that do not answer. The attempt to each
// is short, and the transport tries each once before it tries one again.
func TestConnectTimeoutOfAddresses(t *testing.T) {
	all := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1"),
		netip.MustParseAddrPort("192.0.2.3:1")}
	inBubble(t, func(c *Config, _ *stepServer) { c.Servers, c.Index = NewAddresses(all...), 1 },
		func(t *testing.T, b *bubble) {
			b.progress()
			b.set(func(s *stepServer) {
				s.connect = func(ctx context.Context, _ netip.AddrPort) error {
					<-ctx.Done()
					return ctx.Err()
				}
			})
			b.qp().lose(io.EOF)
			sleep(time.Minute)
			for i, d := range b.dials[1:5] {
				pause := d.at.Sub(b.dials[i].at)
				if d.to != all[(i+1)%3] || i > 0 && (pause < addressTimeout ||
					pause > addressTimeout+time.Millisecond) {
					t.Errorf("attempt %d: got address %v after %v, want %v after %v", i, d.to, pause, all[(i+1)%3],
						addressTimeout)
				}
			}
		})
}

// TestFailOver loses the connection to one of two addresses. The calls continue at the other
// address at once, also if the first one is silent. If both addresses refuse connections, the
// transport pauses after it has tried each.
func TestFailOver(t *testing.T) {
	one, other := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")
	inBubble(t, func(c *Config, _ *stepServer) {
		c.Servers, c.KeepAlive = NewAddresses(one, other), 10*time.Second
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour
	}, func(t *testing.T, b *bubble) {
		refused := map[netip.AddrPort]bool{one: true}
		first := b.qp()
		b.progress()
		b.set(func(s *stepServer) {
			s.connect = func(_ context.Context, to netip.AddrPort) error {
				if refused[to] {
					return errRefused
				}
				return nil
			}
			s.handle = func(c *stepCall) outcome {
				if c.qp == first {
					return disconnected
				}
				return answered
			}
		})
		p := b.start(echo(1, nil, 0))
		sleep(firstPause)
		if !p.done || p.err != nil || b.tr.Address() != other || b.calls[progressCalls+1].CallHeader.XID != p.XID {
			t.Fatalf("lost connection: got returned %v, %v, address %v; want the reply of %v", p.done, p.err,
				b.tr.Address(), other)
		}
		refused[one] = false
		silent := b.qp()
		b.handleWith(func(c *stepCall) outcome {
			if c.qp == silent {
				return dropped
			}
			return answered
		})
		p = b.start(echo(1, nil, 0))
		sleep(25 * time.Second)
		if !p.done || p.err != nil || b.tr.Address() != one {
			t.Errorf("silent address: got returned %v, %v, address %v; want the reply of %v", p.done, p.err,
				b.tr.Address(), one)
		}
		refused[one], refused[other] = true, true
		b.progress()
		dials := len(b.dials)
		b.qp().lose(io.EOF)
		sleep(10 * time.Minute)
		if s := b.tr.Stats(); len(b.dials) != dials+2 || s.Preferred != one || s.LastError != errRefused.Error() {
			t.Errorf("both refuse: got %d attempts, preferred address %v, last error %q; want 2, %v, %v",
				len(b.dials)-dials, s.Preferred, s.LastError, one, errRefused)
		}
	})
}

// TestConnectUsesOtherAddress makes the first connection while the preferred address refuses
// connections, and then while all addresses do.
func TestConnectUsesOtherAddress(t *testing.T) {
	one, other := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")
	for _, all := range []bool{false, true} {
		s := &stepServer{connect: func(_ context.Context, to netip.AddrPort) error {
			if all || to == one {
				return fmt.Errorf("%v: %w", to, errRefused)
			}
			return nil
		}}
		tr := unconnected(t, func(c *Config) {
			c.Provider, c.KeepAlive = &stepDevice{server: s, maxMR: 100, mrs: make(map[uint32]*stepMR)}, -1
			c.Servers = NewAddresses(one, other)
		})
		err := tr.Connect(testContext(t))
		if !all && (err != nil || tr.Address() != other) {
			t.Errorf("one address refuses: got %v, address %v; want %v", err, tr.Address(), other)
		}
		if s := tr.Stats(); all && (err == nil || !strings.Contains(err.Error(), one.String()) ||
			s.ConnectFailures != 2 || s.State != StateDisconnected) {
			t.Errorf("both addresses refuse: got %v, %+v; want the error of %v and 2 failures", err, s, one)
		}
	}
}

// TestReturnToPreferredAddress lets the preferred address work again after a failure. The transport
// stays at the other address while it has calls, and returns when it is idle.
func TestReturnToPreferredAddress(t *testing.T) {
	one, other := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")
	inBubble(t, func(c *Config, _ *stepServer) {
		c.Servers, c.Timeout = NewAddresses(one, other), 24*time.Hour
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour
	}, func(t *testing.T, b *bubble) {
		b.progress()
		b.set(func(s *stepServer) {
			s.connect = func(_ context.Context, to netip.AddrPort) error {
				if to == one && len(b.dials) == 2 {
					return errRefused
				}
				return nil
			}
			s.handle = func(*stepCall) outcome {
				time.Sleep(2 * avoidMax)
				return answered
			}
		})
		b.qp().lose(io.EOF)
		sleep(firstPause)
		p := b.start(echo(1, nil, 0))
		sleep(2*avoidMax - time.Second)
		if b.tr.Address() != other || len(b.dials) != 3 {
			t.Errorf("with a pending call: got address %v, %d attempts; want %v, 3", b.tr.Address(), len(b.dials),
				other)
		}
		sleep(time.Second)
		if !p.done || p.err != nil {
			t.Errorf("call: got returned %v, %v", p.done, p.err)
		}
		sleep(returnIdle + 2*time.Second)
		if s := b.tr.Stats(); b.tr.Address() != one || s.State != StateConnected || len(b.dials) != 4 {
			t.Errorf("idle: got address %v, state %s, %d attempts; want %v, connected, 4", b.tr.Address(), s.State,
				len(b.dials), one)
		}
		sleep(time.Hour)
		if len(b.dials) != 4 {
			t.Errorf("at the preferred address: got %d attempts, want no more than 4", len(b.dials))
		}
	})
}
