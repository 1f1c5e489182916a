package memreg

import (
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/trace"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestModel runs modelRuns sequences, each of modelSteps steps.
const modelRuns, modelSteps = 250, 250

// A model is a pool on a simulated device. The device always has the list of keys that reach
// memory.
type model struct {
	rng    *rand.Rand
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
	r.rng = rand.New(rand.NewPCG(seed, 1))
	r.xid = r.rng.Uint32()
	r.limit = 4 + r.rng.IntN(30)
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
func (r *model) disconnect(t *testing.T) {
	r.qp.Drain()
	usable := r.pool.Recover()
	if usable {
		if n := len(r.pd.validKeys()); n != 0 {
			t.Fatalf("valid keys after recovery: got %d, want 0", n)
		}
	} else if r.stats.MRsOrphaned.Load() == 0 {
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
func (r *model) fenced(t *testing.T, s *modelSlot) {
	valid := r.pd.validKeys()
	for _, k := range s.keys {
		if valid[k] {
			t.Fatalf("key %#x is valid in the fenced callback", k)
		}
	}
	s.list.Fenced()
	s.phase, s.keys = idle, nil
}

// pick returns a slot in phase p, or nil if there is none.
func (r *model) pick(p phase) *modelSlot {
	var slots []*modelSlot
	for _, s := range r.slots {
		if s.phase == p {
			slots = append(slots, s)
		}
	}
	if len(slots) == 0 {
		return nil
	}
	return slots[r.rng.IntN(len(slots))]
}

// call maps zero to two chunks of an idle slot and posts or unmaps them.
func (r *model) call(t *testing.T, s *modelSlot) {
	s.list.Use(r.pool)
	r.xid++
	allocated, free := r.stats.MRsAllocated.Load(), len(s.list.free.mrs)
	chunks := r.rng.IntN(3)
	for range chunks {
		n := 1 + r.rng.IntN(10*4096)
		before := len(s.list.Registered())
		added, err := s.list.Map([][]byte{r.mem[:n]}, r.rng.IntN(2) == 0, r.xid)
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
	if len(s.list.Registered()) > free+int(r.stats.MRsAllocated.Load()-allocated) {
		*r.moved++
	}
	if r.rng.IntN(10) == 0 {
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
func (r *model) reply(t *testing.T, s *modelSlot) {
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
func (r *model) replyWithInvalidation(t *testing.T, s *modelSlot) {
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

// failLocalInv executes the queue up to the first LOCAL_INV, which fails. It reports whether there
// was one.
func (r *model) failLocalInv(t *testing.T) bool {
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
		return true
	}
	return false
}

func (r *model) check(t *testing.T) {
	if err := r.pool.Check(); err != nil {
		t.Fatal(err)
	}
	r.checkTrace(t)
}

// checkTrace checks that each map event has one unmap event (S24).
func (r *model) checkTrace(t *testing.T) {
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

// steps are the random steps of the model. Each reports whether it was possible.
var steps = []struct {
	name string
	run  func(*model, *testing.T) bool
}{
	{"call", onSlot(idle, (*model).call)},
	{"execute", func(r *model, _ *testing.T) bool {
		executed := false
		for range 1 + r.rng.IntN(8) {
			executed = r.qp.step() || executed
		}
		return executed
	}},
	{"reply", onSlot(sent, (*model).reply)},
	{"reply with invalidation", onSlot(sent, (*model).replyWithInvalidation)},
	{"disconnect", func(r *model, t *testing.T) bool {
		rare := r.rng.IntN(4) == 0
		if rare {
			r.disconnect(t)
		}
		return rare
	}},
	{"fail a LOCAL_INV", (*model).failLocalInv},
	{"fail a chain", func(r *model, _ *testing.T) bool {
		r.qp.failAt = r.rng.IntN(4)
		return true
	}},
	{"fail an allocation", func(r *model, _ *testing.T) bool {
		r.failAlloc = r.rng.IntN(3)
		return true
	}},
	{"fail a deregistration", func(r *model, _ *testing.T) bool {
		r.failDereg = r.rng.IntN(4) * r.rng.IntN(2)
		return true
	}},
}

// onSlot returns a step that runs f on a slot in phase p.
func onSlot(p phase, f func(*model, *testing.T, *modelSlot)) func(*model, *testing.T) bool {
	return func(r *model, t *testing.T) bool {
		s := r.pick(p)
		if s != nil {
			f(r, t, s)
		}
		return s != nil
	}
}

// TestModel runs random sequences of what a transport does with its MRs, with every fault that a
// device has. No MR may be lost or used twice, no RPC may end with a valid key, and the counters
// must agree. The sequences are the same in each run of the test.
func TestModel(t *testing.T) {
	executed := make([]int, len(steps))
	moved := 0 // calls that took MRs of other slots
	for seed := range uint64(modelRuns) {
		t.Run("", func(t *testing.T) {
			r := newModel(seed, &moved)
			for n := 0; n < modelSteps; {
				i := r.rng.IntN(len(steps))
				if !steps[i].run(r, t) {
					continue
				}
				n++
				executed[i]++
				r.check(t)
			}
			r.failAlloc, r.failDereg = 0, 0
			r.disconnect(t)
			r.pool.Destroy()
			r.checkTrace(t)
			if r.stats.Total() != 0 || r.stats.Free() != 0 {
				t.Fatalf("gauges after the last Destroy: got %d MRs, %d free; want 0, 0", r.stats.Total(),
					r.stats.Free())
			}
			if err := r.stats.checkFailed(); err != nil {
				t.Fatal(err)
			}
		})
	}
	for i, s := range steps {
		t.Logf("%s: %d steps", s.name, executed[i])
		if executed[i] == 0 && !t.Failed() {
			t.Errorf("step %q: was never executed", s.name)
		}
	}
	if moved == 0 && !t.Failed() {
		t.Error("calls that took MRs of other slots: got 0, want some")
	}
}
