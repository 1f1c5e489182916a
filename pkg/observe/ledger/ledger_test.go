package ledger

import (
	"math/rand/v2"
	"testing"
	"time"
)

// sum returns the sum of the phases, and fails t if one is negative.
func sum(t *testing.T, times *Times) (total time.Duration) {
	t.Helper()
	for p := range NumPhases {
		if d := times.Spent(p); d < 0 {
			t.Errorf("phase %v: got %v, want at least 0", p, d)
		} else {
			total += d
		}
	}
	return total
}

// TestPhasesSumToTotal makes random marks, also at earlier times, and adds random RPCs, also some
// that overlap.
func TestPhasesSumToTotal(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		var request Times
		now := Time(random.IntN(1000) + 1000)
		request.Begin(now)
		for range random.IntN(20) {
			now += Time(random.IntN(200) - 50)
			if random.IntN(2) == 0 {
				request.Mark(Phase(random.IntN(int(NumPhases))), now)
				continue
			}
			var rpc Times
			rpc.Begin(now - Time(random.IntN(20)))
			for range random.IntN(5) {
				now += Time(random.IntN(100) - 20)
				rpc.Mark(PhaseSlot+Phase(random.IntN(int(PhaseReturn-PhaseSlot))), now)
			}
			if got := sum(t, &rpc); got != rpc.Total() {
				t.Fatalf("sum of the phases of an RPC: got %d, want its total, %d", got, rpc.Total())
			}
			request.Add(&rpc)
		}
		request.Received(Time(random.IntN(3000)))
		if got := sum(t, &request); got != request.Total() {
			t.Fatalf("sum of the phases: got %d, want the total, %d", got, request.Total())
		}
	}
}

func TestRequestHasThePhasesOfItsRPCs(t *testing.T) {
	var request, rpc Times
	request.Begin(100)
	request.Received(90)
	for _, start := range []Time{110, 200} {
		rpc.Begin(start)
		rpc.Mark(PhaseCredit, start+5)
		rpc.Mark(PhaseServer, start+30)
		request.Add(&rpc)
	}
	request.Mark(PhaseLocal, 240)
	request.Mark(PhaseReply, 247)
	if request.Start() != 90 || rpc.Start() != 200 {
		t.Errorf("starts: got %d and %d, want 90 and 200", request.Start(), rpc.Start())
	}
	want := map[Phase]time.Duration{PhaseQueue: 10, PhaseCredit: 10, PhaseServer: 50, PhaseLocal: 10 + 60 + 10,
		PhaseReply: 7}
	for p := range NumPhases {
		if got := request.Spent(p); got != want[p] {
			t.Errorf("phase %v: got %d, want %d", p, got, want[p])
		}
	}
}

func TestEveryPhaseHasAName(t *testing.T) {
	seen := make(map[string]bool)
	for p := range NumPhases {
		if s := p.String(); s == "" || seen[s] {
			t.Errorf("name of phase %d: got %q, want another one", p, s)
		}
		seen[p.String()] = true
	}
}

// TestSlowestWantsTheCallsOfEachMinute checks that slow calls of one minute do not keep out those
// of the next one.
func TestSlowestWantsTheCallsOfEachMinute(t *testing.T) {
	var s Slowest[int]
	for range SlowCalls {
		s.Add(took(time.Hour, Time(time.Second)), 0)
	}
	if fast := took(time.Second, Time(2*time.Second)); s.Wants(fast) {
		t.Error("faster call of the same minute: Wants returned true, want false")
	}
	if fast := took(time.Second, Time(time.Minute)); !s.Wants(fast) {
		t.Error("call of the next minute: Wants returned false, want true")
	}
}

// took returns the times of a call that ended at end.
func took(d time.Duration, end Time) *Times {
	var t Times
	t.Begin(end - Time(d))
	t.Mark(PhaseServer, end)
	return &t
}

// TestSlowestKeepsTheSlowest compares with the sorted list of all calls.
func TestSlowestKeepsTheSlowest(t *testing.T) {
	type call struct {
		d   time.Duration
		end Time
	}
	random := rand.New(rand.NewPCG(3, 4))
	var s Slowest[call]
	var all []call
	now := Time(0)
	wanted := 0
	for i := range 40000 {
		now += Time(random.IntN(int(100 * time.Millisecond)))
		c := call{time.Duration(random.ExpFloat64() * float64(time.Millisecond)), now}
		if i%5000 == 0 {
			c.d *= 1000 // the list must forget it
		}
		all = append(all, c)
		if times := took(c.d, c.end); s.Wants(times) {
			wanted++
			s.Add(times, c)
		}
		if i%997 != 0 {
			continue
		}
		want := make([]call, 0, SlowCalls)
		for len(want) < SlowCalls {
			best := -1
			for k := len(all) - 1; k >= 0 && time.Duration(now-all[k].end) <= SlowWindow; k-- {
				slower := best < 0 || all[k].d > all[best].d
				if slower && (len(want) == 0 || all[k].d < want[len(want)-1].d) {
					best = k
				}
			}
			if best < 0 {
				break
			}
			want = append(want, all[best])
		}
		got := s.All(now)
		if len(got) != len(want) {
			t.Fatalf("after %d calls: got %d, want %d", i, len(got), len(want))
		}
		for k := range want {
			if got[k] != want[k] {
				t.Fatalf("after %d calls, call %d: got %v, want %v", i, k, got[k], want[k])
			}
		}
	}
	if wanted > len(all)/2 {
		t.Errorf("calls that Wants accepted: got %d of %d, want fewer than half", wanted, len(all))
	}
}

func TestSlowestForgetsOldCalls(t *testing.T) {
	var s Slowest[int]
	s.Add(took(time.Hour, Time(time.Minute)), 1)
	if got := s.All(Time(time.Minute + SlowWindow)); len(got) != 1 {
		t.Errorf("calls at the end of the window: got %d, want 1", len(got))
	}
	if got := s.All(Time(time.Minute+SlowWindow) + 1); len(got) != 0 {
		t.Errorf("calls after the window: got %d, want 0", len(got))
	}
	// A call of a span that was replaced is not added.
	s.Add(took(1, Time(time.Minute*time.Duration(spans+1))), 2)
	s.Add(took(time.Hour, Time(time.Minute)), 3)
	if got := s.All(Time(time.Minute * time.Duration(spans+1))); len(got) != 1 || got[0] != 2 {
		t.Errorf("calls after a late one: got %v, want only 2", got)
	}
}

func TestMarkDoesNotAllocate(t *testing.T) {
	var s Slowest[int]
	for range SlowCalls {
		s.Add(took(time.Hour, 1), 0)
	}
	var times Times
	if n := testing.AllocsPerRun(100, func() {
		times.Begin(Now())
		times.Mark(PhaseSlot, Now())
		if s.Wants(&times) {
			t.Error("Wants: got true for a fast call, want false")
		}
	}); n != 0 {
		t.Errorf("allocations: got %v, want 0", n)
	}
}

func TestWallIsTheTimeOfAt(t *testing.T) {
	now := time.Now()
	if got := At(now).Wall(); !got.Equal(now) {
		t.Errorf("wall clock: got %v, want %v", got, now)
	}
}
