package nlm

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// Counters count the locks of one Client; Metrics says what each counts. Reading them is safe at
// any time.
type Counters struct {
	Held, Pending                                                           atomic.Int64
	Granted, Denied, Callbacks, Polls, Canceled, Reclaimed, Lost, NoService atomic.Uint64
}

// Metrics returns the counters.
func (c *Counters) Metrics() []stats.Metric {
	return []stats.Metric{
		stats.New("locks_held", "Byte ranges locked at the server.", &c.Held),
		stats.New("locks_pending", "Lock requests that wait.", &c.Pending),
		stats.New("locks_granted_total", "Locks granted by the server.", &c.Granted),
		stats.New("locks_denied_total", "Lock requests that conflicted with a lock of another client and did not wait.",
			&c.Denied),
		stats.New("locks_granted_callback_total", "Waiting lock requests granted after a callback of the server.",
			&c.Callbacks),
		stats.New("locks_granted_poll_total", "Waiting lock requests granted after a poll.", &c.Polls),
		stats.New("locks_canceled_total", "Waiting lock requests that a signal ended.", &c.Canceled),
		stats.New("locks_reclaimed_total", "Locks reclaimed after a restart of the server.", &c.Reclaimed),
		stats.New("locks_lost_total", "Locks lost in a restart of the server; I/O of their owners failed.", &c.Lost),
		stats.New("lock_service_errors_total", "Lock requests that failed with ENOLCK because the server has no NLM.",
			&c.NoService),
	}
}
