package rdmacore

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// An sqe is what is kept of a request on the send queue.
type sqe struct {
	op       verbs.Opcode
	signaled bool // the consumer wants to hear of its success
	// the device never sees it: it completes with status when everything before it has
	soft   bool
	status verbs.Status
	length uint32
	done   func(*verbs.WorkCompletion)
	inv    unbinder // of a LocalInv that the device gets
	key    verbs.RKey
}

// An unbinder is told that a LocalInv of its key was executed.
type unbinder interface{ unbound(key verbs.RKey) }

// A completion is one request that has ended, on its way to its handler. Without done nobody wants
// to hear of it.
type completion struct {
	wc   verbs.WorkCompletion
	done func(*verbs.WorkCompletion)
}

// A sendRing keeps what is on a send queue, in the order posted. Devices complete in this order
// too, and tell nothing of an unsignaled success: what stands before a request that has completed,
// and told nothing, has succeeded.
type sendRing struct {
	slots      []sqe // a power of two
	max        int
	head, tail uint32
}

func newSendRing(max int) sendRing { return sendRing{slots: make([]sqe, base.RingSize(max)), max: max} }

func (r *sendRing) len() int           { return int(r.tail - r.head) }
func (r *sendRing) full() bool         { return r.len() >= r.max }
func (r *sendRing) at(pos uint32) *sqe { return &r.slots[pos&uint32(len(r.slots)-1)] }

// push appends a request. There must be room.
func (r *sendRing) push(e sqe) (pos uint32) {
	pos = r.tail
	*r.at(pos) = e
	r.tail++
	return pos
}

// truncate takes back what stands at pos and behind: it was not posted after all.
func (r *sendRing) truncate(pos uint32) {
	for r.tail != pos {
		r.tail--
		*r.at(r.tail) = sqe{}
	}
}

func (r *sendRing) pop(status verbs.Status, vendor uint32, out []completion) []completion {
	e := r.at(r.head)
	r.head++
	c := completion{wc: verbs.WorkCompletion{Status: status, VendorErr: vendor, Opcode: e.op}}
	if e.signaled || status != verbs.StatusSuccess {
		c.done = e.done
	}
	if e.op == verbs.OpRDMARead {
		c.wc.ByteLen = e.length
	}
	if e.inv != nil && status == verbs.StatusSuccess {
		e.inv.unbound(e.key)
	}
	*e = sqe{}
	return append(out, c)
}

// complete ends the request at pos, and what stands before it, with what the device said of pos. It
// reports false when no request is there.
func (r *sendRing) complete(pos uint32, status verbs.Status, vendor uint32, out []completion) ([]completion, bool) {
	if pos-r.head >= r.tail-r.head || r.at(pos).soft {
		return out, false
	}
	out = r.completeBefore(pos, out)
	out = r.pop(status, vendor, out)
	return r.settle(out), true
}

// completeBefore ends everything that stands before pos, of which the device has nothing more to
// tell.
func (r *sendRing) completeBefore(pos uint32, out []completion) []completion {
	if pos-r.head > r.tail-r.head {
		return out
	}
	for r.head != pos {
		out = r.pop(r.at(r.head).status, 0, out)
	}
	return out
}

// settle ends the soft requests that have come to the head.
func (r *sendRing) settle(out []completion) []completion {
	for r.head != r.tail && r.at(r.head).soft {
		out = r.pop(r.at(r.head).status, 0, out)
	}
	return out
}

// flush ends everything.
func (r *sendRing) flush(out []completion) []completion {
	for r.head != r.tail {
		status := verbs.StatusWRFlushErr
		if e := r.at(r.head); e.soft {
			status = e.status
		}
		out = r.pop(status, 0, out)
	}
	return out
}

// A recvRing keeps what is on a receive queue, in the order posted, which is the order in which it
// completes.
type recvRing struct {
	slots      []func(*verbs.WorkCompletion) // a power of two
	max        int
	head, tail uint32
}

func newRecvRing(max int) recvRing {
	return recvRing{slots: make([]func(*verbs.WorkCompletion), base.RingSize(max)), max: max}
}

func (r *recvRing) full() bool { return int(r.tail-r.head) >= r.max }
func (r *recvRing) at(pos uint32) *func(*verbs.WorkCompletion) {
	return &r.slots[pos&uint32(len(r.slots)-1)]
}

func (r *recvRing) push(done func(*verbs.WorkCompletion)) (pos uint32) {
	pos = r.tail
	*r.at(pos) = done
	r.tail++
	return pos
}

// unpush takes back the last one, which was not posted after all.
func (r *recvRing) unpush() {
	r.tail--
	*r.at(r.tail) = nil
}

// complete ends the request at pos, which is the oldest on every device that keeps the rules. It
// reports false when it is not.
func (r *recvRing) complete(pos uint32, wc verbs.WorkCompletion, out []completion) ([]completion, bool) {
	if pos != r.head || r.head == r.tail {
		return out, false
	}
	done := *r.at(pos)
	*r.at(pos) = nil
	r.head++
	wc.Opcode = verbs.OpRecv
	return append(out, completion{wc: wc, done: done}), true
}

// flush ends everything.
func (r *recvRing) flush(out []completion) []completion {
	for r.head != r.tail {
		out, _ = r.complete(r.head, verbs.WorkCompletion{Status: verbs.StatusWRFlushErr}, out)
	}
	return out
}
