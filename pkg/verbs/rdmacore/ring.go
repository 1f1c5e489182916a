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
type sendRing struct{ base.Ring[sqe] }

func newSendRing(limit int) sendRing { return sendRing{base.NewRing[sqe](limit)} }

// truncate takes back what stands at pos and behind: it was not posted after all.
func (r *sendRing) truncate(pos uint32) {
	for r.Tail != pos {
		r.Tail--
		*r.At(r.Tail) = sqe{}
	}
}

func (r *sendRing) pop(status verbs.Status, vendor uint32, out []completion) []completion {
	e := r.At(r.Head)
	r.Head++
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
	if pos-r.Head >= r.Tail-r.Head || r.At(pos).soft {
		return out, false
	}
	out = r.completeBefore(pos, out)
	out = r.pop(status, vendor, out)
	return r.settle(out), true
}

// completeBefore ends everything that stands before pos, of which the device has nothing more to
// tell.
func (r *sendRing) completeBefore(pos uint32, out []completion) []completion {
	if pos-r.Head > r.Tail-r.Head {
		return out
	}
	for r.Head != pos {
		out = r.pop(r.At(r.Head).status, 0, out)
	}
	return out
}

// settle ends the soft requests that have come to the head.
func (r *sendRing) settle(out []completion) []completion {
	for r.Head != r.Tail && r.At(r.Head).soft {
		out = r.pop(r.At(r.Head).status, 0, out)
	}
	return out
}

// flush ends everything.
func (r *sendRing) flush(out []completion) []completion {
	for r.Head != r.Tail {
		status := verbs.StatusWRFlushErr
		if e := r.At(r.Head); e.soft {
			status = e.status
		}
		out = r.pop(status, 0, out)
	}
	return out
}

// A recvRing keeps what is on a receive queue, in the order posted, which is the order in which it
// completes.
type recvRing struct {
	base.Ring[func(*verbs.WorkCompletion)]
}

func newRecvRing(limit int) recvRing {
	return recvRing{base.NewRing[func(*verbs.WorkCompletion)](limit)}
}

// unpush takes back the last one, which was not posted after all.
func (r *recvRing) unpush() {
	r.Tail--
	*r.At(r.Tail) = nil
}

// complete ends the request at pos, which is the oldest on every device that keeps the rules. It
// reports false when it is not.
func (r *recvRing) complete(pos uint32, wc verbs.WorkCompletion, out []completion) ([]completion, bool) {
	if pos != r.Head || r.Head == r.Tail {
		return out, false
	}
	done := *r.At(pos)
	*r.At(pos) = nil
	r.Head++
	wc.Opcode = verbs.OpRecv
	return append(out, completion{wc: wc, done: done}), true
}

// flush ends everything.
func (r *recvRing) flush(out []completion) []completion {
	for r.Head != r.Tail {
		out, _ = r.complete(r.Head, verbs.WorkCompletion{Status: verbs.StatusWRFlushErr}, out)
	}
	return out
}
