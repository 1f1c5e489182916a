package rdmacore

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// ends tells completions: the request's name, its status, and whether its handler is to hear of it.
type ends struct{ got []string }

func (e *ends) push(r *sendRing, name string, s sqe) uint32 {
	s.done = func(wc *verbs.WorkCompletion) { e.got = append(e.got, fmt.Sprintf("%s:%v", name, wc.Status)) }
	return r.Push(s)
}

func (e *ends) take(out []completion) string {
	e.got = nil
	for i := range out {
		if out[i].done == nil {
			e.got = append(e.got, "quiet")
		} else {
			out[i].done(&out[i].wc)
		}
	}
	return strings.Join(e.got, ", ")
}

func TestSendRing(t *testing.T) {
	var e ends
	r := newSendRing(6)
	r.Head, r.Tail = 0xfffffffd, 0xfffffffd // positions wrap
	e.push(&r, "a", sqe{})
	b := e.push(&r, "b", sqe{signaled: true})
	e.push(&r, "c", sqe{soft: true, signaled: true})
	e.push(&r, "d", sqe{soft: true})
	f := e.push(&r, "f", sqe{signaled: true})
	g := e.push(&r, "g", sqe{soft: true, status: verbs.StatusLocQPOpErr})
	if !r.Full() {
		t.Error("six requests do not fill a ring of six")
	}
	check := func(what string, out []completion, ok, wantOK bool, want string) {
		t.Helper()
		if got := e.take(out); got != want || ok != wantOK {
			t.Errorf("%s: %q, %v; want %q, %v", what, got, ok, want, wantOK)
		}
	}
	out, ok := r.complete(b, verbs.StatusSuccess, 0, nil)
	check("a success ends the silent one before it and the soft ones behind", out, ok, true,
		"quiet, b:success, c:success, quiet")
	out, ok = r.complete(b, verbs.StatusSuccess, 0, nil)
	check("a second completion", out, ok, false, "")
	out, ok = r.complete(g, verbs.StatusSuccess, 0, nil)
	check("a completion of what the device never had", out, ok, false, "")
	out, ok = r.complete(f, verbs.StatusWRFlushErr, 0, nil)
	check("a flush", out, ok, true, "f:work request flushed, g:local QP operation error")
	if r.Len() != 0 {
		t.Errorf("%d are left", r.Len())
	}
	if out, ok = r.complete(r.Tail, verbs.StatusSuccess, 0, nil); ok || len(out) != 0 {
		t.Error("an empty ring completed something")
	}
}

func TestSendRingMarkerAndFlush(t *testing.T) {
	var e ends
	r := newSendRing(8)
	e.push(&r, "a", sqe{})
	e.push(&r, "b", sqe{soft: true, status: verbs.StatusMWBindErr})
	mark := r.Tail
	if got := e.take(r.completeBefore(mark, nil)); got != "quiet, b:memory bind operation error" {
		t.Errorf("marker: %q", got)
	}
	if got := e.take(r.completeBefore(mark+7, nil)); got != "" {
		t.Errorf("marker beyond the ring: %q", got)
	}
	e.push(&r, "c", sqe{})
	e.push(&r, "d", sqe{soft: true, signaled: true})
	e.push(&r, "x", sqe{})
	r.truncate(r.Tail - 1)
	if got := e.take(r.flush(nil)); got != "c:work request flushed, d:success" {
		t.Errorf("flush: %q", got)
	}
}

func TestRecvRing(t *testing.T) {
	r := newRecvRing(3)
	var got []int
	var pos []uint32
	for i := range 3 {
		pos = append(pos, r.Push(func(*verbs.WorkCompletion) { got = append(got, i) }))
	}
	if !r.Full() {
		t.Error("three Receives do not fill a ring of three")
	}
	if _, ok := r.complete(pos[1], verbs.WorkCompletion{}, nil); ok {
		t.Error("completed out of turn")
	}
	out, ok := r.complete(pos[0], verbs.WorkCompletion{ByteLen: 7}, nil)
	if !ok || out[0].wc.ByteLen != 7 || out[0].wc.Opcode != verbs.OpRecv {
		t.Errorf("first: %+v, %v", out, ok)
	}
	r.unpush()
	out = r.flush(out)
	if len(out) != 2 || out[1].wc.Status != verbs.StatusWRFlushErr {
		t.Errorf("flush: %+v", out)
	}
	for i := range out {
		out[i].done(&out[i].wc)
	}
	if fmt.Sprint(got) != "[0 1]" {
		t.Errorf("handlers of %v were called", got)
	}
}
