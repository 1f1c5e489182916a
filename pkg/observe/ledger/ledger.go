// Package ledger measures how long RPCs and FUSE requests spend in each phase, and keeps the
// slowest of them.
//
// Package xprt has a [Times] for each RPC, and package vfs has one for each request. A Times
// works like a stopwatch: Mark adds the time since the last mark to one phase. The phases therefore
// always sum to the total, and none is negative. Mark allocates nothing and takes no lock.
//
// A [Slowest] keeps the slowest calls of the last minutes. A call that is not among them costs two
// comparisons.
package ledger

import "time"

// A Phase is a part of the time of an RPC or of a FUSE request.
type Phase uint8

// The phases, in the order in which a FUSE request and its RPCs pass them. The phases from
// PhaseSlot to PhaseReturn are those of RPCs. A FUSE request has the sum over its RPCs, and the
// other phases.
const (
	// PhaseQueue: the daemon has received the FUSE request, and its handler has not begun. It does
	// not include the time in the queue of the kernel, which the kernel does not report.
	PhaseQueue Phase = iota
	// PhaseSlot: all slots, or the slot of the XID to repeat, are in use.
	PhaseSlot
	// PhaseReconnect: the transport has no connection.
	PhaseReconnect
	// PhaseCredit: all credits of the server are in use.
	PhaseCredit
	// PhaseRegister: the call is encoded and its memory is registered, or memory is short.
	PhaseRegister
	// PhaseSend: the call is in the send queue, or waits for room there. The phase ends when the
	// provider writes the Send to the socket (verbs.WorkRequest.OnWrite), or when the post returns
	// if the provider does not report that. It includes the wait of an answered call for its Send.
	PhaseSend
	// PhaseServer: the call is on the wire or at the server. It begins with the system call that
	// writes the Send.
	PhaseServer
	// PhaseCompletion: the reply handler matches and parses the reply.
	PhaseCompletion
	// PhaseInvalidation: LOCAL_INVs are pending.
	PhaseInvalidation
	// PhaseReturn: the goroutine of the caller wakes up and takes the results.
	PhaseReturn
	// PhaseLocal: the daemon handles the FUSE request outside of its RPCs. This includes copies,
	// and waits for buffers, for other requests, and for data that is written in the background.
	PhaseLocal
	// PhaseReply: the reply to the FUSE request is written.
	PhaseReply
	NumPhases
)

var phaseNames = [NumPhases]string{"queue", "slot", "reconnect", "credit", "register", "send", "server",
	"completion", "invalidation", "return", "local", "reply"}

func (p Phase) String() string {
	if p < NumPhases {
		return phaseNames[p]
	}
	return "?"
}

// A Time is a time of the monotonic clock, in nanoseconds since the start of the process.
type Time int64

var epoch = time.Now()

// Now returns the current time.
func Now() Time { return Time(time.Since(epoch)) }

// At returns the time of t, which must come from time.Now.
func At(t time.Time) Time { return Time(t.Sub(epoch)) }

// Wall returns t as a time of the wall clock, whose steps since the start of the process it
// follows.
func (t Time) Wall() time.Time {
	now := time.Now()
	return now.Add(-time.Duration(At(now) - t))
}

// Times are the phases of one RPC or one FUSE request. Its owner guards it.
type Times struct {
	start, last Time
	spent       [NumPhases]time.Duration
}

// Begin starts the measurement at now and removes all earlier marks.
func (t *Times) Begin(now Time) { *t = Times{start: now, last: now} }

// Mark ends a phase at now: it adds the time since the last mark to p. A time before the last mark
// has no effect, because goroutines that read the clock may mark in another order.
func (t *Times) Mark(p Phase, now Time) {
	if now > t.last {
		t.spent[p] += time.Duration(now - t.last)
		t.last = now
	}
}

// Add adds an RPC that has ended. The time between the last mark and its start goes to PhaseLocal.
// An RPC that began before the last mark ran beside another one. Its time is then left to the next
// mark.
func (t *Times) Add(rpc *Times) {
	if rpc.start < t.last {
		return
	}
	t.Mark(PhaseLocal, rpc.start)
	for p, d := range rpc.spent {
		t.spent[p] += d
	}
	t.last = rpc.last
}

// Received sets an earlier start of a request: the time from received to the present start goes to
// PhaseQueue.
func (t *Times) Received(received Time) {
	if received < t.start {
		t.spent[PhaseQueue] += time.Duration(t.start - received)
		t.start = received
	}
}

// Spent returns the time in p.
func (t *Times) Spent(p Phase) time.Duration { return t.spent[p] }

// Total returns the time from the start to the last mark, which is the sum of all phases.
func (t *Times) Total() time.Duration { return time.Duration(t.last - t.start) }

// Start returns the start.
func (t *Times) Start() Time { return t.start }

// End returns the time of the last mark.
func (t *Times) End() Time { return t.last }
