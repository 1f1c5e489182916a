package xprt

import (
	"context"
	"time"
)

// connectWorker owns the connection: it puts cn up, waits for its end, takes it down, and makes the next, until the transport is closed.
func (t *Transport) connectWorker(cn *conn) {
	defer t.workers.Done()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-t.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	pause := time.Duration(0)
	for {
		t.install(cn)
		select {
		case <-cn.dead:
		case <-t.closing:
		}
		answered := cn.replied.Load()
		t.uninstall(cn)
		if ctx.Err() != nil || isClosed(t.closing) {
			return
		}
		t.log.Warn("connection lost", "server", t.cfg.Addr, "error", cn.err)
		if answered {
			pause = 0 // it worked: the loss is worth an immediate try
		} else {
			pause = t.backOff(pause)
		}
		if cn = t.reconnect(ctx, pause); cn == nil {
			return
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (t *Transport) backOff(last time.Duration) time.Duration {
	return min(max(2*last, t.cfg.ReconnectMin), t.cfg.ReconnectMax)
}

// reconnect tries until there is a connection, or the transport is closed (nil).
func (t *Transport) reconnect(ctx context.Context, pause time.Duration) *conn {
	for {
		if pause > 0 {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return nil
			}
		}
		t.setState("connecting", nil)
		cn, err := t.dial(ctx)
		if err == nil {
			return cn
		}
		if ctx.Err() != nil {
			return nil
		}
		pause = t.backOff(pause)
		t.setState("disconnected", err)
		t.log.Warn("reconnect failed", "server", t.cfg.Addr, "error", err, "next", pause)
	}
}

// install puts a new connection up, with one credit.
func (t *Transport) install(cn *conn) {
	t.send.Lock()
	if t.cfg.WritePad {
		if err := cn.registerPad(); err != nil {
			cn.fail(err)
		}
	}
	t.conn.Store(cn)
	t.send.Unlock()
	t.stats.connects.Add(1)
	t.setState("connected", nil)
	t.log.Info("connected", "server", t.cfg.Addr, "device", cn.id.Device().Attrs().Name, "inline_send", cn.inlineSend, "inline_recv", cn.inlineRecv, "slots", cn.params.Slots)
	t.window.reset(1)
}

// uninstall takes the connection down. With the send lock held for writing no call is being marshaled; the queues are drained
// and everything is destroyed before any call hears of it, so each finds its memory fenced (S16).
func (t *Transport) uninstall(cn *conn) {
	t.window.reset(0)
	t.send.Lock()
	defer t.send.Unlock()
	cn.fail(ErrClosed)
	t.setState("disconnected", cn.err)
	t.release(cn)
	t.conn.Store(nil)
	for _, s := range t.slots {
		s.connectionEnded()
	}
}

// watch ends connections whose calls wait too long, and the calls of soft mounts whose time is over.
func (t *Transport) watch() {
	defer t.workers.Done()
	tick := time.NewTicker(min(max(t.cfg.Timeout/8, time.Millisecond), time.Second))
	defer tick.Stop()
	for {
		select {
		case <-t.closing:
			return
		case now := <-tick.C:
			for _, s := range t.slots {
				t.checkSlot(s, now)
			}
		}
	}
}

func (t *Transport) checkSlot(s *slot, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case slotSent, slotFencing, slotAbandoned:
		if waited := now.Sub(s.sentAt); waited > t.cfg.Timeout && s.conn != nil && !s.late {
			t.stats.timeouts.Add(1)
			s.conn.fail(&TimeoutError{Server: t.cfg.Addr.String(), After: waited})
		}
	}
	if t.cfg.Recovery == Hard || s.state == slotIdle {
		return
	}
	if now.Sub(s.started) > t.cfg.Timeout*time.Duration(t.cfg.Retrans+1) {
		s.expired.Store(true)
		s.signal()
	}
}
