package xprt

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// once is a service whose REMOVE must be executed once for each argument, a number here.
type once struct {
	service
	mu   sync.Mutex
	seen map[uint64]int
}

func (o *once) ServeRPC(ctx context.Context, from netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(call)
	if err != nil || h.Prog != nfsProg || h.Proc != 12 {
		return o.service.ServeRPC(ctx, from, call, reply)
	}
	d := sunrpc.NewDecoder(args)
	id := d.Uint64()
	o.mu.Lock()
	o.seen[id]++
	n := o.seen[id]
	o.mu.Unlock()
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	return sunrpc.AppendUint32(reply, uint32(n)), nil
}

// work makes verified calls of every kind from one goroutine; a call that fails, or is answered
// wrongly, fails the test.
func work(t *testing.T, tr *Transport, fh nfs3.FH, w, calls int, rng *rand.Rand) {
	ctx := testContext(t)
	c := nfs3.NewClient(tr, nfs3.Options{})
	buf := make([]byte, 1<<18)
	for i := range calls {
		off := uint64(rng.IntN(1 << 20))
		n := []int{rng.IntN(300), rng.IntN(5000), rng.IntN(len(buf))}[rng.IntN(3)] + 1
		var err error
		switch rng.IntN(4) {
		case 0:
			var r nfs3.ReadResult
			clear(buf[:n])
			if err = c.Read(ctx, noCred, fh, off, buf[:n], &r); err == nil &&
				(r.N != n || !matchesPattern(off, buf[:n])) {
				err = fmt.Errorf("read %d octets at %d: %d came, or wrong ones", n, off, r.N)
			}
		case 1:
			var r nfs3.WriteResult
			if err = c.Write(ctx, noCred, fh, off, fill(off, n), nfs3.FileSync, &r); err == nil &&
				r.Count != uint32(n) {
				err = fmt.Errorf("write %d octets at %d: %d taken", n, off, r.Count)
			}
		case 2: // by reply chunk
			m := echo(2, sunrpc.AppendUint32(nil, uint32(n/4*4)), n/4*4)
			if err = tr.Call(ctx, m); err == nil && (len(m.Result) != n/4*4 || !matchesPattern(0, m.Result)) {
				err = fmt.Errorf("reply of %d octets, %d expected, or wrong ones", len(m.Result), n/4*4)
			}
		case 3:
			m := &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 12, Cred: noCred,
				Args: sunrpc.AppendUint64(nil, uint64(w)<<32|uint64(i)), MaxResult: 4}
			if err = tr.Call(ctx, m); err == nil {
				if d := sunrpc.NewDecoder(m.Result); d.Uint32() != 1 {
					err = fmt.Errorf("call %d of worker %d was executed more than once", i, w)
				}
			}
		}
		if err != nil {
			t.Errorf("worker %d, call %d: %v", w, i, err)
			return
		}
	}
}

// storm runs workers over a transport with faults, and checks that everything adds up in the end.
func storm(t *testing.T, client, server string, workers, calls int, change func(*Config)) Stats {
	t.Helper()
	remoteInv := !strings.Contains(client, "linv-error") // else there are next to no LOCAL_INVs
	plan := func(s string) *faults.Plan {
		p, err := faults.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Log("faults:", p)
		return p
	}
	srv := faults.New(softiwarp.New(softiwarp.Config{}), plan(server), nil)
	l, err := srv.Listen(context.Background(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	o := &once{seen: map[uint64]int{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- svcrdma.Serve(ctx, l, svcrdma.Config{Handler: o, RemoteInv: remoteInv, CachedReplies: 1 << 16})
	}()
	defer func() {
		cancel()
		l.Close()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	}()
	cli := faults.New(softiwarp.New(softiwarp.Config{}), plan(client), nil)
	tr := dial(t, l.Addr(), func(c *Config) {
		c.Provider, c.Slots, c.TraceEvents = cli, 8, 64
		c.ReconnectMin, c.ReconnectMax = time.Millisecond, 5*time.Millisecond
		c.Timeout = 5 * time.Second
		if change != nil {
			change(c)
		}
	})
	var monotone atomic.Bool
	monotone.Store(true)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		var last Stats
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			s := tr.Stats()
			if s.PostedChains < last.PostedChains || s.SendCompletions < last.SendCompletions ||
				s.RemoteAccessErrors < last.RemoteAccessErrors {
				monotone.Store(false)
			}
			tr.Calls()
			last = s
		}
	})
	var wg sync.WaitGroup
	for w := range workers {
		rng := rand.New(rand.NewPCG(cli.Plan().Seed(), uint64(w)))
		wg.Go(func() { work(t, tr, testFH(t), w, calls, rng) })
	}
	wg.Wait()
	close(stop)
	watch.Wait()
	if !monotone.Load() {
		t.Error("a counter went backwards")
	}
	tr.Close()
	s := tr.Stats()
	if s.MRsFailed != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned {
		t.Errorf("%d MRs hurt = %d recovered + %d recycled + %d orphaned", s.MRsFailed, s.MRsRecovered, s.MRsRecycled,
			s.MRsOrphaned)
	}
	if s.MRsTotal != 0 || s.MRsFree != 0 {
		t.Errorf("%d MRs are left, %d free", s.MRsTotal, s.MRsFree)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, n := range o.seen {
		if n != 1 {
			t.Errorf("call %#x was executed %d times", id, n)
		}
	}
	for _, p := range []*faults.Provider{cli, srv} {
		for _, c := range p.Counts() {
			random := strings.Contains(client+","+server, c.Name+"=~") // may never come
			if c.Injected == 0 && c.Name != "credits" && !random {
				t.Errorf("fault %s was never injected", c.Name)
			}
		}
	}
	t.Logf("%d connects, %d resends, %d timeouts; MRs: %d allocated, %d hurt = %d recovered + %d recycled + %d orphaned",
		s.Connects, s.Resends, s.Timeouts, s.MRsAllocated, s.MRsFailed, s.MRsRecovered, s.MRsRecycled, s.MRsOrphaned)
	return s
}

// TestFaults runs verified work under each fault alone, and under all together (S13, S14, S15,
// S22).
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		client, server string
		check          func(t *testing.T, s Stats)
	}{
		{"disconnect-every=~40", "", func(t *testing.T, s Stats) {
			if s.MRsRecovered == 0 {
				t.Error("no MR was recovered")
			}
		}},
		{"post-fail=40:*", "", nil},
		{"post-fail=40:0", "", nil},
		{"post-fail=40:1", "", nil},
		{"flush-reg=30", "", func(t *testing.T, s Stats) {
			if s.MRsRecovered == 0 {
				t.Error("no MR was recovered")
			}
		}},
		{"reg-error=30", "", nil},
		{"linv-error=30", "disconnect-every=~200", func(t *testing.T, s Stats) {
			if s.MRsRecycled == 0 {
				t.Error("no MR was recycled")
			}
		}},
		{"delay-reply=~10:5ms", "", nil},
		{"lose-reply=60", "", func(t *testing.T, s Stats) {
			if s.Timeouts == 0 {
				t.Error("no call timed out")
			}
		}},
		{"credits=1", "", func(t *testing.T, s Stats) {
			if s.Connects != 1 {
				t.Errorf("%d connects", s.Connects)
			}
		}},
		{"alloc-fail=3,disconnect-every=~60", "", func(t *testing.T, s Stats) {
			if s.MRsOrphaned == 0 {
				t.Error("no MR was orphaned")
			}
		}},
		{"dereg-fail=5,disconnect-every=~60", "", func(t *testing.T, s Stats) {
			if s.MRsOrphaned+s.MRsRecycled == 0 {
				t.Error("no MR was orphaned or recycled")
			}
		}},
		{"connect-fail=2,disconnect-every=~60", "", func(t *testing.T, s Stats) {
			if s.ConnectFailures == 0 {
				t.Error("no connect failed")
			}
		}},
		{"", "late-write=20", func(t *testing.T, s Stats) {
			if s.RemoteAccessErrors == 0 {
				t.Error("no access was refused")
			}
		}},
		{"", "stale-key=21,wild-write=34", func(t *testing.T, s Stats) {
			if s.RemoteAccessErrors == 0 {
				t.Error("no access was refused")
			}
		}},
		{"", "late-read=10", func(t *testing.T, s Stats) {
			if s.RemoteAccessErrors == 0 {
				t.Error("no access was refused")
			}
		}},
		{"disconnect-every=~100,post-fail=~150:*,flush-reg=~120,reg-error=~130,linv-error=~100,delay-reply=~50:2ms,alloc-fail=~20,dereg-fail=~40,connect-fail=~10",
			"disconnect-every=~150,late-write=~100,wild-write=~100,stale-key=~100", nil},
	} {
		t.Run(c.client+" "+c.server, func(t *testing.T) {
			s := storm(t, c.client, c.server, 12, 60, func(cfg *Config) {
				if c.client == "lose-reply=60" {
					cfg.Timeout = 200 * time.Millisecond
				}
			})
			if c.check != nil {
				c.check(t, s)
			}
		})
	}
}
