//go:build rdmacore && cgo && linux

package rdmacore

import (
	"context"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// A stock siw loses its listener, until it is started again, to more than ten connects at once, and
// to one that ends before siw has looked at it. So of the connects of this process to iWARP peers
// one is made at a time, and one that is given up is kept until the peer has answered it. That is
// all that can be done from here: when the process is killed the kernel ends the connection at
// once.

// answerTimeout bounds the wait for the answer to a connect that was given up. An answer takes
// milliseconds, of a busy peer more.
const answerTimeout = 2 * time.Second

// iwarpTurn holds a token for the connect to an iWARP peer that is under way.
var iwarpTurn = make(chan struct{}, 1)

// acquireTurn waits until no other connect to an iWARP peer is under way. It returns false when the
// connect is given up first.
func (c *connID) acquireTurn(ctx context.Context) bool {
	if c.dev.attrs.Transport != verbs.TransportIWARP {
		return true
	}
	select {
	case iwarpTurn <- struct{}{}:
		c.turn.Store(true)
		return true
	case <-ctx.Done():
		return false
	case <-c.Done():
		return false
	case <-c.removed():
		return false
	}
}

// releaseTurn ends acquireTurn, if it has not ended yet.
func (c *connID) releaseTurn() {
	if c.turn.CompareAndSwap(true, false) {
		<-iwarpTurn
	}
}

// linger waits for the peer's answer to a connect that was given up, for a moment. Called by Close
// with the kernel's call over.
func (c *connID) linger() {
	if !c.turn.Load() || !c.asked.Load() {
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
