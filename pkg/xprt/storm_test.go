package xprt

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/svcrdma"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// A countingService counts how often it executes each REMOVE. The argument of REMOVE is a number.
type countingService struct {
	service
	mu       sync.Mutex // guards executed
	executed map[uint64]int
}

func (o *countingService) ServeRPC(ctx context.Context, from netip.AddrPort, call, reply []byte) ([]byte, error) {
	h, args, err := sunrpc.ParseCall(call)
	if err != nil || h.Prog != nfsProg || h.Proc != 12 {
		return o.service.ServeRPC(ctx, from, call, reply)
	}
	d := sunrpc.NewDecoder(args)
	id := d.Uint64()
	o.mu.Lock()
	o.executed[id]++
	n := o.executed[id]
	o.mu.Unlock()
	reply = sunrpc.AppendAcceptedReply(reply, h.XID, sunrpc.Success)
	return sunrpc.AppendUint32(reply, uint32(n)), nil
}

// A worker makes random calls with verified results from one goroutine.
type worker struct {
	tr  *Transport
	c   *nfs3.Client
	fh  nfs3.FH
	id  int
	rng *rand.Rand
	buf []byte
}

// run makes calls until one fails or has a wrong result.
func (w *worker) run(ctx context.Context, calls int) error {
	for i := range calls {
		off := uint64(w.rng.IntN(1 << 20))
		n := []int{w.rng.IntN(300), w.rng.IntN(5000), w.rng.IntN(len(w.buf))}[w.rng.IntN(3)] + 1
		var err error
		switch w.rng.IntN(4) {
		case 0:
			err = w.read(ctx, off, n)
		case 1:
			err = w.write(ctx, off, n)
		case 2:
			err = w.longReply(ctx, n/4*4)
		case 3:
			err = w.remove(ctx, i)
		}
		if err != nil {
			return fmt.Errorf("worker %d, call %d: %w", w.id, i, err)
		}
	}
	return nil
}

func (w *worker) read(ctx context.Context, off uint64, n int) error {
	var r nfs3.ReadResult
	clear(w.buf[:n])
	err := w.c.Read(ctx, noCred, w.fh, off, w.buf[:n], &r)
	if err == nil && (r.N != n || !matchesPattern(off, w.buf[:n])) {
		err = fmt.Errorf("read %d bytes at %d: got %d bytes, or bytes that differ", n, off, r.N)
	}
	return err
}

func (w *worker) write(ctx context.Context, off uint64, n int) error {
	var r nfs3.WriteResult
	err := w.c.Write(ctx, noCred, w.fh, off, fill(off, n), nfs3.FileSync, &r)
	if err == nil && r.Count != uint32(n) {
		err = fmt.Errorf("write %d bytes at %d: got count %d", n, off, r.Count)
	}
	return err
}

// longReply makes a call whose reply needs a reply chunk if n is large.
func (w *worker) longReply(ctx context.Context, n int) error {
	m := echo(2, sunrpc.AppendUint32(nil, uint32(n)), n)
	err := w.tr.Call(ctx, m)
	if err == nil && (len(m.Result) != n || !matchesPattern(0, m.Result)) {
		err = fmt.Errorf("reply of %d bytes: got %d bytes, or bytes that differ", n, len(m.Result))
	}
	return err
}

func (w *worker) remove(ctx context.Context, call int) error {
	m := &sunrpc.Message{Prog: nfsProg, Vers: 3, Proc: 12, Cred: noCred,
		Args: sunrpc.AppendUint64(nil, uint64(w.id)<<32|uint64(call)), MaxResult: 4}
	if err := w.tr.Call(ctx, m); err != nil {
		return err
	}
	d := sunrpc.NewDecoder(m.Result)
	if n := d.Uint32(); n != 1 {
		return fmt.Errorf("executions of a REMOVE: got %d, want 1", n)
	}
	return nil
}

// stormDepth is the number of pages of an MR in a storm of calls with several MRs.
const stormDepth = 17

// storm runs workers on a transport with faults, and checks the counters at the end. With localInv,
// the server invalidates no key, and large calls have several MRs.
func storm(t *testing.T, client, server string, localInv bool, change func(*Config)) Stats {
	t.Helper()
	const workers, calls = 8, 40
	cli, srv := faulty(t, client), faulty(t, server)
	if localInv {
		cli = faults.New(hooked(&hookedProvider{attrs: withDepth(stormDepth)}), cli.Plan(), nil)
	}
	t.Log("faults of the client:", cli.Plan(), "and of the server:", srv.Plan())
	svc := &countingService{executed: map[uint64]int{}}
	addr := serveOn(t, srv, svcrdma.Config{Handler: svc, RemoteInv: !localInv, CachedReplies: 1 << 16})
	var ended observed
	tr := dial(t, addr, func(c *Config) {
		c.Provider, c.Slots, c.TraceEvents, c.Observe = cli, 8, 64, ended.observe
		c.ReconnectMin, c.ReconnectMax = time.Millisecond, 5*time.Millisecond
		c.Timeout = 20 * time.Second // the storm must end before
		if change != nil {
			change(c)
		}
	})
	ctx := testContext(t)
	var wg sync.WaitGroup
	for id := range workers {
		w := &worker{tr: tr, c: nfs3.NewClient(tr), fh: testFH(t), id: id,
			rng: rand.New(rand.NewPCG(cli.Plan().Seed(), uint64(id))), buf: make([]byte, 1<<18)}
		wg.Go(func() {
			if err := w.run(ctx, calls); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	tr.Close()
	s := tr.Stats()
	checkMRs(t, s)
	resends, all := uint64(0), ended.take(t)
	for _, c := range all {
		resends += uint64(max(c.Sends-1, 0))
	}
	if len(all) != workers*calls || resends != s.Resends {
		t.Errorf("observed: got %d calls, %d resends; want %d, %d", len(all), resends, workers*calls, s.Resends)
	}
	svc.mu.Lock()
	defer svc.mu.Unlock()
	for id, n := range svc.executed {
		if n != 1 {
			t.Errorf("executions of call %#x: got %d, want 1", id, n)
		}
	}
	for _, p := range []*faults.Provider{cli, srv} {
		for _, c := range p.Counts() {
			random := strings.Contains(client+","+server, c.Name+"=~") // may not occur
			if c.Injected == 0 && c.Name != "credits" && !random {
				t.Errorf("injected faults %s: got 0, want some", c.Name)
			}
		}
	}
	return s
}

func checkMRs(t *testing.T, s Stats) {
	t.Helper()
	if s.MRsFailed != s.MRsRecovered+s.MRsRecycled+s.MRsOrphaned {
		t.Errorf("failed MRs: got %d, want %d recovered + %d recycled + %d orphaned", s.MRsFailed, s.MRsRecovered,
			s.MRsRecycled, s.MRsOrphaned)
	}
	if s.MRsTotal != 0 || s.MRsFree != 0 {
		t.Errorf("MRs after Close: got %d, %d free; want 0, 0", s.MRsTotal, s.MRsFree)
	}
}

// maxStorms bounds the storms of TestFaults with one fault. One of a hundred has no effect, on a
// loaded machine.
const maxStorms = 20

// TestFaults runs verified calls under each fault, and under all faults together (S13, S14, S15,
// S22). Each fault must end the connection or the call at once: no timeout may do that later.
func TestFaults(t *testing.T) {
	type effect struct {
		name  string // of the counter that must not be 0
		count func(Stats) uint64
	}
	none := effect{"", nil} // the fault may have no effect
	recovered := effect{"recovered MRs", func(s Stats) uint64 { return s.MRsRecovered }}
	recycled := effect{"recycled MRs", func(s Stats) uint64 { return s.MRsRecycled }}
	orphaned := effect{"orphaned MRs", func(s Stats) uint64 { return s.MRsOrphaned }}
	removed := effect{"orphaned or recycled MRs", func(s Stats) uint64 { return s.MRsOrphaned + s.MRsRecycled }}
	timeouts := effect{"timeouts", func(s Stats) uint64 { return s.Timeouts }}
	notConnected := effect{"connect failures", func(s Stats) uint64 { return s.ConnectFailures }}
	refused := effect{"refused accesses", func(s Stats) uint64 { return s.RemoteAccessErrors }}
	const allClient = "disconnect-every=~100,post-fail=~150:*,flush-reg=~120,reg-error=~130,linv-error=~100," +
		"delay-reply=~50:2ms,alloc-fail=~20,dereg-fail=~40,connect-fail=~10"
	const allServer = "disconnect-every=~150,late-write=~100,wild-write=~100,stale-key=~100"
	const loseReply = "lose-reply=60"
	for _, c := range []struct {
		client, server string
		localInvOnly   bool // otherwise there are few LOCAL_INVs
		effect         effect
	}{
		{"disconnect-every=~40", "", false, recovered},
		{"post-fail=40:*", "", false, none},
		{"post-fail=40:0", "", false, none},
		{"post-fail=40:1", "", false, none},
		{"post-fail=6:2", "", true, recycled},
		{"post-fail=6:3", "", true, recycled},
		{"flush-reg=30", "", false, recovered},
		{"reg-error=30", "", false, none},
		{"linv-error=30", "disconnect-every=~200", true, recycled},
		{"delay-reply=~10:5ms", "", false, none},
		{loseReply, "", false, timeouts},
		{"credits=1", "", false, none},
		{"alloc-fail=3,disconnect-every=~60", "", false, orphaned},
		{"dereg-fail=5,disconnect-every=~60", "", false, removed},
		{"connect-fail=2,disconnect-every=~60", "", false, notConnected},
		{"", "late-write=20", false, refused},
		{"", "stale-key=21,wild-write=34", false, refused},
		{"", "late-read=10", false, refused},
		{allClient, allServer, true, none},
	} {
		for _, localInv := range []bool{false, true} {
			if c.localInvOnly && !localInv {
				continue
			}
			t.Run(fmt.Sprintf("%s %s, LOCAL_INV only %v", c.client, c.server, localInv), func(t *testing.T) {
				var s Stats
				for try := 0; ; try++ { // a fault has no effect if it meets no call
					s = storm(t, c.client, c.server, localInv, func(cfg *Config) {
						if c.client == loseReply {
							cfg.Timeout = 200 * time.Millisecond
						}
					})
					if c.effect.count == nil || c.effect.count(s) != 0 || t.Failed() {
						break
					}
					if try == maxStorms {
						t.Fatalf("%s: got 0 in %d storms, want some", c.effect.name, try+1)
					}
				}
				if c.client == "credits=1" && s.Connects != 1 {
					t.Errorf("connects: got %d, want 1", s.Connects)
				}
				if c.client != loseReply && s.Timeouts != 0 {
					t.Errorf("timeouts: got %d, want 0", s.Timeouts)
				}
			})
		}
	}
}
