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
	for n, want := range map[uint32]verbs.Status{
		0:       verbs.StatusSuccess,
		1:       verbs.StatusLocLenErr,
		5:       verbs.StatusWRFlushErr,
		6:       verbs.StatusMWBindErr,
		10:      verbs.StatusRemAccessErr,
		12:      verbs.StatusRetryExcErr,
		13:      verbs.StatusRNRRetryExcErr,
		21:      verbs.StatusGeneralErr,
		1 << 31: verbs.StatusGeneralErr,
	} {
		if got := statusOf(n); got != want {
			t.Errorf("status of ibv_wc_status %d: got %v, want %v", n, got, want)
		}
	}
	for n := uint32(1); n < 64; n++ {
		if statusOf(n) == verbs.StatusSuccess {
			t.Errorf("status of ibv_wc_status %d: got success, want an error", n)
		}
	}
}

func TestAccessFlags(t *testing.T) {
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
			t.Errorf("flags of access %b: got window %b and region %b, want %b and %b", c.a, w, r, c.window, c.region)
		}
	}
}

func TestSetupErrorKindAndText(t *testing.T) {
	for _, c := range []struct {
		kind   eventKind
		status int
		want   verbs.ConnErrorKind
		text   string
	}{
		{evRejected, rejInvalidServiceID, verbs.ConnUnreachable, "no RDMA listener"},
		{evRejected, rejConsumerDefined, verbs.ConnRejected, "the listener rejected"},
		{evRejected, -int(syscall.ECONNREFUSED), verbs.ConnUnreachable, "no listener"},
		{evRejected, -int(syscall.ECONNRESET), verbs.ConnRejected, "connection reset"},
		{evUnreachable, -int(syscall.ETIMEDOUT), verbs.ConnTimeout, "timed out"},
		{evUnreachable, -int(syscall.EHOSTUNREACH), verbs.ConnUnreachable, "no route"},
		{evAddrError, -int(syscall.ENODEV), verbs.ConnUnreachable, "no RDMA device"},
		{evRouteError, -int(syscall.ENETUNREACH), verbs.ConnUnreachable, "route error"},
		{evConnectError, -int(syscall.EPROTO), verbs.ConnProtocol, "connect error"},
		{evDeviceRemoval, 0, verbs.ConnLocal, "device removal"},
		{eventKind(77), 0, verbs.ConnProtocol, "event 77"},
	} {
		kind, err := setupError(c.kind, c.status)
		if kind != c.want || !strings.Contains(err.Error(), c.text) {
			t.Errorf("error of %v with status %d: got %v: %v; want %v with %q in it", c.kind, c.status, kind, err,
				c.want, c.text)
		}
		if c.status < 0 && !errors.Is(err, syscall.Errno(-c.status)) {
			t.Errorf("error of %v: got %v, want an error that wraps its errno", c.kind, err)
		}
	}
}

func TestDisconnectCause(t *testing.T) {
	if err := disconnectCause(evDisconnected, 0); !errors.Is(err, io.EOF) {
		t.Errorf("cause of a disconnect: got %v, want io.EOF", err)
	}
	if err := disconnectCause(evDisconnected, -int(syscall.ECONNRESET)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("cause of a reset: got %v, want ECONNRESET", err)
	}
	err := disconnectCause(evDeviceRemoval, 0)
	if errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "device removal") {
		t.Errorf("cause of a removed device: got %v, want device removal", err)
	}
}

func TestContiguous(t *testing.T) {
	mem := make([]byte, 100)
	p, ok := contiguous([][]byte{mem[10:20], nil, mem[20:50], mem[50:50]})
	if !ok || len(p) != 40 || &p[0] != &mem[10] {
		t.Errorf("adjacent segments: got %d bytes, %v; want 40 bytes, true", len(p), ok)
	}
	if _, ok := contiguous([][]byte{mem[10:20], mem[21:30]}); ok {
		t.Error("segments with a gap: got true, want false")
	}
	if _, ok := contiguous([][]byte{mem[10:20], mem[0:10]}); ok {
		t.Error("segments in the wrong order: got true, want false")
	}
	if p, ok := contiguous(nil); !ok || len(p) != 0 {
		t.Errorf("no segments: got %d bytes, %v; want 0 bytes, true", len(p), ok)
	}
}

// TestSpinnerPollsOnlyBusyQueues checks that a queue is polled while completions follow one another
// quickly, and that an idle queue is not polled.
func TestSpinnerPollsOnlyBusyQueues(t *testing.T) {
	now := time.Unix(1000, 0)
	var s spinner
	if s.pollAgain(now) {
		t.Error("poll of a new spinner: got true, want false")
	}
	s.beginSleep(now)
	now = now.Add(10 * time.Microsecond)
	s.endSleep(now)
	for range 10 {
		if !s.pollAgain(now) {
			t.Fatal("poll after a short sleep: got false, want true")
		}
		s.foundCompletions()
	}
	if s.budget != maxSpin {
		t.Errorf("budget after completions: got %v, want %v", s.budget, maxSpin)
	}
	s.pollAgain(now)
	if !s.pollAgain(now.Add(maxSpin - 1)) {
		t.Error("poll before the budget is used: got false, want true")
	}
	for range 10 {
		now = now.Add(time.Second)
		for s.pollAgain(now) {
			now = now.Add(time.Second)
		}
	}
	if s.budget != 0 {
		t.Errorf("budget without completions: got %v, want 0", s.budget)
	}
	s.beginSleep(now)
	s.endSleep(now.Add(time.Second))
	if s.budget != 0 {
		t.Errorf("budget after a long sleep: got %v, want 0", s.budget)
	}
}
