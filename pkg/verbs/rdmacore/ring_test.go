package rdmacore

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A completionLog collects completions as NAME:STATUS. A completion without a handler is logged as
// "no handler".
type completionLog struct{ got []string }

// push pushes a request whose handler logs its completion as name.
func (l *completionLog) push(r *sendRing, name string, s sqe) uint32 {
	s.done = func(wc *verbs.WorkCompletion) { l.got = append(l.got, fmt.Sprintf("%s:%v", name, wc.Status)) }
	return r.Push(s)
}

// deliver calls the handlers of out and returns the log.
func (l *completionLog) deliver(out []completion) string {
	l.got = nil
	for i := range out {
		if out[i].done == nil {
			l.got = append(l.got, "no handler")
		} else {
			out[i].done(&out[i].wc)
		}
	}
	return strings.Join(l.got, ", ")
}

func TestSendRingCompletesInOrder(t *testing.T) {
	var log completionLog
	r := newSendRing(6)
	r.Head, r.Tail = 0xfffffffd, 0xfffffffd // the positions wrap to 0 in this test
	log.push(&r, "a", sqe{})
	b := log.push(&r, "b", sqe{signaled: true})
	log.push(&r, "c", sqe{soft: true, signaled: true})
	log.push(&r, "d", sqe{soft: true})
	f := log.push(&r, "f", sqe{signaled: true})
	g := log.push(&r, "g", sqe{soft: true, status: verbs.StatusLocQPOpErr})
	if !r.Full() {
		t.Error("full with six of six requests: got false, want true")
	}
	check := func(what string, out []completion, ok, wantOK bool, want string) {
		t.Helper()
		if got := log.deliver(out); got != want || ok != wantOK {
			t.Errorf("%s: got %q, %v; want %q, %v", what, got, ok, want, wantOK)
		}
	}
	out, ok := r.complete(b, verbs.StatusSuccess, 0, nil)
	check("completion of b", out, ok, true, "no handler, b:success, c:success, no handler")
	out, ok = r.complete(b, verbs.StatusSuccess, 0, nil)
	check("second completion of b", out, ok, false, "")
	out, ok = r.complete(g, verbs.StatusSuccess, 0, nil)
	check("completion of a soft request by the device", out, ok, false, "")
	out, ok = r.complete(f, verbs.StatusWRFlushErr, 0, nil)
	check("flush of f", out, ok, true, "f:work request flushed, g:local QP operation error")
	if r.Len() != 0 {
		t.Errorf("requests on the ring: got %d, want 0", r.Len())
	}
	if out, ok = r.complete(r.Tail, verbs.StatusSuccess, 0, nil); ok || len(out) != 0 {
		t.Errorf("completion on an empty ring: got %d completions, %v; want 0, false", len(out), ok)
	}
}

func TestSendRingMarkerAndFlushCompleteEarlierRequests(t *testing.T) {
	var log completionLog
	r := newSendRing(8)
	log.push(&r, "a", sqe{})
	log.push(&r, "b", sqe{soft: true, status: verbs.StatusMWBindErr})
	mark := r.Tail
	if got := log.deliver(r.completeBefore(mark, nil)); got != "no handler, b:memory bind operation error" {
		t.Errorf("completions of the marker: got %q, want a without a handler and b", got)
	}
	if got := log.deliver(r.completeBefore(mark+7, nil)); got != "" {
		t.Errorf("completions of a marker beyond the ring: got %q, want none", got)
	}
	log.push(&r, "c", sqe{})
	log.push(&r, "d", sqe{soft: true, signaled: true})
	log.push(&r, "x", sqe{})
	r.truncate(r.Tail - 1)
	if got := log.deliver(r.flush(nil)); got != "c:work request flushed, d:success" {
		t.Errorf("completions of flush: got %q, want c flushed and d successful", got)
	}
}

func TestRecvRingCompletesInOrder(t *testing.T) {
	r := newRecvRing(3)
	var got []int
	var pos []uint32
	for i := range 3 {
		pos = append(pos, r.Push(func(*verbs.WorkCompletion) { got = append(got, i) }))
	}
	if !r.Full() {
		t.Error("full with three of three Receives: got false, want true")
	}
	if _, ok := r.complete(pos[1], verbs.WorkCompletion{}, nil); ok {
		t.Error("completion of the second Receive before the first: got true, want false")
	}
	out, ok := r.complete(pos[0], verbs.WorkCompletion{ByteLen: 7}, nil)
	if !ok || out[0].wc.ByteLen != 7 || out[0].wc.Opcode != verbs.OpRecv {
		t.Errorf("completion of the first Receive: got %+v, %v; want 7 bytes, OpRecv and true", out, ok)
	}
	r.undoPush()
	out = r.flush(out)
	if len(out) != 2 || out[1].wc.Status != verbs.StatusWRFlushErr {
		t.Errorf("completions after flush: got %+v, want two, the second flushed", out)
	}
	for i := range out {
		out[i].done(&out[i].wc)
	}
	if fmt.Sprint(got) != "[0 1]" {
		t.Errorf("Receives with called handlers: got %v, want [0 1]", got)
	}
}
