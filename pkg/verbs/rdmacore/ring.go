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
type sendRing struct{ base.Ring[sqe] }

func newSendRing(limit int) sendRing { return sendRing{base.NewRing[sqe](limit)} }

// truncate removes the requests at pos and later, which were not posted.
func (r *sendRing) truncate(pos uint32) {
	for r.Tail != pos {
		r.Tail--
		*r.At(r.Tail) = sqe{}
	}
}

// pop removes the oldest request and appends its completion to out.
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
		e.inv.localInvExecuted(e.key)
	}
	*e = sqe{}
	return append(out, c)
}

// complete completes the request at pos with status, and all requests before pos. It returns false
// if the device has no request at pos.
func (r *sendRing) complete(pos uint32, status verbs.Status, vendor uint32, out []completion) ([]completion, bool) {
	if pos-r.Head >= r.Tail-r.Head || r.At(pos).soft {
		return out, false
	}
	out = r.completeBefore(pos, out)
	out = r.pop(status, vendor, out)
	return r.completeSoft(out), true
}

// completeBefore completes every request before pos. The device reports no completion for these
// requests.
func (r *sendRing) completeBefore(pos uint32, out []completion) []completion {
	if pos-r.Head > r.Tail-r.Head {
		return out
	}
	for r.Head != pos {
		out = r.pop(r.At(r.Head).status, 0, out)
	}
	return out
}

// completeSoft completes the soft requests at the head.
func (r *sendRing) completeSoft(out []completion) []completion {
	for r.Head != r.Tail && r.At(r.Head).soft {
		out = r.pop(r.At(r.Head).status, 0, out)
	}
	return out
}

// flush completes all requests. The device's requests get StatusWRFlushErr.
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

// A recvRing holds the requests on a receive queue, in the order posted. They complete in this
// order.
type recvRing struct {
	base.Ring[func(*verbs.WorkCompletion)]
}

func newRecvRing(limit int) recvRing {
	return recvRing{base.NewRing[func(*verbs.WorkCompletion)](limit)}
}

// undoPush removes the newest request, which was not posted.
func (r *recvRing) undoPush() {
	r.Tail--
	*r.At(r.Tail) = nil
}

// complete completes the request at pos. It returns false if this is not the oldest request, which
// is an error of the device.
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

// flush completes all requests with StatusWRFlushErr.
func (r *recvRing) flush(out []completion) []completion {
	for r.Head != r.Tail {
		out, _ = r.complete(r.Head, verbs.WorkCompletion{Status: verbs.StatusWRFlushErr}, out)
	}
	return out
}
