package memreg

import (
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
				if failed := stats.MRsFailed.Load(); failed != wantFailed {
					t.Errorf("failed MRs from %v to %v: got %d, want %d", from, want, failed, wantFailed)
				}
			})
		}
	}
}
