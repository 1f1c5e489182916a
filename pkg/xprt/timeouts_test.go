package xprt

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// unconnected returns a transport without a connection, which is closed at the end of the test.
func unconnected(t *testing.T, change func(*Config)) *Transport {
	t.Helper()
	cfg := Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: 4}
	if change != nil {
		change(&cfg)
	}
	tr, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestCheckIntervalFollowsTimeouts checks how often timeouts are checked: at least twice in the
// shortest reply timeout and four times in the other timeouts, each 1 ms to 1 s.
func TestCheckIntervalFollowsTimeouts(t *testing.T) {
	const off, long = -1, time.Hour
	for _, c := range []struct{ timeout, keepAlive, idle, want time.Duration }{
		{long, off, off, time.Second},
		{long, long, long, time.Second},
		{time.Second, off, off, 500 * time.Millisecond},
		{long, 2 * time.Second, off, 500 * time.Millisecond},
		{long, off, 2 * time.Second, 500 * time.Millisecond},
		{long, 2 * time.Second, time.Second, 250 * time.Millisecond},
		{long, time.Second, 2 * time.Second, 250 * time.Millisecond},
		{100 * time.Millisecond, time.Second, time.Second, 50 * time.Millisecond},
		{time.Microsecond, off, off, time.Millisecond},
	} {
		tr := &Transport{cfg: Config{Timeout: c.timeout, KeepAlive: c.keepAlive, IdleTimeout: c.idle}}
		if got := tr.checkInterval(); got != c.want {
			t.Errorf("timeouts %v, %v, %v: got %v, want %v", c.timeout, c.keepAlive, c.idle, got, c.want)
		}
	}
}

// TestStopOfProcessIsLeftOut checks the timeouts after a stop of the process. The time of the stop
// must not count, the calls must get stopGrace, and the log must name the stop once.
func TestStopOfProcessIsLeftOut(t *testing.T) {
	const every, stop = time.Second, time.Hour
	var log bytes.Buffer
	tr := unconnected(t, func(c *Config) {
		c.Recovery, c.Timeout = Soft, time.Second
		c.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	})
	s := <-tr.free
	defer func() { s.end() }()
	s.begin(context.Background(), &sunrpc.Message{}, callStart{at: time.Now(), running: -2 * int64(stop)}) // expired
	now := time.Now()
	stops := running.NewDetector(every, stopGrace, now)
	for _, c := range []struct {
		name    string
		after   time.Duration
		stopped time.Duration
		expired bool
	}{
		{"stop", every + stop, stop, false},
		{"tick during the grace", stopGrace - 1, stop, false},
		{"tick after the grace", every, stop, true},
		{"next tick", every, stop, true},
	} {
		now = now.Add(c.after)
		tr.check(stops, now)
		if got := time.Duration(tr.stopped.Load()); got != c.stopped || s.expired.Load() != c.expired {
			t.Errorf("%s: got %v without the process, call expired %v; want %v, %v", c.name, got, s.expired.Load(),
				c.stopped, c.expired)
		}
	}
	if now := time.Duration(tr.now()); now > 0 || now < -stop {
		t.Errorf("running time after the stop: got %v, want that before, less %v", now, stop)
	}
	if n := strings.Count(log.String(), "process was stopped"); n != 1 {
		t.Errorf("log lines about the stop: got %d, want 1:\n%s", n, log.String())
	}
}

// TestTimesAfterNowMoveToNow changes the times that were taken during a stop of the process.
func TestTimesAfterNowMoveToNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{epoch: time.Now()}
		time.Sleep(time.Hour)
		now := tr.now()
		for _, c := range []struct{ at, want int64 }{{now - 1, now - 1}, {now, now}, {now + 1, now}, {2 * now, now}} {
			s := &slot{sentRunning: c.at, startedAt: callStart{running: c.at}}
			cn := &conn{}
			cn.lastReceived.Store(c.at)
			tr.slots = []*slot{s}
			tr.conn.Store(cn)
			tr.lastCall.Store(c.at)
			w := tr.waiters.add(t.Context(), &sunrpc.Message{}, callStart{running: c.at})
			tr.noFuture()
			for _, got := range []int64{s.sentRunning, s.startedAt.running, cn.lastReceived.Load(),
				tr.lastCall.Load(), w.startedAt.running} {
				if got != c.want {
					t.Errorf("time %v from now: got %v, want %v", time.Duration(c.at-now), time.Duration(got-now),
						time.Duration(c.want-now))
				}
			}
			tr.waiters.remove(w)
		}
		tr.conn.Store(nil)
		tr.noFuture() // without a connection
	})
}

// TestReplyTimeoutEndsConnection checks when the wait of a call ends its connection: after the
// timeout, if the server may still answer.
func TestReplyTimeoutEndsConnection(t *testing.T) {
	const timeout, sent = int64(time.Minute), int64(time.Hour)
	for _, c := range []struct {
		name   string
		state  slotState
		sends  int
		waited int64
		late   bool // the late reply arrived
		ends   bool
	}{
		{"sent, at the timeout", slotSent, 1, timeout, false, false},
		{"sent, after the timeout", slotSent, 1, timeout + 1, false, true},
		{"sent again, at the short timeout", slotSent, 2, timeout * 8 / 100, false, false},
		{"sent again, after the short timeout", slotSent, 2, timeout*8/100 + 1, false, true},
		{"fencing", slotFencing, 1, timeout + 1, false, true},
		{"abandoned", slotAbandoned, 1, timeout + 1, false, true},
		{"abandoned, after the late reply", slotAbandoned, 1, timeout + 1, true, false},
		{"waiting", slotWaiting, 1, timeout + 1, false, false},
		{"done", slotDone, 1, timeout + 1, false, false},
		{"lost", slotLost, 1, timeout + 1, false, false},
	} {
		tr := &Transport{cfg: Config{Timeout: time.Duration(timeout), Servers: NewAddresses(netip.AddrPort{})}}
		cn := &conn{ended: make(chan struct{})}
		s := &slot{t: tr, state: c.state, sends: c.sends, sentRunning: sent, conn: cn, lateDone: c.late}
		tr.checkSlot(s, sent+c.waited)
		if ended := isClosed(cn.ended); ended != c.ends || tr.stats.timeouts.Load() != 0 != c.ends {
			t.Errorf("%s: got ended %v, %d timeouts; want %v", c.name, ended, tr.stats.timeouts.Load(), c.ends)
		}
		if e, ok := cn.err.(*TimeoutError); c.ends && (!ok || e.After != time.Duration(c.waited)) {
			t.Errorf("%s: got error %v, want a TimeoutError after %v", c.name, cn.err, time.Duration(c.waited))
		}
		s.conn = nil
		tr.checkSlot(s, sent+c.waited) // not posted yet
	}
}

// TestSoftTimeoutEndsCalls checks when the calls of a soft mount expire: after all their attempts.
func TestSoftTimeoutEndsCalls(t *testing.T) {
	const attempt, retrans, start = time.Minute, 2, int64(time.Hour)
	const limit = int64(3 * attempt)
	for _, c := range []struct {
		recovery Recovery
		state    slotState
		passed   int64
		expires  bool
	}{
		{Soft, slotWaiting, limit, false},
		{Soft, slotWaiting, limit + 1, true},
		{SoftErr, slotWaiting, limit + 1, true},
		{SoftErr, slotSent, limit + 1, true},
		{Soft, slotIdle, limit + 1, false},
		{Hard, slotWaiting, limit + 1, false},
	} {
		tr := &Transport{cfg: Config{Timeout: attempt, Retrans: retrans, Recovery: c.recovery,
			Servers: NewAddresses(netip.AddrPort{})}}
		s := &slot{t: tr, state: c.state, startedAt: callStart{running: start}, wake: make(chan struct{}, 1)}
		tr.checkSlot(s, start+c.passed)
		if s.expired.Load() != c.expires || len(s.wake) == 1 != c.expires {
			t.Errorf("recovery mode %d, state %d, after %v: got expired %v, woken %v; want %v", c.recovery, c.state,
				time.Duration(c.passed), s.expired.Load(), len(s.wake) == 1, c.expires)
		}
	}
}

// TestQuietConnectionIsCheckedOrClosed checks what happens to a connection without messages or
// calls: nothing, a keepalive call, or its end.
func TestQuietConnectionIsCheckedOrClosed(t *testing.T) {
	const keepAlive, idle, start = 10 * time.Second, time.Minute, time.Hour
	type outcome int
	const (
		nothing outcome = iota
		ping
		silentEnd
		idleEnd
	)
	for _, c := range []struct {
		name            string
		silent, quiet   time.Duration // since the last message and the last call
		pinged          time.Duration // since the pending keepalive call was sent; 0 if there is none
		unsent          bool          // the keepalive call waits for a credit
		disabled        bool          // no keepalive calls
		noIdle, pending bool          // no idle timeout; a call is pending
		want            outcome
	}{
		{name: "before the keepalive call", silent: keepAlive - 1, want: nothing},
		{name: "keepalive call is due", silent: keepAlive, want: ping},
		{name: "keepalive calls are disabled", silent: start, disabled: true, want: nothing},
		{name: "no reply yet", silent: 2 * keepAlive, pinged: keepAlive, want: nothing},
		{name: "no reply", silent: 2*keepAlive + 1, pinged: keepAlive + 1, want: silentEnd},
		{name: "no reply, nor anything since the call", silent: keepAlive + 1, pinged: keepAlive + 1, want: silentEnd},
		{name: "another message since the call", silent: keepAlive + 1, pinged: keepAlive + 2, want: nothing},
		{name: "keepalive call was not sent", silent: start, pinged: start, unsent: true, want: nothing},
		{name: "at the idle timeout", quiet: idle, want: nothing},
		{name: "after the idle timeout", quiet: idle + 1, want: idleEnd},
		{name: "after the idle timeout, silent", quiet: idle + 1, silent: keepAlive, want: idleEnd},
		{name: "after the idle timeout, a call is pending", quiet: idle + 1, pending: true, want: nothing},
		{name: "no idle timeout", quiet: start, noIdle: true, want: nothing},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := unconnected(t, func(cfg *Config) {
					cfg.KeepAlive, cfg.IdleTimeout = keepAlive, idle
					if c.disabled {
						cfg.KeepAlive = -1
					}
					if c.noIdle {
						cfg.IdleTimeout = -1
					}
				})
				tr.checkConnection() // without a connection
				cn := &conn{adapter: &adapter{t: tr}, ended: make(chan struct{})}
				tr.conn.Store(cn)
				defer tr.conn.Store(nil)
				tr.window.reset(1, false)
				caller := &slot{}
				if c.pending {
					tr.window.enter(caller)
					defer tr.window.leave(caller)
				}
				time.Sleep(start)
				now := tr.now()
				cn.lastReceived.Store(now - int64(c.silent))
				tr.lastCall.Store(now - int64(c.quiet))
				s := tr.slots[tr.cfg.Slots]
				if c.pinged > 0 {
					cn.pingsInFlight.Store(1)
					s.state, s.conn, s.sentRunning = slotSent, cn, now-int64(c.pinged)
					if c.unsent {
						s.state = slotWaiting
					}
				}
				if c.want == ping { // without a credit, the keepalive call is not sent
					tr.window.inFlight = tr.window.limit
				}
				tr.checkConnection()
				got := nothing
				switch {
				case cn.err == errIdle:
					got = idleEnd
				case isTimeout(cn.err):
					got = silentEnd
					if e := cn.err.(*TimeoutError); e.After != c.silent {
						t.Errorf("error: got %v, want a silence of %v", e, c.silent)
					}
				case cn.pingsInFlight.Load() > 0 && c.pinged == 0:
					got = ping
				}
				if got != c.want {
					t.Errorf("got %d, want %d", got, c.want)
				}
				if c.pinged > 0 {
					s.state = slotIdle
				}
				cn.fail(io.EOF) // ends the keepalive call
				synctest.Wait()
			})
		})
	}
}
