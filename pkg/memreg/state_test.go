package memreg

import (
	"strings"
	"testing"
)

// TestTransitions applies every event in every state and checks the gauges (S12).
func TestTransitions(t *testing.T) {
	legal := map[State]map[event]State{
		Invalid: {evMap: Valid, evDestroy: destroyed},
		Valid: {evUnmap: Invalid, evInvalidated: Invalid, evRemoteInv: Invalid, evFlushFR: FlushedFR,
			evFlushLI: FlushedLI, evFailLI: Recycling, evRecover: Recovering, evDestroy: destroyed},
		FlushedFR: {evFlushFR: FlushedFR, evFlushLI: FlushedLI, evFailLI: Recycling, evRecover: Recovering,
			evDestroy: destroyed},
		FlushedLI:  {evFlushLI: FlushedLI, evFailLI: Recycling, evRecover: Recovering, evDestroy: destroyed},
		Recycling:  {evFlushFR: Recycling, evFlushLI: Recycling, evFailLI: Recycling, evDestroy: destroyed},
		Recovering: {evRecovered: Invalid, evDestroy: destroyed},
	}
	for _, from := range States {
		for e := event(0); e < numEvents; e++ {
			t.Run(from.String()+" "+e.String(), func(t *testing.T) {
				var stats Counters
				m := &MR{pool: NewPool(nil, Params{}, &stats, Hooks{})}
				m.state.Store(uint32(from))
				stats.gauges[from].Store(1)
				want, ok := legal[from][e]
				panicked := func() (panicked bool) {
					defer func() { panicked = recover() != nil }()
					m.apply(e)
					return
				}()
				if panicked == ok {
					t.Fatalf("panicked: %v, want %v", panicked, !ok)
				}
				if !ok {
					want = from
				}
				if m.State() != want {
					t.Errorf("state %v, want %v", m.State(), want)
				}
				total := int64(1)
				if want == destroyed {
					total = 0
				} else if stats.InState(want) != 1 {
					t.Errorf("gauge of %v: got %d, want 1", want, stats.InState(want))
				}
				if stats.Total() != total {
					t.Errorf("sum of gauges: got %d, want %d", stats.Total(), total)
				}
				wantFailed := uint64(0)
				if want.failed() && !from.failed() {
					wantFailed = 1
				}
				if failed := stats.Failed.Load(); failed != wantFailed {
					t.Errorf("failed MRs from %v to %v: got %d, want %d", from, want, failed, wantFailed)
				}
			})
		}
	}
}

// TestFailedMRsHaveOneOutcome checks the sum of the outcomes and of the MRs that wait for one.
func TestFailedMRsHaveOneOutcome(t *testing.T) {
	for _, s := range States {
		var c Counters
		c.Failed.Store(10)
		c.Recovered.Store(1)
		c.Recycled.Store(2)
		c.Orphaned.Store(3)
		c.gauges[s].Store(4)
		failed := s != Invalid && s != Valid
		if err := c.checkFailed(); (err == nil) != failed {
			t.Errorf("4 MRs in state %v: got error %v", s, err)
		}
		c.Failed.Add(1)
		if err := c.checkFailed(); err == nil {
			t.Errorf("4 MRs in state %v and one more failed MR: got no error", s)
		}
	}
}

// TestCheckFindsBrokenInvariants breaks each invariant of a pool.
func TestCheckFindsBrokenInvariants(t *testing.T) {
	for _, c := range []struct {
		want string
		harm func(p *Pool, l *List, free, registered *MR)
	}{
		{"", func(*Pool, *List, *MR, *MR) {}},
		{"is on a list of another slot", func(_ *Pool, _ *List, free, _ *MR) { free.list = &List{} }},
		{"is on a list of another slot", func(p *Pool, _ *List, _, registered *MR) { delete(p.mrs.all, registered) }},
		{"is on two lists", func(_ *Pool, l *List, free, _ *MR) { l.free.mrs = append(l.free.mrs, free) }},
		{"is VALID, on the free list: true", func(_ *Pool, _ *List, free, _ *MR) { free.state.Store(uint32(Valid)) }},
		{"is INVALID, on the free list: false",
			func(_ *Pool, _ *List, _, registered *MR) { registered.state.Store(uint32(Invalid)) }},
		{"pool has 3 MRs, its lists have 2", func(_ *Pool, l *List, _, _ *MR) { l.registered = nil }},
		{"gauge of free MRs is 3", func(p *Pool, _ *List, _, _ *MR) { p.stats.free.Add(1) }},
		{"sum of gauges is 4", func(p *Pool, _ *List, _, _ *MR) { p.stats.gauges[Valid].Add(1) }},
		{"1 MRs failed", func(p *Pool, _ *List, _, _ *MR) { p.stats.Failed.Add(1) }},
	} {
		var stats Counters
		l, pool := threeMRs(t, &stats, Hooks{})
		if err := l.Unmap(); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Map([][]byte{pages(t, 1)}, true, 1); err != nil {
			t.Fatal(err)
		}
		c.harm(pool, l, l.free.mrs[0], l.registered[0])
		err := pool.Check()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("got %v, want an error with %q", err, c.want)
		}
	}
}
