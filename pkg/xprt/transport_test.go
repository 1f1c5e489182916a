package xprt

import (
	"context"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/rpcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
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
