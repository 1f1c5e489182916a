package svcrdma

import (
	"errors"
	"sync/atomic"
	"time"
)

// Causes of connections that the server ends.
var (
	errSilent  = errors.New("connection without calls ended to admit another client")
	errIdle    = errors.New("idle timeout expired without a call")
	errNoReply = errors.New("call timeout expired in the handler")
	errStalled = errors.New("transfer timeout expired: client did not answer an RDMA Read or did not accept a reply")
)

// checksPerTimeout is the number of checks during the shortest timeout. A timeout is therefore late
// by at most this fraction.
const checksPerTimeout = 8

// A stopwatch measures the time since its start. One goroutine starts and stops it, and another one
// reads it. The zero stopwatch is stopped.
type stopwatch struct{ since atomic.Int64 }

func (s *stopwatch) start(at time.Duration) { s.since.Store(int64(at) + 1) }
func (s *stopwatch) stop()                  { s.since.Store(0) }

// over reports whether the stopwatch has been running for longer than limit.
func (s *stopwatch) over(now, limit time.Duration) bool {
	at := s.since.Load()
	return at != 0 && now-time.Duration(at) > limit
}

// age returns the time since the start of the connection.
func (c *conn) age() time.Duration { return time.Since(c.startedAt) }

// watch ends the connection when a timeout expires, and returns when the connection is down. One
// ticker serves all timeouts of the connection, so a call needs no timer.
func (c *conn) watch() {
	tick := c.ticker()
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-tick.C:
			c.checkTimeouts()
		}
	}
}

// waitWorkers waits for the workers after the connection is down. It still applies CallTimeout to
// non-idempotent calls, which continue without the connection.
func (c *conn) waitWorkers() {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.workers.Wait()
	}()
	tick := c.ticker()
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			c.checkCalls(c.age())
		}
	}
}

func (c *conn) ticker() *time.Ticker {
	return time.NewTicker(max(min(c.cfg.IdleTimeout, c.cfg.TransferTimeout, c.cfg.CallTimeout)/checksPerTimeout,
		time.Millisecond))
}

func (c *conn) checkTimeouts() {
	now := c.age()
	c.checkCalls(now)
	for _, x := range c.execs {
		if x.transfer.over(now, c.cfg.TransferTimeout) {
			c.cancel(errStalled)
		}
	}
	// A call may begin after the end of the last call and before the start of the stopwatch.
	if c.running.Load() == 0 && c.idle.over(now, c.cfg.IdleTimeout) {
		c.cancel(errIdle)
	}
}

// checkCalls ends the connection and cancels the calls whose CallTimeout has expired.
func (c *conn) checkCalls(now time.Duration) {
	for _, x := range c.execs {
		if x.calling.over(now, c.cfg.CallTimeout) {
			c.cancel(errNoReply)
			x.cancelDetached()
		}
	}
}

// callBegins stops the idle stopwatch for the first call in progress, and callEnds starts it after
// the last one. As in the Linux server, a discarded Send or an empty RDMA Write is not a call.
//
// callBegins returns false if the server executes no more calls. The client sends the call again on
// its next connection.
func (c *conn) callBegins() bool {
	if !c.inProgress.begin() {
		return false
	}
	c.called.Store(true)
	if c.running.Add(1) == 1 {
		c.idle.stop()
	}
	return true
}

func (c *conn) callEnds() {
	if c.running.Add(-1) == 0 {
		c.idle.start(c.age())
	}
	c.inProgress.end()
}
