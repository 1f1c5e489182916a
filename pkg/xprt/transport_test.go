package xprt

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestConfigDefaults checks the value of each field that is zero.
func TestConfigDefaults(t *testing.T) {
	var c Config
	if err := c.fill(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []struct {
		name      string
		got, want time.Duration
	}{
		{"Timeout", c.Timeout, time.Minute},
		{"ConnectTimeout", c.ConnectTimeout, time.Minute},
		{"ReconnectMin", c.ReconnectMin, 5 * time.Second},
		{"ReconnectMax", c.ReconnectMax, time.Minute},
		{"NudgeAfter", c.NudgeAfter, 100 * time.Millisecond},
		{"KeepAlive", c.KeepAlive, 10 * time.Second},
		{"IdleTimeout", c.IdleTimeout, 5 * time.Minute},
	} {
		if d.got != d.want {
			t.Errorf("%s: got %v, want %v", d.name, d.got, d.want)
		}
	}
	if got := c.Servers.all; len(got) != 1 || got[0] != c.Addr {
		t.Errorf("Servers: got %v, want Addr", got)
	}
	if c.Slots != 128 || c.InlineBytes != 4096 || c.Logger == nil {
		t.Errorf("got %d slots, %d inline bytes, logger %v; want 128, 4096, one", c.Slots, c.InlineBytes, c.Logger)
	}
	set := Config{Timeout: 1, ConnectTimeout: 2, ReconnectMin: 3, ReconnectMax: 4, NudgeAfter: 5, KeepAlive: -1,
		IdleTimeout: -1, Slots: MinSlots, InlineBytes: MinInlineBytes, Index: 6, Reserved: []uint32{7},
		Servers: NewAddresses(netip.MustParseAddrPort("192.0.2.1:1"))}
	filled := set
	if err := filled.fill(); err != nil {
		t.Fatal(err)
	}
	if filled.Logger = nil; !reflect.DeepEqual(filled, set) {
		t.Errorf("values that are set: got %+v, want %+v", filled, set)
	}
}

// TestNewAcceptsLimits uses the smallest and the largest values.
func TestNewAcceptsLimits(t *testing.T) {
	for _, c := range []Config{{Slots: MinSlots, InlineBytes: MinInlineBytes}, {Slots: MaxSlots},
		{Slots: MinSlots, InlineBytes: MaxInlineBytes}} {
		tr, err := New(c)
		if err != nil {
			t.Errorf("New(%+v): %v", c, err)
			continue
		}
		tr.Close()
	}
}

// TestMalformedMessagesAreRefused checks which messages Call refuses before it sends anything.
func TestMalformedMessagesAreRefused(t *testing.T) {
	tr := &Transport{}
	check := func(name string, m *sunrpc.Message, ok bool) {
		t.Helper()
		if err := tr.checkCall(m); (err == nil) != ok || err != nil && !isProtocol(err) {
			t.Errorf("%s: got %v, want valid %v", name, err, ok)
		}
	}
	args, data := make([]byte, 8), make([]byte, 101)
	check("data before the first connection", &sunrpc.Message{ArgData: data}, true)
	tr.payload.Store(100)
	check("no data", &sunrpc.Message{}, true)
	check("largest argument", &sunrpc.Message{ArgData: data[:100]}, true)
	check("larger argument", &sunrpc.Message{ArgData: data}, false)
	check("largest result", &sunrpc.Message{ResultData: data[:100]}, true)
	check("larger result", &sunrpc.Message{ResultData: data}, false)
	check("data at the end", &sunrpc.Message{Args: args, ArgDataPos: 8}, true)
	check("data after the end", &sunrpc.Message{Args: args, ArgDataPos: 12}, false)
	check("data before the start", &sunrpc.Message{Args: args, ArgDataPos: -4}, false)
	check("data that is not aligned", &sunrpc.Message{Args: args, ArgDataPos: 6}, false)
	check("no results", &sunrpc.Message{MaxResult: 0}, true)
	check("negative results", &sunrpc.Message{MaxResult: -1}, false)
}

// TestStateNamesLastChange checks the state, the time when it began, and the last error.
func TestStateNamesLastChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := unconnected(t, nil)
		began := time.Now()
		first := errors.New("first")
		for _, c := range []struct {
			state string
			err   error
			since time.Duration
			last  string
		}{
			{StateDisconnected, nil, 0, ""},
			{StateConnecting, nil, 2, ""},
			{StateDisconnected, first, 3, "first"},
			{StateDisconnected, nil, 3, "first"},
			{StateConnecting, nil, 5, "first"},
		} {
			time.Sleep(time.Nanosecond)
			tr.setState(c.state, c.err)
			s := tr.Stats()
			if s.State != c.state || s.Since.Sub(began) != c.since || s.LastError != c.last {
				t.Errorf("got %s since %d, last error %q; want %s since %d, %q", s.State, s.Since.Sub(began),
					s.LastError, c.state, c.since, c.last)
			}
			for state, n := range s.Connections {
				if (n == 1) != (state == c.state) || n > 1 {
					t.Errorf("connections in state %s: got %d in state %s", state, n, c.state)
				}
			}
		}
	})
}

// TestConnectAfterCloseFails connects after Close, which must leave nothing behind.
func TestConnectAfterCloseFails(t *testing.T) {
	addr := serve(t, svcrdma.Config{Handler: &service{}})
	tr := dial(t, addr, nil)
	if err := tr.Call(testContext(t), echo(1, nil, 0)); err != nil {
		t.Fatal(err)
	}
	tr.Close()
	if err := tr.Connect(testContext(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Connect after Close: got %v, want %v", err, ErrClosed)
	}
	if tr.conn.Load() != nil || tr.adapter != nil || tr.Stats().State != StateClosed {
		t.Errorf("after Connect and Close: got a connection or a device, state %s", tr.Stats().State)
	}
	if err := tr.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	tr = unconnected(t, func(c *Config) { c.Addr = addr })
	tr.Close()
	if err := tr.Connect(testContext(t)); !errors.Is(err, ErrClosed) || tr.status.running {
		t.Errorf("first Connect after Close: got %v, worker runs %v; want %v, false", err, tr.status.running, ErrClosed)
	}
}

// TestOutcomeOfPostedCall checks what awaitReply returns for each state, and the state after it. A
// lost call waits again.
func TestOutcomeOfPostedCall(t *testing.T) {
	for _, c := range []struct{ before, got, after slotState }{
		{slotDone, slotDone, slotDone},
		{slotLost, slotLost, slotWaiting},
	} {
		s := &slot{state: c.before, wake: make(chan struct{}, 1)}
		s.wakeCaller()
		if got := (&Transport{}).awaitReply(t.Context(), s, new(Ended)); got != c.got || s.state != c.after {
			t.Errorf("state %d: got outcome %d, state %d; want %d, %d", c.before, got, s.state, c.got, c.after)
		}
	}
}

// TestSoftErrorNamesLastError checks the error of a call that exceeded the timeout of a soft mount.
func TestSoftErrorNamesLastError(t *testing.T) {
	tr := unconnected(t, func(c *Config) { c.Recovery = Soft })
	var e *TimeoutError
	if err := tr.softError(time.Now()); !errors.As(err, &e) || e.Last != "" {
		t.Errorf("without a lost connection: got %v", err)
	}
	tr.setState(StateDisconnected, errors.New("refused"))
	if err := tr.softError(time.Now()); !errors.As(err, &e) || e.Last != "refused" {
		t.Errorf("after a failed connection: got %v, want its error", err)
	}
}

// TestCallThatEndsTakesNoCredit checks why a call does not get a credit: it expired, its caller
// gave up, or the transport is closed, also if a credit is free.
func TestCallThatEndsTakesNoCredit(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name            string
		ctx             context.Context
		expired, closed bool
		want            string // in the error
	}{
		{"none", t.Context(), false, false, ""},
		{"expired", t.Context(), true, false, "did not answer"},
		{"canceled", canceled, false, false, "interrupted"},
		{"closed", t.Context(), false, true, "closed"},
	} {
		for _, credits := range []int{0, 1} {
			if c.want == "" && credits == 0 {
				continue // waits
			}
			tr := &Transport{closing: make(chan struct{}), cfg: Config{Servers: NewAddresses(netip.AddrPort{})}}
			tr.window.reset(credits, false)
			if c.closed {
				close(tr.closing)
			}
			s := &slot{wake: make(chan struct{}, 1)}
			s.expired.Store(c.expired)
			err := tr.waitCredit(c.ctx, s)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%s, %d credits: got %v, want %q", c.name, credits, err, c.want)
			}
		}
	}
}

// TestCountersOfQueuePairsAdd checks the sums over several queue pairs.
func TestCountersOfQueuePairsAdd(t *testing.T) {
	var q qpTotals
	for range 3 {
		q.add(verbs.QPStats{RemoteAccessErrors: 1, PostedChains: 10, SendCompletions: 100})
	}
	if want := (qpTotals{accessErrs: 3, posts: 30, completions: 300}); q != want {
		t.Errorf("got %+v, want %+v", q, want)
	}
	if gauge(-1) != 0 || gauge(7) != 7 {
		t.Errorf("gauges of -1 and 7: got %d, %d; want 0, 7", gauge(-1), gauge(7))
	}
}

// TestStatsOfConnection checks the fields that follow the connection and its calls.
func TestStatsOfConnection(t *testing.T) {
	svc := &service{}
	tr := dial(t, serve(t, svcrdma.Config{Handler: svc, InlineBytes: 8192}), func(c *Config) {
		c.Slots, c.InlineBytes, c.NudgeAfter = 8, 4096, time.Hour
	})
	if err := tr.Call(testContext(t), echo(1, fill(0, 8), 8)); err != nil {
		t.Fatal(err)
	}
	s := tr.Stats()
	if s.State != StateConnected || s.InlineSend == 0 || s.InlineRecv == 0 || s.Slots != 8 || s.SlotsInUse != 0 ||
		s.PostedChains != 1 || s.MaxPayload == 0 || s.ConnectTime <= 0 || s.ConnectTime > time.Minute {
		t.Errorf("after one call: got %+v", s)
	}
	want := Link{Device: tr.conn.Load().dev.Attrs(), PeerFound: true, InlineSend: 4096, InlineRecv: 4096,
		Peer: rpcrdma.Private{SendSize: 8192, RecvSize: 8192}}
	if got := tr.Link(); got == nil || *got != want {
		t.Errorf("link: got %+v, want %+v", got, want)
	}
	tr.lastCall.Store(tr.now() - int64(time.Hour))
	if s := tr.Stats(); s.IdleTime < time.Hour || s.IdleTime > 2*time.Hour {
		t.Errorf("an hour after the last call: got idle time %v", s.IdleTime)
	}
	svc.delay.Store(int64(time.Hour))
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() { ended <- tr.Call(ctx, echo(1, nil, 0)) }()
	kit.Eventually(t, "call in flight", func() bool { s := tr.Stats(); return s.SlotsInUse == 1 && s.InFlight == 1 })
	cancel()
	<-ended
	before := tr.Stats()
	tr.Close()
	if s := tr.Stats(); s.PostedChains < before.PostedChains || s.IdleTime != 0 || s.InlineSend != 0 {
		t.Errorf("after Close: got %+v, want the counters of %+v", s, before)
	}
}
