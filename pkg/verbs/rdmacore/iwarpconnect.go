//go:build rdmacore && cgo && linux

package rdmacore

import (
	"context"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/internal/base"
)

// A stock siw server loses its listener in two cases: more than ten connects arrive at once, or a
// connect ends before siw has processed it. The listener then stays lost until it is started again.
// Therefore this process makes one connect to an iWARP peer at a time. A connect that is given up
// stays open until the peer has answered it. This package can do no more: when the process is
// killed, the kernel ends the connection at once.

// answerTimeout limits the wait for the answer to a connect that was given up. An answer takes
// milliseconds, or longer from a busy peer.
const answerTimeout = 2 * time.Second

// iwarpTurn is held while a connect to an iWARP peer is in progress.
var iwarpTurn base.Turn

// acquireTurn waits until no other connect to an iWARP peer is in progress. It returns false if
// this connect is canceled first.
func (c *connID) acquireTurn(ctx context.Context) bool {
	if c.dev.attrs.Transport != verbs.TransportIWARP {
		return true
	}
	if iwarpTurn.Acquire(ctx, c.Done(), c.removed()) != nil {
		return false
	}
	c.hasTurn.Store(true)
	return true
}

// releaseTurn lets the next connect proceed. It does nothing without a turn.
func (c *connID) releaseTurn() {
	if c.hasTurn.CompareAndSwap(true, false) {
		iwarpTurn.Release()
	}
}

// awaitAnswer waits at most answerTimeout for the peer's answer to a connect that was given up.
// Close calls it after the kernel's call has returned.
func (c *connID) awaitAnswer() {
	if !c.hasTurn.Load() || !c.requestSent.Load() {
		return
	}
	timer := time.NewTimer(answerTimeout)
	defer timer.Stop()
	select {
	case <-c.answered:
	case <-c.removed():
	case <-timer.C:
	}
}
