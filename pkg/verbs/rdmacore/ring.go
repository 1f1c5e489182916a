package rdmacore

import (
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// An sqe is an entry of the send ring.
type sqe struct {
	op       verbs.Opcode
	signaled bool // the handler is called on success too
	// The device does not get a soft request. The request completes with status after all requests
	// before it.
	soft   bool
	status verbs.Status
	length uint32
	done   func(*verbs.WorkCompletion)
	inv    invalidatable // the MR of a LocalInv that the device gets; otherwise nil
	key    verbs.RKey    // of the LocalInv
}

// An invalidatable is informed when a LocalInv of its key was executed.
type invalidatable interface{ localInvExecuted(key verbs.RKey) }

// A completion is the end of one request. If done is nil, no handler is called.
type completion struct {
	wc   verbs.WorkCompletion
	done func(*verbs.WorkCompletion)
}

// A sendRing holds the requests on a send queue, in the order posted. Devices complete them in this
// order and do not report an unsignaled success. Therefore an unreported request has succeeded when
// a later one has completed.
type sendRing struct {
	slots      []sqe // the length is a power of two
	depth      int
	head, tail uint32
}

func newSendRing(depth int) sendRing {
	return sendRing{slots: make([]sqe, base.RingSize(depth)), depth: depth}
}

func (r *sendRing) len() int           { return int(r.tail - r.head) }
func (r *sendRing) full() bool         { return r.len() >= r.depth }
func (r *sendRing) at(pos uint32) *sqe { return &r.slots[pos&uint32(len(r.slots)-1)] }

// push appends a request. The ring must not be full.
func (r *sendRing) push(e sqe) (pos uint32) {
	pos = r.tail
	*r.at(pos) = e
	r.tail++
	return pos
}

// truncate removes the requests at pos and later, which were not posted.
func (r *sendRing) truncate(pos uint32) {
	for r.tail != pos {
		r.tail--
		*r.at(r.tail) = sqe{}
	}
}

// pop removes the oldest request and appends its completion to out.
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
		e.inv.localInvExecuted(e.key)
	}
	*e = sqe{}
	return append(out, c)
}

// complete completes the request at pos with status, and all requests before pos. It returns false
// if the device has no request at pos.
func (r *sendRing) complete(pos uint32, status verbs.Status, vendor uint32, out []completion) ([]completion, bool) {
	if pos-r.head >= r.tail-r.head || r.at(pos).soft {
		return out, false
	}
	out = r.completeBefore(pos, out)
	out = r.pop(status, vendor, out)
	return r.completeSoft(out), true
}

// completeBefore completes every request before pos. The device reports none of them afterwards.
func (r *sendRing) completeBefore(pos uint32, out []completion) []completion {
	if pos-r.head > r.tail-r.head {
		return out
	}
	for r.head != pos {
		out = r.pop(r.at(r.head).status, 0, out)
	}
	return out
}

// completeSoft completes the soft requests at the head.
func (r *sendRing) completeSoft(out []completion) []completion {
	for r.head != r.tail && r.at(r.head).soft {
		out = r.pop(r.at(r.head).status, 0, out)
	}
	return out
}

// flush completes all requests. The device's requests get StatusWRFlushErr.
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

// A recvRing holds the requests on a receive queue, in the order posted. They complete in this
// order.
type recvRing struct {
	slots      []func(*verbs.WorkCompletion) // the length is a power of two
	depth      int
	head, tail uint32
}

func newRecvRing(depth int) recvRing {
	return recvRing{slots: make([]func(*verbs.WorkCompletion), base.RingSize(depth)), depth: depth}
}

func (r *recvRing) full() bool { return int(r.tail-r.head) >= r.depth }
func (r *recvRing) at(pos uint32) *func(*verbs.WorkCompletion) {
	return &r.slots[pos&uint32(len(r.slots)-1)]
}

func (r *recvRing) push(done func(*verbs.WorkCompletion)) (pos uint32) {
	pos = r.tail
	*r.at(pos) = done
	r.tail++
	return pos
}

// undoPush removes the newest request, which was not posted.
func (r *recvRing) undoPush() {
	r.tail--
	*r.at(r.tail) = nil
}

// complete completes the request at pos. It returns false if this is not the oldest request, which
// is an error of the device.
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

// flush completes all requests with StatusWRFlushErr.
func (r *recvRing) flush(out []completion) []completion {
	for r.head != r.tail {
		out, _ = r.complete(r.head, verbs.WorkCompletion{Status: verbs.StatusWRFlushErr}, out)
	}
	return out
}
