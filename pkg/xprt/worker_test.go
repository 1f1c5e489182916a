package xprt

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// TestBackOff goes through the pauses before attempts to connect: 5 s, doubled up to 60 s; none after a connection that
// answered; none, once, after a loss of this side's making.
func TestBackOff(t *testing.T) {
	cfg := &Config{ReconnectMin: 5 * time.Second, ReconnectMax: 60 * time.Second}
	var b backOff
	want := func(what string, got, want time.Duration) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	want("after an answer", b.afterLoss(cfg, true, false), 0)
	for _, s := range []time.Duration{5, 10, 20, 40, 60, 60} {
		want("failed attempt", b.next(cfg), s*time.Second)
	}
	want("connected, but lost without an answer", b.afterLoss(cfg, false, false), 60*time.Second)
	want("after an answer", b.afterLoss(cfg, true, false), 0)
	want("lost without an answer", b.afterLoss(cfg, false, false), 5*time.Second)
	want("after an answer", b.afterLoss(cfg, true, false), 0)
	want("our own loss", b.afterLoss(cfg, false, true), 0)
	want("our own loss again", b.afterLoss(cfg, false, true), 10*time.Second)
}

func TestWhoseLoss(t *testing.T) {
	for _, c := range []struct {
		err  error
		ours bool
	}{
		{io.EOF, false},
		{errors.New("connection reset"), false},
		{&TimeoutError{}, false},
		{&completionFailure{"send", verbs.StatusRemAccessErr}, false},
		{&completionFailure{"receive", verbs.StatusWRFlushErr}, false},
		{&completionFailure{"localinv", verbs.StatusMWBindErr}, true},
		{&completionFailure{"fastreg", verbs.StatusLocProtErr}, true},
		{&postError{"RPC", verbs.ErrQueueFull}, true},
		{&postError{"RPC", fmt.Errorf("late: %w", verbs.ErrQPState)}, false},
		{errIdle, true},
	} {
		if got := ours(c.err); got != c.ours {
			t.Errorf("%v is ours: %v", c.err, got)
		}
	}
}
