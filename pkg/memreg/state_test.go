package memreg

import "testing"

// TestTransitions walks every cell of the table through the code that keeps the gauges (S12).
func TestTransitions(t *testing.T) {
	legal := map[State]map[event]State{
		Invalid: {evMap: Valid, evDestroy: gone},
		Valid: {evUnsent: Invalid, evInvalidated: Invalid, evRemoteInv: Invalid, evFlushFR: FlushedFR,
			evFlushLI: FlushedLI, evFailLI: Condemned, evTake: Recovering, evDestroy: gone},
		FlushedFR: {evFlushFR: FlushedFR, evFlushLI: FlushedLI, evFailLI: Condemned, evTake: Recovering,
			evDestroy: gone},
		FlushedLI:  {evFlushLI: FlushedLI, evFailLI: Condemned, evTake: Recovering, evDestroy: gone},
		Condemned:  {evFlushFR: Condemned, evFlushLI: Condemned, evFailLI: Condemned, evDestroy: gone},
		Recovering: {evRecovered: Invalid, evDestroy: gone},
	}
	for _, from := range States {
		for e := event(0); e < numEvents; e++ {
			t.Run(from.String()+" "+e.String(), func(t *testing.T) {
				var stats Counters
				m := &MR{pool: NewPool(nil, Params{}, &stats, Hooks{})}
				m.state.Store(uint32(from))
				stats.gauges[from].Store(1)
				want, ok := legal[from][e]
				broke := func() (broke bool) {
					defer func() { broke = recover() != nil }()
					m.move(e)
					return
				}()
				if broke == ok {
					t.Fatalf("stopped: %v, legal: %v", broke, ok)
				}
				if !ok {
					want = from
				}
				if m.State() != want {
					t.Errorf("state %v, want %v", m.State(), want)
				}
				total := int64(1)
				if want == gone {
					total = 0
				} else if stats.InState(want) != 1 {
					t.Errorf("gauge of %v is %d", want, stats.InState(want))
				}
				if stats.Total() != total {
					t.Errorf("gauges add up to %d, want %d", stats.Total(), total)
				}
				if hurt := stats.Failed.Load(); (hurt == 1) != (want.hurts() && !from.hurts()) {
					t.Errorf("hurt is counted %d times from %v to %v", hurt, from, want)
				}
			})
		}
	}
}
