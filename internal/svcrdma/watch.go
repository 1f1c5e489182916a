package svcrdma

import (
	"errors"
	"sync/atomic"
	"time"
)

// Why the server itself ends a connection.
var (
	errSilent  = errors.New("no call yet, and another client needs the connection")
	errIdle    = errors.New("no call for the idle time limit")
	errNoReply = errors.New("the handler did not answer a call within the time limit")
	errStalled = errors.New("the client did not answer an RDMA Read, or did not take a reply, within the time limit")
)

// watchesPerLimit is how often a time limit is looked at while it runs; a limit is kept to within
// that part of it.
const watchesPerLimit = 8

// A stopwatch is the time at which something began, as one goroutine sets it and another looks at
// it. Zero: it is not under way.
type stopwatch struct{ since atomic.Int64 }

func (s *stopwatch) start(at time.Duration) { s.since.Store(int64(at) + 1) }
func (s *stopwatch) stop()                  { s.since.Store(0) }

// over tells whether it has been under way for longer than limit.
func (s *stopwatch) over(now, limit time.Duration) bool {
	at := s.since.Load()
	return at != 0 && now-time.Duration(at) > limit
}

// age is the connection's own clock.
func (c *conn) age() time.Duration { return time.Since(c.born) }

// watch ends the connection when it is idle or stalled, or its Handler is, and returns when it is
// down. One ticker serves all of a connection's time limits, so that a call sets no timer.
func (c *conn) watch() {
	tick := c.ticker()
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-tick.C:
			c.checkLimits()
		}
	}
}

// waitWorkers waits for the workers of a connection that is down, and still limits the calls that
// outlive it.
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
	return time.NewTicker(max(min(c.cfg.IdleTimeout, c.cfg.TransferTimeout, c.cfg.CallTimeout)/watchesPerLimit,
		time.Millisecond))
}

func (c *conn) checkLimits() {
	now := c.age()
	c.checkCalls(now)
	for _, x := range c.execs {
		if x.transfer.over(now, c.cfg.TransferTimeout) {
			c.cancel(errStalled)
		}
	}
	// A call may begin between the end of the last and the start of the stopwatch.
	if c.running.Load() == 0 && c.idle.over(now, c.cfg.IdleTimeout) {
		c.cancel(errIdle)
	}
}

// checkCalls gives up calls that the Handler does not answer, and the connection with them.
func (c *conn) checkCalls(now time.Duration) {
	for _, x := range c.execs {
		if x.calling.over(now, c.cfg.CallTimeout) {
			c.cancel(errNoReply)
			x.giveUp()
		}
	}
}

// callBegins and callEnds run the idle time limit, which is under way only while no call is being
// served. As with the Linux server, what is no call does not count: not a Send that is discarded,
// not an RDMA Write of no octets.
func (c *conn) callBegins() {
	c.called.Store(true)
	if c.running.Add(1) == 1 {
		c.idle.stop()
	}
}

func (c *conn) callEnds() {
	if c.running.Add(-1) == 0 {
		c.idle.start(c.age())
	}
}
