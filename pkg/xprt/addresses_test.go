package xprt

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestChooseAddress checks the order of the addresses and the timeout of attempts, while addresses
// fail and work again.
func TestChooseAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewAddresses(make([]netip.AddrPort, 3)...)
		a.longer = 0
		for i, c := range []struct {
			pause     time.Duration
			failed    string // addresses that fail now
			worked    string // addresses that work now
			preferred int
			want      int
			timeout   time.Duration
		}{
			{0, "", "", 0, 0, 5 * time.Second},
			{0, "", "", 2, 2, 5 * time.Second},
			{0, "2", "", 2, 0, 5 * time.Second},
			{0, "0", "", 2, 1, 5 * time.Second},
			{0, "1", "", 2, 2, 10 * time.Second}, // all failed; 2 was the first
			{0, "2", "", 2, 0, 10 * time.Second},
			{0, "0", "", 2, 1, 10 * time.Second},
			{avoidMin - 10*time.Millisecond, "", "", 2, 1, 10 * time.Second},
			{10 * time.Millisecond, "", "", 2, 2, 5 * time.Second}, // none is avoided
			{0, "2", "", 2, 0, 5 * time.Second},
			{avoidMin, "", "", 2, 0, 5 * time.Second}, // 2 is avoided for longer
			{0, "", "2", 2, 2, 5 * time.Second},
			{0, "012", "", 0, 2, 10 * time.Second}, // 2 is avoided for the shortest time
			{avoidMin, "", "", 0, 2, 5 * time.Second},
			{0, "2222", "", 0, 0, 20 * time.Second}, // counts once
		} {
			time.Sleep(c.pause + time.Millisecond)
			for _, n := range c.failed {
				a.failed(int(n - '0'))
			}
			for _, n := range c.worked {
				a.worked(int(n - '0'))
			}
			if got, timeout := a.choose(c.preferred, 40*time.Second); got != c.want || timeout != c.timeout {
				t.Errorf("case %d: got address %d, timeout %v; want %d, %v", i, got, timeout, c.want, c.timeout)
			}
		}
		for range 12 {
			time.Sleep(avoidMax)
			for i := range 3 {
				a.failed(i)
			}
		}
		if _, timeout := a.choose(0, 40*time.Second); timeout != 40*time.Second {
			t.Errorf("after many failures: got timeout %v, want 40s", timeout)
		}
		time.Sleep(avoidMax - time.Nanosecond)
		before := a.usable(0)
		time.Sleep(time.Nanosecond)
		if before || !a.usable(0) {
			t.Errorf("after many failures: got usable %v before %v, %v after it", before, avoidMax, a.usable(0))
		}
		one := NewAddresses(netip.AddrPort{})
		one.failed(0)
		if i, timeout := one.choose(0, time.Minute); i != 0 || timeout != time.Minute {
			t.Errorf("only address: got %d, %v; want 0, 1m0s", i, timeout)
		}
	})
}

// TestAvoidedTimesDiffer checks that clients that noticed a failure at the same moment return to
// the address at different times, at most half of the time later.
func TestAvoidedTimesDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var early, late int
		for range 1000 {
			a := NewAddresses(make([]netip.AddrPort, 2)...)
			a.failed(0)
			switch avoid := time.Until(a.health[0].avoid); {
			case avoid < avoidMin || avoid >= avoidMin*3/2:
				t.Fatalf("avoided for %v, want %v to %v", avoid, avoidMin, avoidMin*3/2)
			case avoid < avoidMin*5/4:
				early++
			default:
				late++
			}
		}
		if early < 300 || late < 300 {
			t.Errorf("got %d clients in the first half of the range, %d in the second; want about 500", early, late)
		}
	})
}

// TestPauseFollowsRound checks that the pause between attempts follows the last address.
func TestPauseFollowsRound(t *testing.T) {
	b := newBackOff(&Config{ReconnectMin: 2 * time.Second, ReconnectMax: 4 * time.Second,
		Servers: NewAddresses(make([]netip.AddrPort, 3)...)})
	b.Random = func() float64 { return 0 }
	var got []time.Duration
	for range 7 {
		got = append(got, b.next()/time.Second)
	}
	got = append(got, b.afterLoss(useAlive, false)/time.Second, b.next()/time.Second)
	if s := fmt.Sprint(got); s != "[0s 0s 2ns 0s 0s 3ns 0s 0s 4ns]" {
		t.Errorf("pauses: got %s", s)
	}
	b.next()
	if pause := b.afterLoss(useProgress, false); pause != 0 || b.attempts != 0 || !b.First() {
		t.Errorf("after progress: got pause %v, %+v; want 0 and a new round", pause, b)
	}
}

// A path is one address of a server: a relay that can be closed, or can stop to forward data.
type path struct {
	*kit.Relay
	gate sync.RWMutex // held for writing while the path is silent
}

func startPath(t *testing.T, server netip.AddrPort) *path {
	t.Helper()
	p := &path{}
	pass := func(int) {
		p.gate.RLock()
		defer p.gate.RUnlock()
	}
	p.Relay = kit.StartRelay(t, server.String(), kit.RelayOptions{ToServer: pass, ToClient: pass})
	return p
}

// A countedRemoves server counts how often it executes each REMOVE. It replies with the arguments.
type countedRemoves struct {
	mu    sync.Mutex // guards times
	times map[uint64]int
}

func (c *countedRemoves) ServeRPC(_ context.Context, _ netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(call)
	if err != nil {
		return nil, err
	}
	if len(args) == 8 {
		c.mu.Lock()
		c.times[binary.BigEndian.Uint64(args)]++
		c.mu.Unlock()
	}
	return append(sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success), args...), nil
}

// removes makes REMOVEs on tr until stop is set. Each must succeed and be executed once.
type removes struct {
	server countedRemoves
	tr     *Transport
	stop   atomic.Bool
	done   atomic.Uint64 // calls that ended
	next   atomic.Uint64
	wg     sync.WaitGroup
}

func (r *removes) start(t *testing.T) {
	for range 8 {
		r.wg.Go(func() {
			for !r.stop.Load() {
				id := r.next.Add(1)
				m := sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 12, Cred: noCred,
					Args: binary.BigEndian.AppendUint64(nil, id), MaxResult: 8}
				if err := r.tr.Call(testContext(t), &m); err != nil || binary.BigEndian.Uint64(m.Result) != id {
					t.Errorf("REMOVE %d: got %v, result %x", id, err, m.Result)
					return
				}
				r.done.Add(1)
			}
		})
	}
}

// progress waits until more calls have ended.
func (r *removes) progress(t *testing.T) {
	t.Helper()
	want := r.done.Load() + 50
	kit.Eventually(t, "progress of calls", func() bool { return r.done.Load() >= want || t.Failed() })
}

func (r *removes) end(t *testing.T) {
	t.Helper()
	r.stop.Store(true)
	r.wg.Wait()
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	for id, n := range r.server.times {
		if n != 1 {
			t.Errorf("REMOVE %d: executed %d times, want 1", id, n)
		}
	}
	if n := uint64(len(r.server.times)); n != r.next.Load() {
		t.Errorf("got %d executed calls, want %d", n, r.next.Load())
	}
}

// twoPaths connects a transport to a server with two addresses.
func twoPaths(t *testing.T, change func(*Config)) (*removes, [2]*path) {
	t.Helper()
	r := &removes{server: countedRemoves{times: make(map[uint64]int)}}
	server := serve(t, svcrdma.Config{Handler: &r.server})
	paths := [2]*path{startPath(t, server), startPath(t, server)}
	r.tr = dial(t, netip.AddrPort{}, func(c *Config) {
		c.Servers = NewAddresses(paths[0].Addr(), paths[1].Addr())
		c.ReconnectMin, c.ReconnectMax = time.Hour, time.Hour // a pause would fail the test
		if change != nil {
			change(c)
		}
	})
	return r, paths
}

func (r *removes) usesPath(t *testing.T, p *path) {
	t.Helper()
	if got := r.tr.Address(); got != p.Addr() {
		t.Errorf("address of the connection: got %v, want %v", got, p.Addr())
	}
}

// TestFailOverToOtherAddress closes or resets one address after the other under load. No call
// fails, and the server executes each call once.
func TestFailOverToOtherAddress(t *testing.T) {
	r, paths := twoPaths(t, nil)
	r.start(t)
	r.progress(t)
	r.usesPath(t, paths[0])
	for i := range 6 {
		gone, left := paths[i%2], paths[(i+1)%2]
		if i < 3 {
			gone.Stop() // refuses connections from now on
		} else {
			gone.Reset()
		}
		r.progress(t)
		r.usesPath(t, left)
		gone.Start()
	}
	r.end(t)
	if s := r.tr.Stats(); s.Connects != 7 || s.Preferred != paths[0].Addr() {
		t.Errorf("got %d connects, preferred address %v; want 7, %v", s.Connects, s.Preferred, paths[0].Addr())
	}
}

// TestFailOverFromSilentAddress makes an address silent under load. The calls continue at the other
// address, although the silent one still accepts connections.
func TestFailOverFromSilentAddress(t *testing.T) {
	r, paths := twoPaths(t, func(c *Config) { c.KeepAlive = 300 * time.Millisecond })
	r.start(t)
	r.progress(t)
	paths[0].gate.Lock()
	t.Cleanup(paths[0].gate.Unlock)
	r.progress(t)
	r.usesPath(t, paths[1])
	r.end(t)
	if s := r.tr.Stats(); s.Connects != 2 || s.ConnectFailures != 0 || s.Resends == 0 {
		t.Errorf("got %d connects, %d failures, %d resends; want 2, 0, some", s.Connects, s.ConnectFailures, s.Resends)
	}
}

// TestConnectUsesOtherAddress makes the first connection while the preferred address refuses
// connections, and then while all addresses do.
func TestConnectUsesOtherAddress(t *testing.T) {
	r, paths := twoPaths(t, nil)
	for _, want := range []*path{paths[1], nil} {
		paths[0].Stop()
		if want == nil {
			paths[1].Stop()
		}
		tr := unconnected(t, func(c *Config) { c.Servers = NewAddresses(paths[0].Addr(), paths[1].Addr()) })
		err := tr.Connect(testContext(t))
		switch {
		case want != nil && (err != nil || tr.Address() != want.Addr()):
			t.Errorf("one address refuses: got %v, address %v; want %v", err, tr.Address(), want.Addr())
		case want == nil && (err == nil || !strings.Contains(err.Error(), paths[0].Addr().String())):
			t.Errorf("both addresses refuse: got %v, want an error of %v", err, paths[0].Addr())
		}
	}
	r.end(t)
}

// TestReturnToPreferredAddress lets the preferred address fail and work again. The transport stays
// at the other address while it has calls, and returns when it is idle.
func TestReturnToPreferredAddress(t *testing.T) {
	r, paths := twoPaths(t, nil)
	r.start(t)
	r.progress(t)
	paths[0].Stop()
	r.progress(t)
	paths[0].Start()
	idle := func() { r.tr.lastCall.Store(r.tr.now() - int64(returnIdle) - 1) }
	r.tr.cfg.Servers.worked(0)
	paths[1].gate.Lock() // calls that take long
	kit.Eventually(t, "pending calls", func() bool { return r.tr.Stats().InFlight == 8 })
	idle()
	r.tr.checkConnection()
	paths[1].gate.Unlock()
	r.progress(t)
	r.usesPath(t, paths[1])
	r.end(t)
	r.tr.cfg.Servers.failed(0)
	idle()
	r.tr.checkConnection() // idle, but the preferred address cannot be tried yet
	if !r.tr.Ready() || isClosed(r.tr.conn.Load().ended) {
		t.Error("got a closed connection while the preferred address is avoided")
	}
	r.tr.cfg.Servers.worked(0)
	idle()
	kit.Eventually(t, "connection to the preferred address", func() bool {
		return r.tr.Address() == paths[0].Addr() && r.tr.Stats().State == StateConnected
	})
	if s := r.tr.Stats(); s.Connects != 3 || s.LastError == "" {
		t.Errorf("got %d connects, last error %q; want 3 and the error of the lost address", s.Connects, s.LastError)
	}
	idle()
	r.tr.checkConnection()
	if isClosed(r.tr.conn.Load().ended) {
		t.Error("got a closed connection at the preferred address")
	}
}
