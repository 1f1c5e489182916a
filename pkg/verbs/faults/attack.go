package faults

import (
	"bytes"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Limits and sizes of attacks.
const (
	maxAttacks  = 8    // attacks in flight per attacker
	attackBytes = 4096 // maximum bytes per attack
	wildSize    = 8    // bytes of a wild Write
	// distance in bytes of a wild Write from the memory; no registration is larger
	wildDistance = 1 << 30
	maxTargets   = 64   // remembered RDMA Reads
	wildByte     = 0xdb // data of a wild Write
)

// A Target is memory that the peer permits this side to access.
type Target struct {
	RKey verbs.RKey
	Addr uint64
}

// An Attack is a request on a target that the peer does not permit. An attack that changes neither
// the key nor the address is one after the end of the permission, or with another right.
type Attack struct {
	Opcode verbs.Opcode // OpRDMAWrite, OpRDMARead or OpSendWithInv
	Key    int8         // added to the key of the RKey
	Index  int32        // added to the index of the RKey
	Offset int64        // added to the address
}

// request returns the request of a on t with local memory.
func (a Attack) request(t Target, local verbs.SGE) verbs.WorkRequest {
	key := t.RKey.WithKey(t.RKey.Key()+uint8(a.Key)) + verbs.RKey(a.Index<<8)
	wr := verbs.WorkRequest{Opcode: a.Opcode, Signaled: true, SGList: []verbs.SGE{local}}
	if a.Opcode == verbs.OpSendWithInv {
		wr.InvalidateRKey = key
		return wr
	}
	wr.RKey, wr.RemoteAddr = key, t.Addr+uint64(a.Offset)
	return wr
}

// An Attacker posts attacks from its own memory.
type Attacker struct {
	mr   verbs.MR
	mem  []byte
	free chan []byte // pieces of mem that are not in use
	once sync.Once
}

// NewAttacker registers the memory of an attacker in pd.
func NewAttacker(pd verbs.PD) (*Attacker, error) {
	a := &Attacker{free: make(chan []byte, maxAttacks)}
	var err error
	if a.mem, err = membuf.Alloc(maxAttacks * attackBytes); err != nil {
		return nil, err
	}
	if a.mr, err = pd.RegMR(a.mem); err != nil {
		membuf.Free(a.mem)
		return nil, err
	}
	for i := range maxAttacks {
		a.free <- a.mem[i*attackBytes : (i+1)*attackBytes : (i+1)*attackBytes]
	}
	return a, nil
}

// Close frees the memory. All attacks must have completed.
func (a *Attacker) Close() (err error) {
	a.once.Do(func() {
		if err = a.mr.Dereg(); err == nil {
			membuf.Free(a.mem)
		}
	})
	return err
}

// A Prepared attack has its request and its memory, but is not posted yet. Post or Drop it.
type Prepared struct {
	a   *Attacker
	buf []byte
	wr  verbs.WorkRequest
}

// Prepare prepares an attack. The attack sends a copy of data, or reads as many bytes; Prepare uses
// the first 4096 bytes. It returns nil when too many attacks are in flight.
func (a *Attacker) Prepare(at Attack, t Target, data []byte) *Prepared {
	select {
	case buf := <-a.free:
		n := copy(buf, data)
		return &Prepared{a: a, buf: buf, wr: at.request(t, verbs.SGE{Buf: buf[:n], LKey: a.mr.LKey()})}
	default:
		return nil
	}
}

// Drop cancels the attack.
func (p *Prepared) Drop() { p.a.free <- p.buf }

// Post posts the attack on qp. When the attack has completed, done gets its status, and its memory
// until done returns. After an error, done is not called.
func (p *Prepared) Post(qp verbs.QP, done func(st verbs.Status, mem []byte)) error {
	p.wr.Done = func(wc *verbs.WorkCompletion) {
		done(wc.Status, p.wr.SGList[0].Buf)
		p.Drop()
	}
	if _, err := qp.PostSend(&p.wr); err != nil {
		p.Drop()
		return err
	}
	return nil
}

// An attackInjector attacks after the Sends of one queue pair. A late Write carries the data of the
// Write that it repeats. A late Write does harm only if it reaches memory that has a new owner.
type attackInjector struct {
	*Attacker
	q     *queuePair
	reads []readTarget // RDMA Reads not yet repeated, oldest first; guarded by the queue pair's mu
}

// A readTarget is the target of an RDMA Read of n bytes.
type readTarget struct {
	Target
	n int
}

// An injectedAttack is an attack of a fault.
type injectedAttack struct {
	*Prepared
	kind  kind
	event uint64
}

// plan returns the attacks for a chain. Call it before the post: afterwards the chain's memory may
// have a new owner. The caller holds the queue pair's mu.
func (a *attackInjector) plan(chain []*verbs.WorkRequest) (list []injectedAttack) {
	var writes []*verbs.WorkRequest // since the last Send
	for _, wr := range chain {
		switch wr.Opcode {
		case verbs.OpRDMAWrite:
			if length(wr) > 0 {
				writes = append(writes, wr)
			}
		case verbs.OpRDMARead:
			if n := length(wr); n > 0 {
				a.remember(readTarget{Target{wr.RKey, wr.RemoteAddr}, n})
			}
		case verbs.OpSend, verbs.OpSendWithInv:
			if len(writes) > 0 {
				list = a.afterWrites(list, writes)
			}
			list = a.afterReads(list)
			writes = nil
		}
	}
	return list
}

// launch posts the attacks of a posted chain, at once or after the delay of their kind.
func (a *attackInjector) launch(list []injectedAttack) {
	for i := range list {
		at := &list[i]
		d := a.q.p.plan.rules[at.kind].delay
		if d == 0 {
			a.post(at)
			continue
		}
		a.q.delayed.after(d, func(draining bool) {
			if draining { // the queue pair is draining
				at.Drop()
				return
			}
			a.post(at)
		})
	}
}

func length(wr *verbs.WorkRequest) (n int) {
	for i := range wr.SGList {
		n += len(wr.SGList[i].Buf)
	}
	return n
}

func (a *attackInjector) remember(t readTarget) {
	if len(a.reads) == maxTargets {
		a.reads = append(a.reads[:0], a.reads[1:]...)
	}
	a.reads = append(a.reads, t)
}

// afterReads repeats the oldest remembered RDMA Read. With several calls in flight, the oldest call
// is the likeliest to have ended.
func (a *attackInjector) afterReads(list []injectedAttack) []injectedAttack {
	if !a.q.p.plan.rules[lateRead].on || len(a.reads) == 0 {
		return list
	}
	t := a.reads[0]
	a.reads = append(a.reads[:0], a.reads[1:]...)
	return a.draw(list, lateRead, func(uint64) *Prepared {
		return a.Prepare(Attack{Opcode: verbs.OpRDMARead}, t.Target, make([]byte, min(t.n, attackBytes)))
	})
}

// afterWrites attacks the memory of the last Write.
func (a *attackInjector) afterWrites(list []injectedAttack, writes []*verbs.WorkRequest) []injectedAttack {
	last := writes[len(writes)-1]
	t := Target{last.RKey, last.RemoteAddr}
	list = a.draw(list, lateWrite, func(uint64) *Prepared {
		var data []byte
		for i := range last.SGList {
			b := last.SGList[i].Buf
			data = append(data, b[:min(len(b), attackBytes-len(data))]...)
		}
		return a.Prepare(Attack{Opcode: verbs.OpRDMAWrite}, t, data)
	})
	wild := bytes.Repeat([]byte{wildByte}, wildSize)
	list = a.draw(list, staleKey, func(uint64) *Prepared {
		return a.Prepare(Attack{Opcode: verbs.OpRDMAWrite, Key: -1}, t, wild)
	})
	return a.draw(list, wildWrite, func(event uint64) *Prepared {
		return a.Prepare(Attack{Opcode: verbs.OpRDMAWrite, Offset: wildOffset(a.q.p.plan, event, writes)}, t, wild)
	})
}

// draw counts an event of kind k. If the fault fires, draw appends the attack that prepare returns.
func (a *attackInjector) draw(list []injectedAttack, k kind, prepare func(event uint64) *Prepared) []injectedAttack {
	event, fires := a.q.p.event(k)
	if !fires {
		return list
	}
	if p := prepare(event); p != nil {
		list = append(list, injectedAttack{p, k, event})
	}
	return list
}

// wildOffset returns the distance from the last Write to an address far after it, or to one byte
// before the memory of its key. wildOffset computes the start of the memory from the Writes of this
// chain.
func wildOffset(plan *Plan, event uint64, writes []*verbs.WorkRequest) int64 {
	if plan.choose(wildWrite, event, saltVariant, 2) == 0 {
		return wildDistance
	}
	last := writes[len(writes)-1]
	start := last.RemoteAddr
	for _, wr := range writes {
		if wr.RKey == last.RKey {
			start = min(start, wr.RemoteAddr)
		}
	}
	return int64(start - 1 - last.RemoteAddr)
}

// post posts an attack that the consumer does not see. The completion of the attack frees its queue
// entry.
func (a *attackInjector) post(at *injectedAttack) {
	q := a.q
	if at.Post(q.inner, func(verbs.Status, []byte) { q.adjust.sendComps.Add(-1) }) != nil {
		return // the connection has ended
	}
	q.adjust.chains.Add(-1)
	q.adjust.sendWRs.Add(-1)
	q.p.count(at.kind, at.event)
}
