package xprt

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// unconnected returns a transport without a connection, which is closed at the end of the test.
func unconnected(t *testing.T, change func(*Config)) *Transport {
	t.Helper()
	cfg := Config{Provider: softiwarp.New(softiwarp.Config{}), Slots: MinSlots}
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

// TestConfigDefaults checks the value of each field that is zero, and that other values stay.
func TestConfigDefaults(t *testing.T) {
	var c Config
	kit.Must(t, c.fill())
	if c.Logger == nil || c.Servers == nil {
		t.Error("got no logger or no addresses")
	}
	c.Logger, c.Servers = nil, nil
	want := Config{Timeout: time.Minute, ConnectTimeout: time.Minute, ReconnectMin: 5 * time.Second,
		ReconnectMax: time.Minute, NudgeAfter: 100 * time.Millisecond, KeepAlive: 10 * time.Second,
		IdleTimeout: 5 * time.Minute, Slots: 128, InlineBytes: 4096}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("defaults: got %+v, want %+v", c, want)
	}
	set := Config{Timeout: 1, ConnectTimeout: 2, ReconnectMin: 3, ReconnectMax: 4, NudgeAfter: 5, KeepAlive: -1,
		IdleTimeout: -1, Slots: MinSlots, InlineBytes: MinInlineBytes, Index: 6, Reserved: []uint32{7},
		Servers: NewAddresses(netip.MustParseAddrPort("192.0.2.1:1"))}
	filled := set
	kit.Must(t, filled.fill())
	if filled.Logger = nil; !reflect.DeepEqual(filled, set) {
		t.Errorf("values that are set: got %+v, want %+v", filled, set)
	}
}

// TestNewChecksLimits uses the smallest and the largest values, and values out of range.
func TestNewChecksLimits(t *testing.T) {
	for _, c := range []struct {
		slots, inline int
		ok            bool
	}{
		{MinSlots, MinInlineBytes, true}, {MaxSlots, 0, true}, {MinSlots, MaxInlineBytes, true},
		{MinSlots - 1, 0, false}, {MaxSlots + 1, 0, false}, {0, MinInlineBytes - 512, false}, {0, 1500, false},
		{0, MaxInlineBytes + 1024, false},
	} {
		tr, err := New(Config{Slots: c.slots, InlineBytes: c.inline})
		if (err == nil) != c.ok {
			t.Errorf("%d slots, %d inline bytes: got %v, want valid %v", c.slots, c.inline, err, c.ok)
		}
		if err == nil {
			tr.Close()
		}
	}
	if n := selfcheck.Count(selfcheck.Slot); n != 0 {
		t.Errorf("slots that are left: got %d, want 0", n)
	}
}

// TestMalformedMessagesAreRefused checks which messages Call refuses before it sends anything.
func TestMalformedMessagesAreRefused(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		args, data := make([]byte, 8), make([]byte, b.tr.MaxPayload()+1)
		for name, m := range map[string]*sunrpc.Message{
			"large argument":           {ArgData: data},
			"large result":             {ResultData: data},
			"data after the end":       {Args: args, ArgDataPos: 12},
			"data before the start":    {Args: args, ArgDataPos: -4},
			"data that is not aligned": {Args: args, ArgDataPos: 6},
			"negative results":         {MaxResult: -1},
		} {
			m.Cred = noCred
			if err := b.tr.Call(t.Context(), m); !isProtocol(err) {
				t.Errorf("%s: got %v, want a ProtocolError", name, err)
			}
		}
		b.mustSucceed(&sunrpc.Message{Cred: noCred, Args: args, ArgDataPos: 8, ArgData: data[1:]})
		b.mustSucceed(&sunrpc.Message{Cred: noCred, ResultData: data[1:]})
	})
}

// TestStatsOfConnection checks the fields that follow the connection and its calls.
func TestStatsOfConnection(t *testing.T) {
	var g gate
	tr := dial(t, serve(t, svcrdma.Config{Handler: &g, InlineBytes: 8192}), func(c *Config) {
		c.Slots, c.InlineBytes, c.NudgeAfter = 8, 4096, time.Hour
	})
	kit.Must(t, tr.Call(testContext(t), echo(1, fill(0, 8), 8)))
	s := tr.Stats()
	if s.State != StateConnected || s.InlineSend == 0 || s.InlineRecv == 0 || s.Slots != 8 || s.SlotsInUse != 0 ||
		s.PostedChains != 1 || s.MaxPayload == 0 || s.ConnectTime <= 0 || s.Connections[StateConnected] != 1 ||
		s.Since.IsZero() {
		t.Errorf("after one call: got %+v", s)
	}
	got := tr.Link()
	want := Link{Device: softiwarpAttrs(t), PeerFound: true, InlineSend: 4096, InlineRecv: 4096,
		Peer: rpcrdma.Private{SendSize: 8192, RecvSize: 8192}}
	if got == nil || *got != want {
		t.Errorf("link: got %+v, want %+v", got, want)
	}
	open := shut(&g.closed)
	defer open()
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan error, 1)
	go func() { ended <- tr.Call(ctx, echo(1, nil, 0)) }()
	kit.Eventually(t, "call in flight", func() bool { s := tr.Stats(); return s.SlotsInUse == 1 && s.InFlight == 1 })
	cancel()
	if err := <-ended; !errors.Is(err, syscall.EINTR) {
		t.Errorf("canceled call: got %v, want EINTR", err)
	}
	before := tr.Stats()
	tr.Close()
	if s := tr.Stats(); s.PostedChains < before.PostedChains || s.IdleTime != 0 || s.InlineSend != 0 ||
		s.State != StateClosed {
		t.Errorf("after Close: got %+v, want the counters of %+v", s, before)
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
	s := tr.free.take()
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
