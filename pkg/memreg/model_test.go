package memreg

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/nfsrdmad/nfsrdmad/pkg/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// minModelSteps is the smallest number of steps of TestModel.
const minModelSteps = 60_000

// A model is a pool on a simulated device. The device always has the list of keys that reach
// memory.
type model struct {
	params Params
	stats  Counters
	pd     *modelPD
	pool   *Pool
	qp     *modelQP
	slots  []*modelSlot
	mem    []byte
	xid    uint32

	failAlloc, failDereg int // number of calls that fail next
	limit                int // MRs of the device

	ring   *trace.Ring
	seen   uint64          // events of ring that were checked
	mapped map[uint32]bool // MRs with a map event and no unmap event
	moved  *int
}

// A modelPD records every MR that is allocated on it.
type modelPD struct {
	model *model
	index uint32
	mrs   map[uint32]*modelMR // by index
}

type modelMR struct {
	pd        *modelPD
	index     uint32
	key       verbs.RKey
	valid     bool
	destroyed bool
}

func (p *modelPD) AllocMR(int) (verbs.MR, error) {
	if p.model.failAlloc > 0 {
		p.model.failAlloc--
		return nil, syscall.ENOMEM
	}
	if len(p.mrs) >= p.model.limit {
		return nil, syscall.ENOMEM
	}
	p.index++
	m := &modelMR{pd: p, index: p.index, key: verbs.RKey(p.index << 8)}
	p.mrs[m.index] = m
	return m, nil
}
func (p *modelPD) RegMR([]byte) (verbs.MR, error) { return nil, verbs.ErrInvalid }
func (p *modelPD) Dealloc() error                 { return nil }
func (m *modelMR) LKey() uint32                   { return 0 }
func (m *modelMR) RKey() verbs.RKey               { return verbs.RKey(m.index << 8) }
func (m *modelMR) Dereg() error {
	if m.destroyed {
		panic("MR is deregistered twice")
	}
	if m.pd.model.failDereg > 0 {
		m.pd.model.failDereg--
		return syscall.EBUSY
	}
	m.valid, m.destroyed = false, true
	delete(m.pd.mrs, m.index)
	return nil
}

// validKeys returns the keys that reach memory.
func (p *modelPD) validKeys() map[verbs.RKey]bool {
	keys := map[verbs.RKey]bool{}
	for _, m := range p.mrs {
		if m.valid {
			keys[m.key] = true
		}
	}
	return keys
}

// A modelQP executes requests in order, one at each call of step.
type modelQP struct {
	model  *model
	queue  []verbs.WorkRequest
	ended  bool
	failAt int // position at which the next chain fails, -1 for none
}

func (q *modelQP) PostRecv(*verbs.RecvRequest) (*verbs.RecvRequest, error) { return nil, nil }
func (q *modelQP) Stats() verbs.QPStats                                    { return verbs.QPStats{} }

func (q *modelQP) PostSend(wr *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	failAt := q.failAt
	q.failAt = -1
	for n := 0; wr != nil; wr, n = wr.Next, n+1 {
		if q.ended || n == failAt {
			return wr, verbs.ErrQueueFull
		}
		q.queue = append(q.queue, *wr)
	}
	return nil, nil
}

// step executes or flushes the first request of the queue. It reports whether there was one.
func (q *modelQP) step() bool {
	if len(q.queue) == 0 {
		return false
	}
	wr := q.queue[0]
	q.queue = q.queue[1:]
	wc := verbs.WorkCompletion{QP: q, Opcode: wr.Opcode}
	if q.ended {
		wc.Status = verbs.StatusWRFlushErr
		wr.Done(&wc)
		return true
	}
	switch wr.Opcode {
	case verbs.OpFastReg:
		m := wr.MR.(*modelMR)
		if m.valid || m.destroyed {
			panic("FastReg of an MR that is registered or destroyed")
		}
		m.valid, m.key = true, m.RKey().WithKey(wr.NewKey)
	case verbs.OpLocalInv:
		q.invalidate(wr.InvalidateRKey)
	}
	if wr.Signaled {
		wr.Done(&wc)
	}
	return true
}

func (q *modelQP) invalidate(key verbs.RKey) {
	if m := q.model.pd.mrs[uint32(key)>>8]; m != nil && m.key == key {
		m.valid = false
	}
}

// Drain ends the QP and flushes its queue.
func (q *modelQP) Drain() {
	q.ended = true
	for q.step() {
	}
}

// A phase is the progress of the RPC of a slot.
type phase int

const (
	idle phase = iota
	sent
	fencing
	connectionEnded
)

type modelSlot struct {
	list  List
	phase phase
	keys  []verbs.RKey // of the current RPC
	send  verbs.WorkRequest
}

func newModel(seed uint64, moved *int) *model {
	r := &model{params: Params{Depth: 2, PageSize: 4096, MaxSegs: 4}, moved: moved}
	r.mem = make([]byte, 16*4096)
	rng := rand.New(rand.NewPCG(seed, 1))
	r.xid = rng.Uint32()
	r.limit = 4 + rng.IntN(30)
	r.ring, r.mapped = trace.NewRing(1024, nil), map[uint32]bool{}
	for range 5 {
		r.slots = append(r.slots, &modelSlot{})
	}
	r.connect()
	return r
}

func (r *model) connect() {
	if r.pool == nil {
		r.pd = &modelPD{model: r, mrs: map[uint32]*modelMR{}}
		r.pool = NewPool(r.pd, r.params, &r.stats, Hooks{Trace: r.ring})
	}
	r.qp = &modelQP{model: r, failAt: -1}
}

// disconnect does what the transport does when a connection ends.
func (r *model) disconnect(t *rapid.T) {
	r.qp.Drain()
	usable := r.pool.Recover()
	if usable {
		if n := len(r.pd.validKeys()); n != 0 {
			t.Fatalf("valid keys after recovery: got %d, want 0", n)
		}
	} else if r.stats.Orphaned.Load() == 0 {
		t.Fatal("pool is unusable without an orphaned MR")
	}
	r.check(t)
	if !usable {
		r.pool.Destroy()
		r.pool = nil
		if r.stats.Total() != 0 || r.stats.Free() != 0 {
			t.Fatalf("gauges after Destroy: got %d MRs, %d free; want 0, 0", r.stats.Total(), r.stats.Free())
		}
	}
	for _, s := range r.slots {
		s.phase, s.keys = idle, nil
	}
	r.connect()
}

// fenced checks that no key of the RPC reaches memory.
func (r *model) fenced(t *rapid.T, s *modelSlot) {
	valid := r.pd.validKeys()
	for _, k := range s.keys {
		if valid[k] {
			t.Fatalf("key %#x is valid in the fenced callback", k)
		}
	}
	s.list.Fenced()
	s.phase, s.keys = idle, nil
}

func (r *model) pick(t *rapid.T, p phase) *modelSlot {
	var slots []*modelSlot
	for _, s := range r.slots {
		if s.phase == p {
			slots = append(slots, s)
		}
	}
	if len(slots) == 0 {
		t.Skip("no slot in this phase: rapid draws another step")
	}
	return slots[rapid.IntRange(0, len(slots)-1).Draw(t, "slot")]
}

// call maps zero to two chunks of a slot and posts or unmaps them.
func (r *model) call(t *rapid.T) {
	s := r.pick(t, idle)
	s.list.Use(r.pool)
	r.xid++
	allocated, free := r.stats.Allocated.Load(), len(s.list.free.mrs)
	chunks := rapid.IntRange(0, 2).Draw(t, "chunks")
	for range chunks {
		n := rapid.IntRange(1, 10*4096).Draw(t, "bytes")
		before := len(s.list.Registered())
		added, err := s.list.Map([][]byte{r.mem[:n]}, rapid.Bool().Draw(t, "writing"), r.xid)
		if err != nil {
			if len(s.list.Registered()) != before || added != 0 {
				t.Fatalf("MRs of a failed Map: got %d registered, %d added; want %d, 0", len(s.list.Registered()),
					added, before)
			}
			pages := (offsetInPage(r.mem, 4096) + n + 4095) / 4096
			need := int64(min((pages+r.params.Depth-1)/r.params.Depth, r.params.MaxSegs))
			if errors.Is(err, syscall.ENOMEM) && r.stats.Free() >= need {
				t.Fatalf("Map of %d bytes: got %v, but %d MRs are free", n, err, r.stats.Free())
			}
			if !errors.Is(err, ErrTooManySegments) && !errors.Is(err, syscall.ENOMEM) {
				t.Fatal(err)
			}
			s.list.Unmap()
			return
		}
	}
	if len(s.list.Registered()) > free+int(r.stats.Allocated.Load()-allocated) {
		*r.moved++
	}
	if rapid.IntRange(0, 9).Draw(t, "unsent") == 0 {
		s.list.Unmap()
		return
	}
	valid := r.pd.validKeys()
	for _, m := range s.list.Registered() {
		key := verbs.RKey(m.Handle())
		if valid[key] {
			t.Fatalf("Map chose key %#x, which is valid", key)
		}
		s.keys = append(s.keys, key)
	}
	s.send = verbs.WorkRequest{Opcode: verbs.OpSend, Done: func(*verbs.WorkCompletion) {}}
	head, _ := s.list.Chain(&s.send)
	s.phase = sent
	if _, err := r.qp.PostSend(head); err != nil {
		r.disconnect(t)
	}
}

// reply fences the RPC of a slot as the reply handler does.
func (r *model) reply(t *rapid.T, s *modelSlot) {
	s.phase = fencing
	err := s.list.Invalidate(r.qp, func(ok bool) {
		if ok {
			r.fenced(t, s)
		}
	})
	if err != nil {
		if s.phase == fencing {
			s.phase = connectionEnded
		}
		r.disconnect(t)
	}
}

// replyWithInvalidation is a reply by Send With Invalidate.
func (r *model) replyWithInvalidation(t *rapid.T) {
	s := r.pick(t, sent)
	valid := r.pd.validKeys()
	for _, k := range s.keys {
		if valid[k] { // the device lets the peer invalidate only valid keys
			r.qp.invalidate(k)
			if s.list.RemoteInvalidated(k ^ 1) {
				t.Fatalf("RemoteInvalidated(%#x): got true for another key of the index", k^1)
			}
			if !s.list.RemoteInvalidated(k) {
				t.Fatalf("RemoteInvalidated(%#x): got false for a key of the RPC", k)
			}
			break
		}
	}
	if s.list.RemoteInvalidated(verbs.RKey(0xffffff00)) {
		t.Fatal("RemoteInvalidated: got true for an unknown key")
	}
	r.reply(t, s)
}

// failLocalInv executes the queue up to the first LOCAL_INV, which fails.
func (r *model) failLocalInv(t *rapid.T) {
	for i := range r.qp.queue {
		if r.qp.queue[i].Opcode != verbs.OpLocalInv {
			continue
		}
		for r.qp.queue[0].Opcode != verbs.OpLocalInv {
			r.qp.step()
		}
		wr := r.qp.queue[0]
		r.qp.queue = r.qp.queue[1:]
		wr.Done(&verbs.WorkCompletion{QP: r.qp, Status: verbs.StatusMWBindErr})
		r.disconnect(t)
		return
	}
	t.Skip("no LOCAL_INV is queued: rapid draws another step")
}

func (r *model) check(t *rapid.T) {
	if err := r.pool.Check(); err != nil {
		t.Fatal(err)
	}
	r.checkTrace(t)
}

// checkTrace checks that each map event has one unmap event (S24).
func (r *model) checkTrace(t *rapid.T) {
	events, next, lost := r.ring.Read(r.seen, nil)
	if lost != 0 {
		t.Fatalf("lost trace events: got %d, want 0", lost)
	}
	r.seen = next
	for _, e := range events {
		if e.Kind != trace.Map && e.Kind != trace.Unmap {
			continue
		}
		if r.mapped[e.MR] == (e.Kind == trace.Map) {
			t.Fatalf("event %v of MR %d after the same event", e.Kind, e.MR)
		}
		r.mapped[e.MR] = e.Kind == trace.Map
	}
	mapped := int64(0)
	for _, yes := range r.mapped {
		if yes {
			mapped++
		}
	}
	if used := r.stats.Total() - r.stats.Free(); mapped != used {
		t.Fatalf("MRs with a map event and no unmap event: got %d, want %d, those in use", mapped, used)
	}
}

// steps returns the random steps of the model. executed is called after each step that was not
// skipped.
func (r *model) steps(executed func(name string)) map[string]func(*rapid.T) {
	steps := map[string]func(*rapid.T){
		"call": r.call,
		"execute": func(t *rapid.T) {
			for range rapid.IntRange(1, 8).Draw(t, "n") {
				if !r.qp.step() {
					return
				}
			}
		},
		"reply":                   func(t *rapid.T) { r.reply(t, r.pick(t, sent)) },
		"reply with invalidation": r.replyWithInvalidation,
		"disconnect": func(t *rapid.T) {
			if rapid.IntRange(0, 3).Draw(t, "rare") == 0 {
				r.disconnect(t)
			}
		},
		"fail a LOCAL_INV":   r.failLocalInv,
		"fail a chain":       func(t *rapid.T) { r.qp.failAt = rapid.IntRange(0, 3).Draw(t, "position") },
		"fail an allocation": func(t *rapid.T) { r.failAlloc = rapid.IntRange(0, 2).Draw(t, "times") },
		"fail a deregistration": func(t *rapid.T) {
			r.failDereg = rapid.IntRange(0, 3).Draw(t, "times") * rapid.IntRange(0, 1).Draw(t, "rare")
		},
	}
	for name, f := range steps {
		steps[name] = func(t *rapid.T) { f(t); executed(name) }
	}
	steps[""] = r.check
	return steps
}

// TestModel runs random sequences of what a transport does with its MRs, with every fault that a
// device has. No MR may be lost or used twice, no RPC may end with a valid key, and the counters
// must agree.
func TestModel(t *testing.T) {
	steps := map[string]int{} // executed steps by name
	moved := 0                // calls that took MRs of other slots
	seed := rand.Uint64()
	if s := flag.Lookup("rapid.seed").Value.String(); s != "0" {
		fmt.Sscan(s, &seed)
	}
	for name, value := range map[string]string{"rapid.seed": fmt.Sprint(seed), "rapid.checks": "250",
		"rapid.steps": "500", "rapid.nofailfile": "true"} {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("repeat with -rapid.seed=%d", seed)
	rapid.Check(t, func(t *rapid.T) {
		r := newModel(rapid.Uint64().Draw(t, "xid"), &moved)
		t.Repeat(r.steps(func(name string) { steps[name]++ }))
		r.failAlloc, r.failDereg = 0, 0
		r.disconnect(t)
		r.pool.Destroy()
		r.checkTrace(t)
		if r.stats.Total() != 0 || r.stats.Free() != 0 {
			t.Fatalf("gauges after the last Destroy: got %d MRs, %d free; want 0, 0", r.stats.Total(), r.stats.Free())
		}
		if err := r.stats.checkFailed(); err != nil {
			t.Fatal(err)
		}
	})
	total := 0
	for name := range newModel(0, nil).steps(nil) {
		if steps[name] == 0 && name != "" && !t.Failed() {
			t.Errorf("step %q: was never executed", name)
		}
		total += steps[name]
	}
	t.Logf("steps: %d: %v; %d calls took MRs of other slots", total, steps, moved)
	if moved == 0 && !t.Failed() {
		t.Error("calls that took MRs of other slots: got 0, want some")
	}
	want := minModelSteps
	if testing.Short() { // rapid runs a fifth of the checks
		want /= 10
	}
	if total < want && !t.Failed() {
		t.Errorf("steps: got %d, want at least %d", total, want)
	}
}
