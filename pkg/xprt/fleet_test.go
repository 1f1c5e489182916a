package xprt

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

var fleetFlag = flag.String("fleet", "", "simulate 10,000 clients in TestFleet, and write the results to `FILE`")

// The simulated server is a listener of Linux: it finishes a number of handshakes per second, and
// drops a SYN when connections wait whose handshakes take fleetBacklog. The server of 10,000
// clients finishes 500 per second. With other numbers of clients it is as fast for each client. The
// timeouts are those of softiwarp.
const (
	fleetHandshake = 20 * time.Second // of all clients
	fleetBacklog   = 2 * time.Second
	synTimeout     = 10 * time.Second
	replyTimeout   = 10 * time.Second
)

// synTimes are when the kernel of a client sends a SYN that is not answered (RFC 6298, from 1 s).
var synTimes = []time.Duration{0, time.Second, 3 * time.Second, 7 * time.Second}

// A fleetServer is a server that restarts. Its methods run in the bubble of a test.
type fleetServer struct {
	begin  time.Time
	outage time.Duration // from begin
	silent bool          // during the outage, SYNs get no answer; otherwise a reset
	each   time.Duration // for one handshake

	mu       sync.Mutex // guards the fields below
	free     time.Time  // when the listener has finished all connections that wait
	attempts []time.Duration
	syns     int
}

// connect is one attempt to connect. It returns nil after the handshake.
func (s *fleetServer) connect(ctx context.Context) error {
	began := time.Now()
	s.mu.Lock()
	s.attempts = append(s.attempts, began.Sub(s.begin))
	s.mu.Unlock()
	for _, after := range synTimes {
		if err := sleepUntil(ctx, began.Add(after)); err != nil {
			return err
		}
		done, err := s.syn(time.Now())
		switch {
		case err != nil:
			return err
		case done.IsZero(): // no answer
		case time.Until(done) > replyTimeout: // the listener serves the connection nevertheless
			if err := sleepUntil(ctx, time.Now().Add(replyTimeout)); err != nil {
				return err
			}
			return syscall.ETIMEDOUT
		default:
			return sleepUntil(ctx, done)
		}
	}
	if err := sleepUntil(ctx, began.Add(synTimeout)); err != nil {
		return err
	}
	return syscall.ETIMEDOUT
}

// syn receives a SYN. It returns when the handshake will be finished, or zero if the SYN is
// dropped.
func (s *fleetServer) syn(now time.Time) (done time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.syns++
	switch {
	case now.Sub(s.begin) < s.outage && s.silent:
		return time.Time{}, nil
	case now.Sub(s.begin) < s.outage:
		return time.Time{}, syscall.ECONNREFUSED
	case s.free.Sub(now) >= fleetBacklog:
		return time.Time{}, nil
	case s.free.Before(now):
		s.free = now
	}
	s.free = s.free.Add(s.each)
	return s.free, nil
}

func sleepUntil(ctx context.Context, at time.Time) error {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A fleetClient is one transport. It is the provider of its transport and ends the transport after
// the handshake.
type fleetClient struct {
	verbs.Provider
	server    *fleetServer
	recovered time.Duration // after the end of the outage
	end       context.CancelFunc
}

func (c *fleetClient) Resolve(ctx context.Context, _ netip.AddrPort) (verbs.ActiveID, error) {
	err := c.server.connect(ctx)
	if err == nil {
		c.recovered = time.Since(c.server.begin) - c.server.outage
		c.end()
		err = errors.New("the simulation ends here")
	}
	return nil, err
}

// A fleet is a set of clients whose connections are lost at the same moment.
type fleet struct {
	name   string
	hosts  int
	each   int // transports of each host
	outage time.Duration
	silent bool // clients notice the outage by keepalive calls
	// alone: each client has another server, whose outage is random and at most outage.
	alone bool
}

// A fleetPolicy says when clients connect.
type fleetPolicy struct {
	name   string
	jitter bool
	growth float64
	rate   int // Config.ConnectLimits of each host
}

// Policies. The first one has no pause at first, then 5 s, doubled up to 60 s. Linux's client does
// the same.
var (
	fleetBefore   = fleetPolicy{"before", false, 2, 0}
	fleetAfter    = fleetPolicy{"after", true, 0, 50}
	fleetLockstep = fleetPolicy{"without jitter", false, 0, 50}
)

// A fleetResult describes one simulation. Times are in seconds. Recoveries are measured from the
// end of the outage.
type fleetResult struct {
	Fleet, Policy string
	Clients       int
	Alone         bool
	Outage        float64
	Attempts      int   // of all clients
	SYNs          int   // also those that kernels repeat
	PerSecond     []int // attempts in each second
	// Peak is the largest number of attempts in one second after the end of the outage. Burst is
	// that in 10 ms.
	Peak, Burst         int
	Mean, P50, P99, Max float64 // recovery
}

// simulate runs the reconnect of all clients: [Transport.reconnect], with the pauses, limits and
// addresses that a mount uses.
func (f *fleet) simulate(t *testing.T, p fleetPolicy, seed uint64) fleetResult {
	clients := make([]*fleetClient, f.hosts*f.each)
	server := &fleetServer{outage: f.outage, silent: f.silent, each: fleetHandshake / time.Duration(len(clients))}
	synctest.Test(t, func(t *testing.T) {
		server.begin = time.Now()
		var work sync.WaitGroup
		for host := range f.hosts {
			limits := NewConnectLimits(p.rate)
			for i := range f.each {
				n := host*f.each + i
				random := rand.New(rand.NewPCG(seed, uint64(n)))
				ctx, cancel := context.WithCancel(t.Context())
				c := &fleetClient{server: server, end: cancel}
				if f.alone {
					c.server = &fleetServer{begin: server.begin,
						outage: time.Duration(random.Float64() * float64(f.outage))}
				}
				clients[n] = c
				work.Go(func() { f.client(t, ctx, c, p, limits, random) })
			}
		}
		work.Wait()
	})
	return f.result(p, clients)
}

// client is the worker of one transport from the loss of its connection on.
func (f *fleet) client(t *testing.T, ctx context.Context, c *fleetClient, p fleetPolicy, limits *ConnectLimits,
	random *rand.Rand) {
	cfg := Config{Provider: c, Addr: netip.MustParseAddrPort("192.0.2.1:20049"), ConnectLimits: limits}
	if err := cfg.fill(); err != nil {
		t.Error(err)
		return
	}
	tr := &Transport{cfg: cfg, log: cfg.Logger, closing: make(chan struct{})}
	back := newBackOff(&tr.cfg)
	back.Growth, back.Random = p.growth, func() float64 { return 0 }
	if p.jitter {
		back.Random = random.Float64
	}
	if f.silent { // the calls end with the second interval of KeepAlive; watch checks once a second
		time.Sleep(2*cfg.KeepAlive + time.Duration(random.Float64()*2*float64(time.Second)))
	}
	tr.reconnect(ctx, back, back.afterLoss(useProgress, false))
}

func (f *fleet) result(p fleetPolicy, clients []*fleetClient) fleetResult {
	r := fleetResult{Fleet: f.name, Policy: p.name, Clients: len(clients), Alone: f.alone, Outage: f.outage.Seconds()}
	servers := make(map[*fleetServer]bool)
	recoveries := make([]float64, len(clients))
	for i, c := range clients {
		servers[c.server] = true
		recoveries[i] = c.recovered.Seconds()
		r.Mean += recoveries[i] / float64(len(clients))
	}
	slices.Sort(recoveries)
	r.P50, r.P99, r.Max = recoveries[len(clients)/2], recoveries[len(clients)*99/100], recoveries[len(clients)-1]
	for s := range servers {
		r.Attempts += len(s.attempts)
		r.SYNs += s.syns
		if !f.alone {
			r.count(s)
		}
	}
	return r
}

// count counts the attempts at a server of many clients.
func (r *fleetResult) count(s *fleetServer) {
	slices.Sort(s.attempts)
	for i, at := range s.attempts {
		for len(r.PerSecond) <= int(at/time.Second) {
			r.PerSecond = append(r.PerSecond, 0)
		}
		r.PerSecond[at/time.Second]++
		if at >= s.outage {
			r.Peak = max(r.Peak, countBefore(s.attempts[i:], at+time.Second))
			r.Burst = max(r.Burst, countBefore(s.attempts[i:], at+10*time.Millisecond))
		}
	}
}

// countBefore returns the number of sorted times before end.
func countBefore(times []time.Duration, end time.Duration) int {
	n, _ := slices.BinarySearch(times, end)
	return n
}

func (r *fleetResult) String() string {
	return fmt.Sprintf("%-28s %-14s %5d clients: %6d attempts, %6d SYNs, peak %5d/s, %5d in 10 ms; "+
		"recovery mean %5.1f p50 %5.1f p99 %5.1f max %5.1f s", r.Fleet, r.Policy, r.Clients, r.Attempts, r.SYNs,
		r.Peak, r.Burst, r.Mean, r.P50, r.P99, r.Max)
}

// TestFleet simulates what happens when a server with thousands of clients restarts. The clients
// must not connect at the same moment, and must recover soon after the server accepts connections.
// Without random pauses, or without the limits of a host that has many mounts, the bounds do not
// hold.
func TestFleet(t *testing.T) {
	if kit.Race {
		t.Skip("the race detector crashes with thousands of goroutines in a bubble; make test runs it without -race")
	}
	n, all := 1024, []fleetResult{}
	outages := []time.Duration{15}
	if *fleetFlag != "" {
		n, outages = 10000, []time.Duration{0, 2, 5, 15, 35, 75, 135}
	}
	for _, c := range []struct {
		fleet
		without     fleetPolicy // must exceed the bounds
		peak, burst float64     // most attempts in 1 s and in 10 ms, as a part of the clients
		max         float64     // longest recovery in seconds
	}{
		{fleet{name: "all connections reset", hosts: n, each: 1}, fleetLockstep, 1, 0.08, 40},
		{fleet{name: "restart, 1 s", hosts: n, each: 1, outage: time.Second}, fleetLockstep, 0.35, 0.02, 40},
		{fleet{name: "restart, 20 s", hosts: n, each: 1, outage: 20 * time.Second}, fleetLockstep, 0.13, 0.01, 75},
		{fleet{name: "2 min, connects refused", hosts: n, each: 1, outage: 2 * time.Minute}, fleetLockstep, 0.06, 0.005,
			75},
		{fleet{name: "2 min, no answer", hosts: n, each: 1, outage: 2 * time.Minute, silent: true}, fleetLockstep, 0.08,
			0.005, 75},
		{fleet{name: "hosts with 256 connections", hosts: n / 256, each: 256, outage: time.Second}, fleetBefore, 0.3,
			0.01, 40},
	} {
		before, after := c.simulate(t, fleetBefore, 1), c.simulate(t, fleetAfter, 1)
		all = append(all, before, after)
		t.Logf("%v\n%v", &before, &after)
		if !after.within(c.peak, c.burst, c.max) {
			t.Errorf("got %v; want at most %v of the clients in 1 s, %v in 10 ms, and recovery in %v s", &after, c.peak,
				c.burst, c.max)
		}
		c.hosts = max(c.hosts/5, 2)
		if without := c.simulate(t, c.without, 1); without.within(c.peak, c.burst, c.max) {
			t.Errorf("got %v; want that the bounds do not hold", &without)
		}
		if after.Mean > before.Mean {
			t.Errorf("mean recovery: got %v s, want at most %v s as without jitter", after.Mean, before.Mean)
		}
	}
	for _, outage := range outages {
		f := fleet{name: "one client", hosts: n / 5, each: 1, outage: outage * time.Second, alone: true}
		before, after := f.simulate(t, fleetBefore, 1), f.simulate(t, fleetAfter, 1)
		all = append(all, before, after)
		t.Logf("outage up to %v\n%v\n%v", f.outage, &before, &after)
		if limit := before.Mean*1.1 + firstPause.Seconds(); after.Mean > limit {
			t.Errorf("one client, outage up to %v: got mean recovery %v s, want at most %v s", f.outage, after.Mean,
				limit)
		}
	}
	if *fleetFlag == "" || t.Failed() {
		return
	}
	data, err := json.MarshalIndent(all, "", " ")
	if err == nil {
		err = os.WriteFile(*fleetFlag, data, 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// within reports whether the bounds of TestFleet hold.
func (r *fleetResult) within(peak, burst, longest float64) bool {
	n := float64(r.Clients)
	return float64(r.Peak) <= peak*n && float64(r.Burst) <= burst*n && r.Max <= longest
}
