package faults

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Sizes of attacks.
const (
	attackRoom  = 8       // attacks that one queue pair has under way
	attackBytes = 4096    // octets of one
	wildBytes   = 8       // octets of a Write that goes astray
	wildBeyond  = 1 << 30 // how far behind the memory: farther than any registration reaches
	maxTargets  = 64      // RDMA Reads remembered
	wildOctet   = 0xdb    // what stands in memory that a stray Write got into
)

// A target is memory of the peer.
type target struct {
	rkey verbs.RKey
	addr uint64
	n    int
}

// An attacker posts what a server must not, behind the Sends of one queue pair. The data of a late
// Write are those of the Write that it repeats: only when it gets through to memory that has been
// given to somebody else does it do harm.
type attacker struct {
	q    *queuePair
	mr   verbs.MR
	mem  []byte
	free chan []byte // pieces of mem that no request uses

	reads []target // RDMA Reads not repeated yet, oldest first; guarded by the queue pair's mu
	once  sync.Once
}

// An attack is drawn and has its memory, but is not posted yet.
type attack struct {
	kind  kind
	event uint64
	buf   []byte
	wr    verbs.WorkRequest
}

func newAttacker(q *queuePair, pd verbs.PD) (*attacker, error) {
	a := &attacker{q: q, free: make(chan []byte, attackRoom)}
	var err error
	if a.mem, err = membuf.Alloc(attackRoom * attackBytes); err != nil {
		return nil, err
	}
	if a.mr, err = pd.RegMR(a.mem); err != nil {
		membuf.Free(a.mem)
		return nil, err
	}
	for i := range attackRoom {
		a.free <- a.mem[i*attackBytes : (i+1)*attackBytes : (i+1)*attackBytes]
	}
	return a, nil
}

func (a *attacker) release() {
	a.once.Do(func() {
		if err := a.mr.Dereg(); err != nil {
			a.q.p.log.Error("memory of the fault injector could not be deregistered", "error", err)
			return
		}
		membuf.Free(a.mem)
	})
}

// plan draws the attacks behind a chain that is about to be posted. After the post its memory may
// belong to somebody else. Caller holds the queue pair's mu.
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

// launch posts the attacks, now or after the delay of their kind, when the chain was posted.
func (a *attacker) launch(list []attack) {
	for i := range list {
		at := &list[i]
		d := a.q.p.plan.rules[at.kind].delay
		if d == 0 {
			a.post(at)
			continue
		}
		a.q.late.after(d, func(early bool) {
			if early { // the connection is being drained
				a.free <- at.buf
				return
			}
			a.post(at)
		})
	}
}

// drop gives the attacks up.
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

// afterReads repeats the oldest RDMA Read that was not: with several calls under way its call is
// the likeliest to be over.
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

// afterWrites attacks the memory that the last of writes went to.
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
		return a.write(stray(buf), last.RKey.WithKey(last.RKey.Key()-1), last.RemoteAddr)
	})
	return a.draw(list, wildWrite, func(event uint64, buf []byte) verbs.WorkRequest {
		return a.write(stray(buf), last.RKey, wildAddr(a.q.p.plan, event, writes))
	})
}

// draw decides an event of kind k, and adds the attack that build makes if it strikes and there is
// room for it.
func (a *attacker) draw(list []attack, k kind, build func(event uint64, buf []byte) verbs.WorkRequest) []attack {
	event, strikes := a.q.p.event(k)
	if !strikes {
		return list
	}
	select {
	case buf := <-a.free:
		return append(list, attack{k, event, buf, build(event, buf)})
	default:
		return list
	}
}

// wildAddr is one octet before the memory of the last Write's key, as far as the chain shows it, or
// far behind.
func wildAddr(plan *Plan, event uint64, writes []*verbs.WorkRequest) uint64 {
	last := writes[len(writes)-1]
	if plan.choose(wildWrite, event, saltVariant, 2) == 0 {
		return last.RemoteAddr + wildBeyond
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

// stray is what a Write that goes astray carries.
func stray(buf []byte) []byte {
	for i := range wildBytes {
		buf[i] = wildOctet
	}
	return buf[:wildBytes]
}

// post posts an attack past the consumer. It is signaled, so that its memory and its place on the
// queue are free again.
func (a *attacker) post(at *attack) {
	q := a.q
	at.wr.Signaled = true
	at.wr.Done = func(*verbs.WorkCompletion) {
		q.adjust.sendComps.Add(-1)
		a.free <- at.buf
	}
	if _, err := q.inner.PostSend(&at.wr); err != nil { // the connection is gone already
		a.free <- at.buf
		return
	}
	q.adjust.chains.Add(-1)
	q.adjust.sendWRs.Add(-1)
	q.p.count(at.kind, at.event)
}
