package xprt

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// drop is a server that answers only NULL.
func drop(c *stepCall) outcome {
	if c.CallHeader.Proc == 0 && c.Prog != 0 {
		return answered
	}
	return dropped
}

// TestKeepAliveDropsSilentServer checks that the client drops the connection to a silent server
// before the timeout of the calls, with and without a pending call. The keepalive call of the next
// connection comes before other calls.
func TestKeepAliveDropsSilentServer(t *testing.T) {
	for _, idle := range []bool{true, false} {
		inBubble(t, func(c *Config, _ *stepServer) {
			c.KeepAlive, c.Timeout, c.TraceEvents = 10*time.Second, time.Hour, 256
		}, func(t *testing.T, b *bubble) {
			sleep(15 * time.Second) // a keepalive call after 10 s
			if s := b.tr.Stats(); s.Connects != 1 || s.KeepAlives != 2 {
				t.Fatalf("got %d connects, %d keepalive calls; want 1, 2", s.Connects, s.KeepAlives)
			}
			silent := b.qp()
			var mu sync.Mutex
			var next []uint32 // procedures of the calls on the next connection
			b.handleWith(func(c *stepCall) outcome {
				if c.qp == silent {
					return dropped
				}
				mu.Lock()
				defer mu.Unlock()
				next = append(next, c.CallHeader.Proc)
				return answered
			})
			began := time.Now()
			var p *pending
			if !idle {
				p = b.start(echo(1, nil, 0))
			}
			sleep(20 * time.Second)
			if s := b.tr.Stats(); !strings.Contains(s.LastError, "did not answer") || s.Timeouts != 0 ||
				s.Connects != 2 {
				t.Fatalf("idle %v: got last error %q, %d timeouts, %d connects; want a missing answer, 0, 2", idle,
					s.LastError, s.Timeouts, s.Connects)
			}
			near(t, "time to the next connection", b.dials[1].at.Sub(began), 15*time.Second)
			// The keepalive call of the lost connection may also be repeated.
			if !idle && (!p.done || p.err != nil || next[0] != 0 || !slices.Contains(next, 1)) {
				t.Errorf("pending call: got done %v, %v, procedures %v on the next connection; want success after NULL",
					p.done, p.err, next)
			}
			found := map[trace.Kind]bool{}
			for _, e := range b.tr.Trace().Last(256) {
				found[e.Kind] = true
			}
			for _, k := range []trace.Kind{trace.Ping, trace.Connect, trace.Disconnect, trace.PostSend, trace.Reply} {
				if !found[k] {
					t.Errorf("idle %v: trace has no event %v", idle, k)
				}
			}
		})
	}
}

// TestKeepAliveKeepsBusyServer has long calls on a server that answers keepalive calls, also if
// other calls use all credits but the one in reserve. A server that grants one credit cannot get a
// keepalive call, and then only the timeout of the call counts.
func TestKeepAliveKeepsBusyServer(t *testing.T) {
	for _, c := range []struct {
		credits uint32
		calls   int // at the server
		pings   bool
	}{{128, 19, true}, {16, 15, true}, {1, 1, false}} {
		inBubble(t, func(cfg *Config, s *stepServer) {
			cfg.KeepAlive, cfg.Timeout, cfg.Slots, s.credits = 10*time.Second, time.Hour, 20, c.credits
		}, func(t *testing.T, b *bubble) {
			hold := make(chan struct{})
			b.handleWith(func(c *stepCall) outcome {
				if c.CallHeader.Proc == 1 {
					<-hold
				}
				return answered
			})
			var all []*pending
			for range 20 {
				all = append(all, b.start(echo(1, nil, 0)))
			}
			sleep(5 * time.Minute)
			if n := len(b.calls); n != c.calls {
				t.Errorf("%d credits: got %d calls at the server, want %d", c.credits, n, c.calls)
			}
			if s := b.tr.Stats(); s.Connects != 1 || s.KeepAlives < 25 == c.pings {
				t.Errorf("%d credits: got %d connects, %d keepalive calls; want 1, and many %v", c.credits, s.Connects,
					s.KeepAlives, c.pings)
			}
			close(hold)
			settle()
			for _, p := range all {
				if !p.done || p.err != nil {
					t.Errorf("%d credits: call: got done %v, %v", c.credits, p.done, p.err)
				}
			}
		})
	}
}

// TestIdleConnectionIsClosed checks that a connection is closed after 5 minutes without a call, and
// that the next call makes a new one without a pause. A pending call keeps the connection, and
// keepalive calls do not.
func TestIdleConnectionIsClosed(t *testing.T) {
	const idle = 5 * time.Minute
	inBubble(t, func(c *Config, _ *stepServer) {
		c.IdleTimeout, c.KeepAlive, c.Timeout = idle, 10*time.Second, time.Hour
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour
	}, func(t *testing.T, b *bubble) {
		closes := func(round int) {
			t.Helper()
			sleep(idle - time.Second)
			if s := b.tr.Stats(); s.State != StateConnected {
				t.Errorf("round %d: got state %s before the idle timeout", round, s.State)
			}
			sleep(3 * time.Second)
			if s := b.tr.Stats(); s.State != StateIdle || s.LastError != "" || !b.tr.Ready() || len(b.dials) != round {
				t.Errorf("round %d: got state %s, last error %q, ready %v, %d connects; want idle, none, true", round,
					s.State, s.LastError, b.tr.Ready(), len(b.dials))
			}
		}
		b.handleWith(func(c *stepCall) outcome {
			if c.CallHeader.Proc == 1 {
				time.Sleep(2*idle + 500*time.Millisecond) // not at the time of a check
			}
			return answered
		})
		b.mustSucceed(echo(1, nil, 0))
		closes(1)
		began := time.Now()
		b.mustSucceed(echo(2, nil, 0))
		if took := time.Since(began); took != 0 {
			t.Errorf("call on an idle transport: got a pause of %v, want none", took)
		}
		closes(2)
		b.set(func(s *stepServer) {
			s.connect = func(context.Context, netip.AddrPort) error {
				time.Sleep(time.Second)
				return nil
			}
		})
		b.start(echo(2, nil, 0)).interrupt() // requested a connection
		sleep(time.Second)
		closes(3)
	})
}

// TestReplyTimeouts has a server that never answers a call. The call is sent again on another
// connection with the same XID, so that the server recognizes it. The timeout of the first replay
// is short and doubles: a server that executes the first copy of a call discards a replay, as knfsd
// does.
func TestReplyTimeouts(t *testing.T) {
	for timeout, want := range map[time.Duration][]float64{
		60 * time.Second: {60, 4.8, 9.6, 19.2, 38.4, 60, 60},
		10 * time.Second: {10, 2, 4, 8, 10, 10},
		time.Second:      {1, 1, 1, 1},
	} {
		inBubble(t, func(c *Config, _ *stepServer) { c.Timeout = timeout }, func(t *testing.T, b *bubble) {
			b.handleWith(drop)
			began := time.Now()
			p := b.start(echo(1, nil, 0))
			sleep(7 * timeout)
			b.handleWith(nil)
			sleep(2 * timeout)
			if !p.done || p.err != nil {
				t.Errorf("call: got done %v, %v; want success", p.done, p.err)
			}
			for i, sent := range b.calls {
				if sent.Header.XID != p.XID || sent.CallHeader.XID != p.XID {
					t.Errorf("replay %d: got XIDs %#x, %#x; want %#x", i, sent.Header.XID, sent.CallHeader.XID, p.XID)
				}
				if i > 0 && i <= len(want) {
					limit := time.Duration(want[i-1] * float64(time.Second))
					near(t, "reply timeout", sent.at.Sub(began), limit)
				}
				began = sent.at
			}
			if s := b.tr.Stats(); int(s.Resends) != len(b.calls)-1 || s.Timeouts != s.Resends ||
				len(b.calls) < len(want)-1 {
				t.Errorf("got %d resends, %d timeouts, %d calls at the server", s.Resends, s.Timeouts, len(b.calls))
			}
		})
	}
}

// TestSoftMountTimesOut checks calls of soft mounts that wait for different things. Each ends with
// the error of its mode after all its attempts.
func TestSoftMountTimesOut(t *testing.T) {
	for _, c := range []struct {
		waits string
		setup func(b *bubble)
		m     int    // bytes to read
		text  string // in the error
	}{
		{WaitReply, func(*bubble) {}, 0, "did not answer for 2m"},
		{WaitSlot, func(b *bubble) {
			for range MinSlots {
				b.start(echo(1, nil, 0))
			}
		}, 0, "did not answer for 2m"},
		{WaitCredit, func(b *bubble) {
			b.set(func(s *stepServer) { s.credits = 1 })
			b.mustSucceed(echo(0, nil, 0))
			b.start(echo(1, nil, 0))
		}, 0, "did not answer for 2m"},
		{WaitReconnect, func(b *bubble) {
			b.set(func(s *stepServer) { s.connect = refuse })
			b.qp().lose(io.EOF)
		}, 0, "last connection error: connection refused"},
		{WaitSend, func(b *bubble) { b.dev.maxMR = 0 }, 8192, "did not answer for 2m"},
	} {
		for mode, want := range map[Recovery]syscall.Errno{Soft: syscall.EIO, SoftErr: syscall.ETIMEDOUT} {
			inBubble(t, func(cfg *Config, _ *stepServer) {
				cfg.Recovery, cfg.Timeout = mode, 2*time.Minute
				cfg.ReconnectMin, cfg.ReconnectMax = 10*time.Second, 10*time.Second
			}, func(t *testing.T, b *bubble) {
				b.handleWith(drop)
				c.setup(b)
				p := b.start(readOf(c.m))
				calls := b.tr.Calls()
				if i := slices.IndexFunc(calls, func(c Call) bool { return c.Prog == nfsProg }); i < 0 ||
					calls[i].Waits != c.waits {
					t.Fatalf("calls: got %+v, want one that waits for %s", calls, c.waits)
				}
				sleep(2*time.Minute + 2*time.Second)
				if isTimeout := isTimeout(p.err); !p.done || !isTimeout || !errors.Is(p.err, want) ||
					!strings.Contains(p.err.Error(), c.text) {
					t.Fatalf("wait for %s: got done %v, %v; want %v with %q", c.waits, p.done, p.err, want, c.text)
				}
				near(t, "timeout of a wait for "+c.waits, p.took, 2*time.Minute)
				sent := slices.ContainsFunc(b.calls, func(c *stepCall) bool { return c.Prog == nfsProg })
				if sent != (c.waits == WaitReply) {
					t.Errorf("wait for %s: got sent %v", c.waits, sent)
				}
			})
		}
	}
}

func refuse(context.Context, netip.AddrPort) error { return errRefused }

// TestReconnectPauses checks the pauses before attempts to connect. The first one after a
// connection that worked, or after a local fault, is at most 250 ms. The others are 1 s to 5 s at
// first, and grow up to 60 s, unless the connections make progress: 16 answered calls, or any
// answer and 5 s.
func TestReconnectPauses(t *testing.T) {
	const grows = 10 // pauses after the first
	afterCalls := func(n int, life time.Duration) func(*bubble) {
		return func(b *bubble) {
			var mu sync.Mutex
			count := map[*stepQP]int{b.qp(): 1}
			b.handleWith(func(c *stepCall) outcome {
				mu.Lock()
				count[c.qp]++
				answers := count[c.qp] <= n
				mu.Unlock()
				if answers {
					return answered
				}
				time.Sleep(life)
				return disconnected
			})
		}
	}
	for _, c := range []struct {
		name      string
		setup     func(*bubble)
		keepAlive bool
		progress  bool
	}{
		{"connects are refused", func(b *bubble) {
			b.set(func(s *stepServer) { s.connect = refuse })
			b.lost()
			b.qp().lose(io.EOF)
		}, false, false},
		{"connections answer nothing", afterCalls(0, 0), false, false},
		{"connections answer nothing for an hour", afterCalls(0, time.Hour), false, false},
		{"connections answer one call", afterCalls(1, 0), false, false},
		{"connections answer keepalive calls", afterCalls(1, 0), true, false},
		{"connections answer 15 calls", afterCalls(15, 0), false, false},
		{"connections answer 16 calls", afterCalls(16, 0), false, true},
		{"connections last 5 s", afterCalls(1, 5*time.Second), false, true},
		{"posts fail", func(b *bubble) {
			var posts atomic.Int64
			b.dev.refuse = func(*verbs.WorkRequest, int) (int, error) {
				if posts.Add(1) > 1 { // after the first one, which is answered
					b.lost()
					return 0, verbs.ErrQueueFull
				}
				return 0, nil
			}
		}, false, false},
	} {
		inBubble(t, func(cfg *Config, _ *stepServer) {
			cfg.ReconnectMin, cfg.ReconnectMax, cfg.Timeout = 5*time.Second, time.Minute, 24*time.Hour
			if c.keepAlive {
				cfg.KeepAlive = time.Hour
			}
		}, func(t *testing.T, b *bubble) {
			c.setup(b)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				for ctx.Err() == nil {
					_ = b.tr.Call(ctx, echo(1, nil, 0))
				}
			}()
			for len(b.dials) < grows+2 {
				sleep(time.Minute)
			}
			cancel()
			sleep(2 * time.Hour)
			b.mu.Lock()
			defer b.mu.Unlock()
			limit := 5 * time.Second
			for i, dial := range b.dials[1 : grows+2] {
				least, most := time.Duration(0), firstPause
				if i > 0 && !c.progress {
					least, limit = limit/5, min(limit*3/2, time.Minute)
					most = limit
				}
				if got := dial.at.Sub(b.losses[i]); got < least || got > most {
					t.Errorf("%s: pause %d: got %v, want %v to %v", c.name, i, got, least, most)
				}
			}
		})
	}
}

// TestFailedPostIsNoReplay has a post that fails before anything was sent. The call is not a
// replay: the counters ignore the failed post.
func TestFailedPostIsNoReplay(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		var posts atomic.Int64
		b.dev.refuse = func(*verbs.WorkRequest, int) (int, error) {
			if posts.Add(1) == 1 {
				return 0, verbs.ErrQueueFull
			}
			return 0, nil
		}
		b.mustSucceed(echo(1, nil, 0))
		if s := b.tr.Stats(); s.Sends != 2 || s.Resends != 0 || s.Connects != 2 {
			t.Errorf("got %d sends, %d resends, %d connects; want 2, 0, 2", s.Sends, s.Resends, s.Connects)
		}
	})
}

// TestReadyFollowsConnection checks Ready and the history before and after the cause of a loss is
// known. The provider may report the cause after the flushes, and the transport waits 2 s for it.
func TestReadyFollowsConnection(t *testing.T) {
	if unconnected(t, nil).Ready() {
		t.Error("before the first connection: got ready")
	}
	for _, reported := range []bool{true, false} {
		inBubble(t, func(c *Config, s *stepServer) { c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour },
			func(t *testing.T, b *bubble) {
				b.mustSucceed(echo(1, nil, 0))
				b.set(func(s *stepServer) { s.connect = refuse })
				lost := b.qp()
				lost.lose(nil)
				lost.flushReceives()
				sleep(time.Second)
				if s := b.tr.Stats(); b.tr.Ready() || s.State != StateConnected {
					t.Errorf("before the cause of the loss is known: got ready %v, state %s", b.tr.Ready(), s.State)
				}
				want := "receive: " + verbs.StatusWRFlushErr.String()
				if reported {
					want = io.EOF.Error()
					lost.attr.OnDisconnect(io.EOF)
				}
				sleep(causeWait - time.Second)
				h := b.tr.History()
				if len(h) < 2 || h[1].Event != "disconnected" || h[1].Cause != want || b.tr.Ready() {
					t.Errorf("history: got %+v, ready %v; want the loss with the cause %q", h, b.tr.Ready(), want)
				}
			})
	}
}

// TestHistoryJoinsEqualEvents checks that consecutive equal events take one place in the history,
// and that the oldest events leave a full history.
func TestHistoryJoinsEqualEvents(t *testing.T) {
	inBubble(t, func(c *Config, _ *stepServer) { c.ReconnectMin, c.ReconnectMax = 10*time.Second, 10*time.Second },
		func(t *testing.T, b *bubble) {
			var fail atomic.Pointer[error]
			fail.Store(&errRefused)
			b.set(func(s *stepServer) {
				s.connect = func(context.Context, netip.AddrPort) error { return *fail.Load() }
			})
			b.qp().lose(io.EOF)
			sleep(time.Minute)
			h := b.tr.History()
			if len(h) != 3 || h[0].Event != "connected" || h[2].Event != "connect failed" || h[2].Times < 5 ||
				h[2].Cause != errRefused.Error() || time.Since(h[2].Time) > 10*time.Second {
				t.Fatalf("got %+v, want a connection, its end, and many failed connects", h)
			}
			for range maxConnEvents {
				for _, err := range []error{errPost, errRefused} {
					fail.Store(&err)
					sleep(10 * time.Second)
				}
			}
			if h := b.tr.History(); len(h) != maxConnEvents || h[0].Event != "connect failed" {
				t.Errorf("full history: got %d events, the first %+v; want %d", len(h), h[0], maxConnEvents)
			}
		})
}
