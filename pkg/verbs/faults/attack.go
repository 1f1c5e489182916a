package faults

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Limits and sizes of attacks.
const (
	maxAttacks  = 8    // attacks in flight per queue pair
	attackBytes = 4096 // maximum bytes per attack
	wildSize    = 8    // bytes of a wild Write
	// distance in bytes of a wild Write from the memory; no registration is larger
	wildDistance = 1 << 30
	maxTargets   = 64   // remembered RDMA Reads
	wildByte     = 0xdb // data of a wild Write
)

// A target is a range of the peer's memory.
type target struct {
	rkey verbs.RKey
	addr uint64
	n    int
}

// An attacker posts forbidden requests after the Sends of one queue pair. A late Write carries the
// data of the Write that it repeats. A late Write does harm only if it reaches memory that has a
// new owner.
type attacker struct {
	q    *queuePair
	mr   verbs.MR
	mem  []byte
	free chan []byte // pieces of mem that are not in use

	reads []target // RDMA Reads not yet repeated, oldest first; guarded by the queue pair's mu
	once  sync.Once
}

// An attack is a request that has its memory but is not posted yet.
type attack struct {
	kind  kind
	event uint64
	buf   []byte
	wr    verbs.WorkRequest
}

func newAttacker(q *queuePair, pd verbs.PD) (*attacker, error) {
	a := &attacker{q: q, free: make(chan []byte, maxAttacks)}
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

func (a *attacker) release() {
	a.once.Do(func() {
		if err := a.mr.Dereg(); err != nil {
			a.q.p.log.Error("deregister memory of fault injector", "error", err)
			return
		}
		membuf.Free(a.mem)
	})
}

// plan returns the attacks for a chain. Call it before the post: afterwards the chain's memory may
// have a new owner. The caller holds the queue pair's mu.
func (a *attacker) plan(chain []*verbs.WorkRequest) (list []attack) {
	var writes []*verbs.WorkRequest // since the last Send
	for _, wr := range chain {
		switch wr.Opcode {
		case verbs.OpRDMAWrite:
			if length(wr) > 0 {
				writes = append(writes, wr)
			}
		case verbs.OpRDMARead:
			if n := length(wr); n > 0 {
				a.remember(target{wr.RKey, wr.RemoteAddr, n})
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
func (a *attacker) launch(list []attack) {
	for i := range list {
		at := &list[i]
		d := a.q.p.plan.rules[at.kind].delay
		if d == 0 {
			a.post(at)
			continue
		}
		a.q.delayed.after(d, func(draining bool) {
			if draining { // the queue pair is draining
				a.free <- at.buf
				return
			}
			a.post(at)
		})
	}
}

// drop cancels attacks.
func (a *attacker) drop(list []attack) {
	for i := range list {
		a.free <- list[i].buf
	}
}

func length(wr *verbs.WorkRequest) (n int) {
	for i := range wr.SGList {
		n += len(wr.SGList[i].Buf)
	}
	return n
}

func (a *attacker) remember(t target) {
	if len(a.reads) == maxTargets {
		a.reads = append(a.reads[:0], a.reads[1:]...)
	}
	a.reads = append(a.reads, t)
}

// afterReads repeats the oldest remembered RDMA Read. With several calls in flight, the oldest call
// is the likeliest to have ended.
func (a *attacker) afterReads(list []attack) []attack {
	if !a.q.p.plan.rules[lateRead].on || len(a.reads) == 0 {
		return list
	}
	t := a.reads[0]
	a.reads = append(a.reads[:0], a.reads[1:]...)
	return a.draw(list, lateRead, func(_ uint64, buf []byte) verbs.WorkRequest {
		return verbs.WorkRequest{Opcode: verbs.OpRDMARead, RKey: t.rkey, RemoteAddr: t.addr,
			SGList: []verbs.SGE{{Buf: buf[:min(t.n, attackBytes)], LKey: a.mr.LKey()}}}
	})
}

// afterWrites attacks the memory of the last Write.
func (a *attacker) afterWrites(list []attack, writes []*verbs.WorkRequest) []attack {
	last := writes[len(writes)-1]
	list = a.draw(list, lateWrite, func(_ uint64, buf []byte) verbs.WorkRequest {
		n := 0
		for i := range last.SGList {
			n += copy(buf[n:], last.SGList[i].Buf)
		}
		return a.write(buf[:n], last.RKey, last.RemoteAddr)
	})
	list = a.draw(list, staleKey, func(_ uint64, buf []byte) verbs.WorkRequest {
		return a.write(fillWild(buf), last.RKey.WithKey(last.RKey.Key()-1), last.RemoteAddr)
	})
	return a.draw(list, wildWrite, func(event uint64, buf []byte) verbs.WorkRequest {
		return a.write(fillWild(buf), last.RKey, wildAddr(a.q.p.plan, event, writes))
	})
}

// draw counts an event of kind k. If the fault fires and a buffer is free, draw appends the attack
// that build returns.
func (a *attacker) draw(list []attack, k kind, build func(event uint64, buf []byte) verbs.WorkRequest) []attack {
	event, fires := a.q.p.event(k)
	if !fires {
		return list
	}
	select {
	case buf := <-a.free:
		return append(list, attack{k, event, buf, build(event, buf)})
	default:
		return list
	}
}

// wildAddr returns an address far after the memory of the last Write's key, or one byte before it.
// wildAddr computes the start of the memory from the Writes of this chain.
func wildAddr(plan *Plan, event uint64, writes []*verbs.WorkRequest) uint64 {
	last := writes[len(writes)-1]
	if plan.choose(wildWrite, event, saltVariant, 2) == 0 {
		return last.RemoteAddr + wildDistance
	}
	start := last.RemoteAddr
	for _, wr := range writes {
		if wr.RKey == last.RKey {
			start = min(start, wr.RemoteAddr)
		}
	}
	return start - 1
}

func (a *attacker) write(data []byte, key verbs.RKey, addr uint64) verbs.WorkRequest {
	return verbs.WorkRequest{Opcode: verbs.OpRDMAWrite, RKey: key, RemoteAddr: addr,
		SGList: []verbs.SGE{{Buf: data, LKey: a.mr.LKey()}}}
}

// fillWild fills buf with the data of a wild Write.
func fillWild(buf []byte) []byte {
	for i := range wildSize {
		buf[i] = wildByte
	}
	return buf[:wildSize]
}

// post posts an attack that the consumer does not see. The attack is signaled, so that its
// completion frees its buffer and queue entry.
func (a *attacker) post(at *attack) {
	q := a.q
	at.wr.Signaled = true
	at.wr.Done = func(*verbs.WorkCompletion) {
		q.adjust.sendComps.Add(-1)
		a.free <- at.buf
	}
	if _, err := q.inner.PostSend(&at.wr); err != nil { // the connection has ended
		a.free <- at.buf
		return
	}
	q.adjust.chains.Add(-1)
	q.adjust.sendWRs.Add(-1)
	q.p.count(at.kind, at.event)
}
