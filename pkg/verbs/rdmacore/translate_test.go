package rdmacore

import (
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

func TestStatusOf(t *testing.T) {
	for n, want := range map[uint32]verbs.Status{0: verbs.StatusSuccess, 1: verbs.StatusLocLenErr,
		5: verbs.StatusWRFlushErr, 6: verbs.StatusMWBindErr,
		10: verbs.StatusRemAccessErr, 12: verbs.StatusRetryExcErr, 13: verbs.StatusRNRRetryExcErr, 21: verbs.StatusGeneralErr, 1 << 31: verbs.StatusGeneralErr} {
		if got := statusOf(n); got != want {
			t.Errorf("ibv_wc_status %d: %v, want %v", n, got, want)
		}
	}
	for n := uint32(1); n < 64; n++ {
		if statusOf(n) == verbs.StatusSuccess {
			t.Errorf("ibv_wc_status %d is a success", n)
		}
	}
}

func TestAccess(t *testing.T) {
	for _, c := range []struct {
		a              verbs.Access
		window, region uint32
	}{
		{verbs.AccessRemoteRead, 4, 4},
		{verbs.AccessRemoteWrite, 2, 3},
		{verbs.AccessRemoteWrite | verbs.AccessLocalWrite, 2, 3},
		{verbs.AccessLocalWrite, 0, 1},
		{0, 0, 0},
	} {
		if w, r := windowAccess(c.a), regionAccess(c.a); w != c.window || r != c.region {
			t.Errorf("access %b: window %b, region %b; want %b, %b", c.a, w, r, c.window, c.region)
		}
	}
}

func TestFailure(t *testing.T) {
	for _, c := range []struct {
		kind   eventKind
		status int
		want   verbs.ConnErrorKind
		text   string
	}{
		{evRejected, rejInvalidServiceID, verbs.ConnUnreachable, "nobody listens"},
		{evRejected, rejConsumerDefined, verbs.ConnRejected, "the peer rejected"},
		{evRejected, -int(syscall.ECONNREFUSED), verbs.ConnUnreachable, "nobody listens"},
		{evRejected, -int(syscall.ECONNRESET), verbs.ConnRejected, "connection reset"},
		{evUnreachable, -int(syscall.ETIMEDOUT), verbs.ConnTimeout, "timed out"},
		{evUnreachable, -int(syscall.EHOSTUNREACH), verbs.ConnUnreachable, "no route"},
		{evAddrError, -int(syscall.ENODEV), verbs.ConnUnreachable, "no RDMA device"},
		{evRouteError, -int(syscall.ENETUNREACH), verbs.ConnUnreachable, "route error"},
		{evConnectError, -int(syscall.EPROTO), verbs.ConnProtocol, "connect error"},
		{evDeviceRemoval, 0, verbs.ConnLocal, "device removal"},
		{eventKind(77), 0, verbs.ConnProtocol, "event 77"},
	} {
		kind, err := failure(c.kind, c.status)
		if kind != c.want || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%v, status %d: %v: %v; want %v with %q", c.kind, c.status, kind, err, c.want, c.text)
		}
		if c.status < 0 && !errors.Is(err, syscall.Errno(-c.status)) {
			t.Errorf("%v: %v does not wrap its errno", c.kind, err)
		}
	}
}

func TestEnding(t *testing.T) {
	if err := ending(evDisconnected, 0); err != io.EOF {
		t.Errorf("an orderly end: %v", err)
	}
	if err := ending(evDisconnected, -int(syscall.ECONNRESET)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a reset: %v", err)
	}
	if err := ending(evDeviceRemoval, 0); err == io.EOF || !strings.Contains(err.Error(), "device removal") {
		t.Errorf("a device that is pulled: %v", err)
	}
}

func TestOnePiece(t *testing.T) {
	mem := make([]byte, 100)
	if p, ok := onePiece([][]byte{mem[10:20], nil, mem[20:50], mem[50:50]}); !ok || len(p) != 40 || &p[0] != &mem[10] {
		t.Errorf("%d octets, %v", len(p), ok)
	}
	if _, ok := onePiece([][]byte{mem[10:20], mem[21:30]}); ok {
		t.Error("a hole is no hole")
	}
	if _, ok := onePiece([][]byte{mem[10:20], mem[0:10]}); ok {
		t.Error("the order does not matter")
	}
	if p, ok := onePiece(nil); !ok || len(p) != 0 {
		t.Error("nothing is not one piece")
	}
}

// TestSpinner: a queue that gets completions soon after it was empty is polled, an idle one is
// slept on.
func TestSpinner(t *testing.T) {
	now := time.Unix(1000, 0)
	var s spinner
	if s.again(now) {
		t.Error("a fresh spinner polls")
	}
	s.sleeps(now)
	now = now.Add(10 * time.Microsecond)
	s.woken(now)
	for range 10 {
		if !s.again(now) {
			t.Fatal("does not poll although completions come within microseconds")
		}
		s.hit()
	}
	if s.budget != maxSpin {
		t.Errorf("budget %v after hits, want %v", s.budget, maxSpin)
	}
	s.again(now)
	if !s.again(now.Add(maxSpin - 1)) {
		t.Error("gave up before its time")
	}
	for range 10 {
		now = now.Add(time.Second)
		for s.again(now) {
			now = now.Add(time.Second)
		}
	}
	if s.budget != 0 {
		t.Errorf("budget %v while nothing comes", s.budget)
	}
	s.sleeps(now)
	s.woken(now.Add(time.Second))
	if s.budget != 0 {
		t.Error("polls after a long sleep")
	}
}
