// Package statview turns the counters of mounts into rates and latencies, and shows them as text or
// in a full-screen terminal view with plots.
//
// [Between] compares two readings of the counters. [Report.Text] prints the result for humans, and
// its JSON form is the output of "nfsrdmad stats --output json". [Watch] is the terminal view.
package statview

import (
	"cmp"
	"slices"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// A Report describes one mount during an interval. All rates are per second.
type Report struct {
	Dir   string             `json:"dir"`
	Spec  string             `json:"spec"`
	State control.MountState `json:"state"`
	// Interval is the length of the interval in seconds.
	Interval float64 `json:"interval_seconds"`

	ReadBytes    float64 `json:"read_bytes_per_second"`       // returned to programs
	WrittenBytes float64 `json:"written_bytes_per_second"`    // received from programs
	SentBytes    float64 `json:"write_sent_bytes_per_second"` // accepted by the server
	Requests     float64 `json:"requests_per_second"`         // FUSE requests
	RPCs         float64 `json:"rpcs_per_second"`

	Operations []Latency `json:"operations"` // FUSE requests, the most frequent first
	Procedures []Latency `json:"procedures"` // RPCs, the most frequent first
	// All has the times of all FUSE requests.
	All Latency `json:"all_operations"`

	// Metrics are how much each counter of control.Numbers has grown, and the gauges at the end of
	// the interval, as MRs.
	Metrics stats.Values      `json:"metrics"`
	MRs     map[string]uint64 `json:"mrs"`

	Processes []Use `json:"processes"` // that made requests, the busiest first
	Users     []Use `json:"users"`
}

// A Latency describes the calls of one procedure or the requests of one operation. Times are in
// seconds. A percentile is interpolated in its bucket, as Prometheus does.
type Latency struct {
	Name   string  `json:"name"`
	Rate   float64 `json:"per_second"`
	Errors float64 `json:"errors_per_second"`
	Mean   float64 `json:"mean_seconds"`
	P50    float64 `json:"p50_seconds"`
	P90    float64 `json:"p90_seconds"`
	P99    float64 `json:"p99_seconds"`
}

// A Use describes what one process or one user did. All rates are per second.
type Use struct {
	PID     uint32 `json:"pid,omitempty"` // 0 for a user, the kernel, and processes of another PID namespace
	Command string `json:"command,omitempty"`
	UID     uint32 `json:"uid"`

	Requests     float64 `json:"requests_per_second"`
	ReadBytes    float64 `json:"read_bytes_per_second"`
	WrittenBytes float64 `json:"written_bytes_per_second"`
	// Pending is the mean number of requests that were pending.
	Pending float64 `json:"mean_pending"`
}

// Counters that never fall while a mount exists.
const (
	readBytes    = "read_bytes_total"
	writtenBytes = "written_bytes_total"
	sends        = "rpc_sends_total"
)

// Between returns the report of the interval between two readings of one mount. A before without
// counters gives the report since the counters of now began. So does a before from a daemon or a
// mount that has ended, because its counters are larger or older.
func Between(before, now *control.MountStats) Report {
	interval := now.Uptime - before.Uptime
	if interval <= 0 || before.Key() != now.Key() ||
		slices.ContainsFunc([]string{readBytes, writtenBytes, sends}, func(name string) bool {
			return before.Metrics[name] > now.Metrics[name]
		}) {
		before, interval = &control.MountStats{}, now.Uptime
	}
	m := now.Metrics.Since(before.Metrics)
	r := Report{Dir: now.Dir, Spec: now.Spec, State: now.State, Interval: interval, Metrics: m, MRs: now.MRs,
		ReadBytes: perSecond(m[readBytes], interval), WrittenBytes: perSecond(m[writtenBytes], interval),
		SentBytes: perSecond(m["write_sent_bytes_total"], interval), RPCs: perSecond(m[sends], interval)}
	var all control.OperationStats
	r.Operations, all = latencies(before.Operations, now.Operations, now.Bounds, interval)
	r.All = latency(&all, now.Bounds, interval)
	r.Requests = r.All.Rate
	r.Procedures, _ = latencies(before.Procedures, now.Procedures, now.Bounds, interval)
	r.Processes = uses(before.Processes, now.Processes, interval)
	r.Users = uses(before.Users, now.Users, interval)
	return r
}

func perSecond(n, interval float64) float64 {
	if interval <= 0 {
		return 0
	}
	return max(n, 0) / interval
}

// latencies returns the calls between two readings, and their sum.
func latencies(before, now []control.OperationStats, bounds []float64, interval float64) ([]Latency,
	control.OperationStats) {
	old := make(map[string]*control.OperationStats)
	for i := range before {
		old[before[i].Name] = &before[i]
	}
	l := []Latency{}
	all := control.OperationStats{Buckets: make([]uint64, len(bounds))}
	for i := range now {
		d := difference(old[now[i].Name], &now[i])
		if d.Count == 0 {
			continue
		}
		l = append(l, latency(&d, bounds, interval))
		all.Count += d.Count
		all.Errors += d.Errors
		all.Seconds += d.Seconds
		for i := range all.Buckets {
			all.Buckets[i] += d.Buckets[i]
		}
	}
	slices.SortFunc(l, func(a, b Latency) int {
		return cmp.Or(cmp.Compare(b.Rate, a.Rate), cmp.Compare(a.Name, b.Name))
	})
	return l, all
}

// difference returns b - a. a is nil if there were no calls.
func difference(a, b *control.OperationStats) control.OperationStats {
	d := *b
	if a == nil || len(a.Buckets) != len(b.Buckets) || a.Count > b.Count {
		return d
	}
	d.Count, d.Errors, d.Seconds = b.Count-a.Count, b.Errors-min(a.Errors, b.Errors), b.Seconds-a.Seconds
	d.Buckets = make([]uint64, len(b.Buckets))
	for i := range d.Buckets {
		d.Buckets[i] = b.Buckets[i] - min(a.Buckets[i], b.Buckets[i])
	}
	return d
}

func latency(d *control.OperationStats, bounds []float64, interval float64) Latency {
	l := Latency{Name: d.Name, Rate: perSecond(float64(d.Count), interval),
		Errors: perSecond(float64(d.Errors), interval)}
	if d.Count > 0 {
		l.Mean = max(d.Seconds, 0) / float64(d.Count)
		l.P50, l.P90, l.P99 = quantile(d, bounds, 0.5), quantile(d, bounds, 0.9), quantile(d, bounds, 0.99)
	}
	return l
}

// quantile returns a quantile of the times, from 0 to 1. It is the last bound for a time above it.
func quantile(d *control.OperationStats, bounds []float64, q float64) float64 {
	rank, below, from := q*float64(d.Count), 0.0, 0.0
	for i, n := range d.Buckets[:min(len(d.Buckets), len(bounds))] {
		if n := float64(n); n > 0 && below+n >= rank {
			return from + (bounds[i]-from)*(rank-below)/n
		}
		below, from = below+float64(n), bounds[i]
	}
	return from
}

// A consumer identifies a process or a user.
type consumer struct {
	pid, uid uint32
	command  string
}

func uses(before, now []control.Usage, interval float64) []Use {
	old := make(map[consumer]control.Usage)
	for _, u := range before {
		old[consumer{u.PID, u.UID, u.Command}] = u
	}
	l := []Use{}
	for _, u := range now {
		a := old[consumer{u.PID, u.UID, u.Command}]
		if a.Requests > u.Requests {
			a = control.Usage{} // the daemon dropped it and counts again
		}
		if u.Requests == a.Requests {
			continue
		}
		l = append(l, Use{PID: u.PID, Command: u.Command, UID: u.UID,
			Requests:     perSecond(float64(u.Requests-a.Requests), interval),
			ReadBytes:    perSecond(float64(u.ReadBytes)-float64(a.ReadBytes), interval),
			WrittenBytes: perSecond(float64(u.WrittenBytes)-float64(a.WrittenBytes), interval),
			Pending:      perSecond(u.Seconds-a.Seconds, interval)})
	}
	slices.SortStableFunc(l, func(a, b Use) int {
		return cmp.Or(cmp.Compare(b.Pending, a.Pending), cmp.Compare(a.PID, b.PID))
	})
	return l
}
