package pace

import (
	"sync"
	"time"
)

// DefaultPause is the shortest time between two messages of a [Limiter] without a Pause.
const DefaultPause = 10 * time.Second

// A Limiter bounds how often a message is logged whose number another host or a program controls.
// It passes one message, and leaves out those that follow within Pause. Its zero value is ready for
// use. It is safe for concurrent use.
type Limiter struct {
	Pause time.Duration // 0 means DefaultPause

	mu      sync.Mutex // guards the fields below
	next    time.Time
	omitted int
}

// Log passes the message to log, or leaves it out. The argument "omitted" of the next message that
// passes is the number of messages that were left out since the last one.
func (l *Limiter) Log(log func(msg string, args ...any), msg string, args ...any) {
	omitted, pass := l.pass(time.Now())
	if !pass {
		return
	}
	if omitted > 0 {
		args = append(args[:len(args):len(args)], "omitted", omitted)
	}
	log(msg, args...)
}

func (l *Limiter) pass(now time.Time) (omitted int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.next) {
		l.omitted++
		return 0, false
	}
	pause := l.Pause
	if pause == 0 {
		pause = DefaultPause
	}
	omitted, l.omitted, l.next = l.omitted, 0, now.Add(pause)
	return omitted, true
}
