package memreg

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// modelSteps is how many steps TestModel takes at least.
const modelSteps = 100_000

// A rig is the pool under test on a device whose truth is known: which key reaches memory, at every
// moment.
type rig struct {
	params Params
	stats  Counters
	pd     *truePD
	pool   *Pool
	qp     *trueQP
	slots  []*modelSlot
	mem    []byte
	xid    uint32

	failAlloc, failDereg int // calls to fail
}

// truePD knows every MR that was allocated on it.
type truePD struct {
	rig   *rig
	index uint32
	mrs   map[uint32]*trueMR // by index
}

type trueMR struct {
	pd    *truePD
	index uint32
	key   verbs.RKey
	valid bool
	dead  bool
}

func (p *truePD) AllocMR(int) (verbs.MR, error) {
	if p.rig.failAlloc > 0 {
		p.rig.failAlloc--
		return nil, syscall.ENOMEM
	}
	p.index++
	m := &trueMR{pd: p, index: p.index, key: verbs.RKey(p.index << 8)}
	p.mrs[m.index] = m
	return m, nil
}
func (p *truePD) RegMR([]byte) (verbs.MR, error) { return nil, verbs.ErrInvalid }
func (p *truePD) Dealloc() error                 { return nil }
func (m *trueMR) LKey() uint32                   { return 0 }
func (m *trueMR) RKey() verbs.RKey               { return verbs.RKey(m.index << 8) }
func (m *trueMR) Dereg() error {
	if m.dead {
		panic("an MR is deregistered twice")
	}
	if m.pd.rig.failDereg > 0 {
		m.pd.rig.failDereg--
		return syscall.EBUSY
	}
	m.valid, m.dead = false, true
	delete(m.pd.mrs, m.index)
	return nil
}

// valid are the keys that reach memory.
func (p *truePD) valid() map[verbs.RKey]bool {
	keys := map[verbs.RKey]bool{}
	for _, m := range p.mrs {
		if m.valid {
			keys[m.key] = true
		}
	}
	return keys
}

// trueQP executes requests in order, when it is told to.
type trueQP struct {
	rig   *rig
	queue []verbs.WorkRequest
	dead  bool
	chop  int // position at which the next chain fails, -1 for none
}

func (q *trueQP) PostRecv(*verbs.RecvRequest) (*verbs.RecvRequest, error) { return nil, nil }
func (q *trueQP) Stats() verbs.QPStats                                    { return verbs.QPStats{} }

func (q *trueQP) PostSend(wr *verbs.WorkRequest) (*verbs.WorkRequest, error) {
	chop := q.chop
	q.chop = -1
	for n := 0; wr != nil; wr, n = wr.Next, n+1 {
		if q.dead || n == chop {
			return wr, verbs.ErrQueueFull
		}
		q.queue = append(q.queue, *wr)
	}
	return nil, nil
}

// step executes, or flushes, the request at the head.
func (q *trueQP) step() bool {
	if len(q.queue) == 0 {
		return false
	}
	wr := q.queue[0]
	q.queue = q.queue[1:]
	wc := verbs.WorkCompletion{QP: q, Opcode: wr.Opcode}
	if q.dead {
		wc.Status = verbs.StatusWRFlushErr
		wr.Done(&wc)
		return true
	}
	switch wr.Opcode {
	case verbs.OpFastReg:
		m := wr.MR.(*trueMR)
		if m.valid || m.dead {
			panic("an MR is registered that is registered, or destroyed")
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

func (q *trueQP) invalidate(key verbs.RKey) {
	if m := q.rig.pd.mrs[uint32(key)>>8]; m != nil && m.key == key {
		m.valid = false
	}
}

// Drain ends the QP and flushes what it has.
func (q *trueQP) Drain() {
	q.dead = true
	for q.step() {
	}
}

// What a model slot does.
type phase int

const (
	idle phase = iota
	sent
	fencing
	ended // by a connection that died
)

type modelSlot struct {
	list  List
	phase phase
	keys  []verbs.RKey // of the RPC at hand
	send  verbs.WorkRequest
}

func newRig(seed uint64) *rig {
	r := &rig{params: Params{Depth: 2, PageSize: 4096, MaxSegs: 4}}
	r.mem = make([]byte, 16*4096)
	rng := rand.New(rand.NewPCG(seed, 1))
	r.xid = rng.Uint32()
	for range 5 {
		r.slots = append(r.slots, &modelSlot{})
	}
	r.connect()
	return r
}

func (r *rig) connect() {
	if r.pool == nil {
		r.pd = &truePD{rig: r, mrs: map[uint32]*trueMR{}}
		r.pool = NewPool(r.pd, r.params, &r.stats, Hooks{})
	}
	r.qp = &trueQP{rig: r, chop: -1}
}

// disconnect is what the transport does when a connection ends.
func (r *rig) disconnect(t *rapid.T) {
	r.qp.Drain()
	usable := r.pool.Recover()
	if usable {
		if n := len(r.pd.valid()); n != 0 {
			t.Fatalf("%d keys are alive after recovery", n)
		}
	} else if r.stats.Orphaned.Load() == 0 {
		t.Fatalf("the pool is tainted, nothing is orphaned")
	}
	if err := r.pool.Check(); err != nil {
		t.Fatal(err)
	}
	if !usable {
		r.pool.Destroy()
		r.pool = nil
		if r.stats.Total() != 0 || r.stats.Free() != 0 {
			t.Fatalf("gauges after the pool: %d, free %d", r.stats.Total(), r.stats.Free())
		}
	}
	for _, s := range r.slots {
		s.phase, s.keys = idle, nil
	}
	r.connect()
}

// fenced checks the promise: when it is called no key of the RPC reaches memory.
func (r *rig) fenced(t *rapid.T, s *modelSlot) {
	alive := r.pd.valid()
	for _, k := range s.keys {
		if alive[k] {
			t.Fatalf("fenced with key %#x alive", k)
		}
	}
	s.list.Fenced()
	s.phase, s.keys = idle, nil
}

func (r *rig) pick(t *rapid.T, p phase) *modelSlot {
	var of []*modelSlot
	for _, s := range r.slots {
		if s.phase == p {
			of = append(of, s)
		}
	}
	if len(of) == 0 {
		t.Skip("no slot is in this phase: another step is drawn")
	}
	return of[rapid.IntRange(0, len(of)-1).Draw(t, "slot")]
}

// reply fences a slot's RPC as the reply handler does.
func (r *rig) reply(t *rapid.T, s *modelSlot) {
	s.phase = fencing
	err := s.list.Invalidate(r.qp, func(ok bool) {
		if ok {
			r.fenced(t, s)
		}
	})
	if err != nil {
		if s.phase == fencing {
			s.phase = ended
		}
		r.disconnect(t)
	}
}

// TestModel runs random sequences of what a transport does with its MRs, on a device that knows
// which keys are alive, with every fault that a device has: no MR is lost or used twice, no RPC
// ends with a key alive, and the counters add up.
func TestModel(t *testing.T) {
	steps := 0
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
		r := newRig(rapid.Uint64().Draw(t, "xid"))
		count := func(f func(*rapid.T)) func(*rapid.T) {
			return func(t *rapid.T) { steps++; f(t) }
		}
		t.Repeat(map[string]func(*rapid.T){
			"call": count(func(t *rapid.T) {
				s := r.pick(t, idle)
				s.list.Use(r.pool)
				r.xid++
				chunks := rapid.IntRange(0, 2).Draw(t, "chunks")
				for range chunks {
					n := rapid.IntRange(1, 10*4096).Draw(t, "octets")
					before := len(s.list.Registered())
					took, err := s.list.Map([][]byte{r.mem[:n]}, rapid.Bool().Draw(t, "writing"), r.xid)
					if err != nil {
						if len(s.list.Registered()) != before || took != 0 {
							t.Fatalf("a failed Map left MRs")
						}
						if !errors.Is(err, ErrTooManySegments) && !errors.Is(err, syscall.ENOMEM) {
							t.Fatal(err)
						}
						s.list.Unmap()
						return
					}
				}
				if rapid.IntRange(0, 9).Draw(t, "unsent") == 0 {
					s.list.Unmap()
					return
				}
				alive := r.pd.valid()
				for _, m := range s.list.Registered() {
					key := verbs.RKey(m.Handle())
					if alive[key] {
						t.Fatalf("key %#x is given out while it is alive", key)
					}
					s.keys = append(s.keys, key)
				}
				s.send = verbs.WorkRequest{Opcode: verbs.OpSend, Done: func(*verbs.WorkCompletion) {}}
				head, _ := s.list.Chain(&s.send)
				s.phase = sent
				if _, err := r.qp.PostSend(head); err != nil {
					r.disconnect(t)
				}
			}),
			"execute": count(func(t *rapid.T) {
				for range rapid.IntRange(1, 8).Draw(t, "n") {
					if !r.qp.step() {
						return
					}
				}
			}),
			"reply": count(func(t *rapid.T) { r.reply(t, r.pick(t, sent)) }),
			"reply with invalidation": count(func(t *rapid.T) {
				s := r.pick(t, sent)
				alive := r.pd.valid()
				for _, k := range s.keys {
					if alive[k] { // the device lets the peer invalidate live keys only
						r.qp.invalidate(k)
						if !s.list.RemoteInvalidated(k) {
							t.Fatalf("key %#x of the RPC is not known", k)
						}
						break
					}
				}
				if s.list.RemoteInvalidated(verbs.RKey(0xffffff00)) {
					t.Fatal("a foreign key is known")
				}
				r.reply(t, s)
			}),
			"disconnect": count(func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "rare") == 0 {
					r.disconnect(t)
				}
			}),
			"fail a LOCAL_INV": count(func(t *rapid.T) {
				for i := range r.qp.queue {
					if wr := &r.qp.queue[i]; wr.Opcode == verbs.OpLocalInv {
						for r.qp.queue[0].Opcode != verbs.OpLocalInv {
							r.qp.step()
						}
						wr := r.qp.queue[0]
						r.qp.queue = r.qp.queue[1:]
						wr.Done(&verbs.WorkCompletion{QP: r.qp, Status: verbs.StatusMWBindErr})
						r.disconnect(t)
						return
					}
				}
				t.Skip("no LOCAL_INV is queued: another step is drawn")
			}),
			"chop a chain":       count(func(t *rapid.T) { r.qp.chop = rapid.IntRange(0, 3).Draw(t, "position") }),
			"fail an allocation": count(func(t *rapid.T) { r.failAlloc = rapid.IntRange(0, 2).Draw(t, "times") }),
			"fail a deregistration": count(func(t *rapid.T) {
				r.failDereg = rapid.IntRange(0, 3).Draw(t, "times") * rapid.IntRange(0, 1).Draw(t, "rare")
			}),
			"": func(t *rapid.T) {
				if err := r.pool.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
		r.failAlloc, r.failDereg = 0, 0
		r.disconnect(t)
		r.pool.Destroy()
		c := &r.stats
		if c.Total() != 0 || c.Free() != 0 || c.Failed.Load() != c.Recovered.Load()+c.Recycled.Load()+
			c.Orphaned.Load() {
			t.Fatalf("in the end %d MRs, %d free; %d hurt = %d recovered + %d recycled + %d orphaned", c.Total(),
				c.Free(), c.Failed.Load(), c.Recovered.Load(), c.Recycled.Load(), c.Orphaned.Load())
		}
	})
	t.Logf("%d steps", steps)
	if steps < modelSteps && !t.Failed() {
		t.Errorf("only %d steps, want %d", steps, modelSteps)
	}
}
