package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
)

type locks = nlm.Counters

var lockSeries = []series[locks]{
	{desc("locks_held", "Byte ranges locked at the server."), prometheus.GaugeValue,
		func(l *locks) float64 { return float64(l.Held.Load()) }},
	{desc("locks_pending", "Lock requests that wait."), prometheus.GaugeValue,
		func(l *locks) float64 { return float64(l.Pending.Load()) }},
	counter("locks_granted_total", "Locks granted by the server.", func(l *locks) uint64 { return l.Granted.Load() }),
	counter("locks_denied_total", "Lock requests that conflicted with a lock of another client and did not wait.",
		func(l *locks) uint64 { return l.Denied.Load() }),
	counter("locks_granted_callback_total", "Waiting lock requests granted after a callback of the server.",
		func(l *locks) uint64 { return l.Callbacks.Load() }),
	counter("locks_granted_poll_total", "Waiting lock requests granted after a poll.",
		func(l *locks) uint64 { return l.Polls.Load() }),
	counter("locks_canceled_total", "Waiting lock requests that a signal ended.",
		func(l *locks) uint64 { return l.Canceled.Load() }),
	counter("locks_reclaimed_total", "Locks reclaimed after a restart of the server.",
		func(l *locks) uint64 { return l.Reclaimed.Load() }),
	counter("locks_lost_total", "Locks lost in a restart of the server; I/O of their owners failed.",
		func(l *locks) uint64 { return l.Lost.Load() }),
	counter("lock_service_errors_total", "Lock requests that failed with ENOLCK because the server has no NLM.",
		func(l *locks) uint64 { return l.NoService.Load() }),
}
