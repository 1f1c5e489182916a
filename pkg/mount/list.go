package mount

import (
	"cmp"
	"context"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/metrics"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// List returns all mounts, sorted by mount point. It never waits for a server.
func (t *Table) List() []control.MountInfo {
	all := t.all()
	infos := make([]control.MountInfo, len(all))
	for i := range all {
		infos[i] = all[i].MountInfo
	}
	return infos
}

// A view is a snapshot of an entry.
type view struct {
	control.MountInfo
	instance mountInstance // nil during the build
	stalled  time.Duration // age of the stall; 0 for none
	stalls   uint64
}

// snapshot returns the statistics of a mount that is built.
func (v *view) snapshot() metrics.Snapshot {
	s := v.instance.Snapshot()
	s.Stalled, s.Stalls = v.stalled, v.stalls
	return s
}

func (t *Table) all() []view {
	t.mu.Lock()
	entries := t.everyEntry()
	views := make([]view, len(entries))
	for i, e := range entries {
		views[i] = view{e.info(), e.instance, e.stall.age, e.stalls}
		views[i].NotKept = t.notKept(e)
	}
	t.mu.Unlock()
	slices.SortFunc(views, func(a, b view) int { return cmp.Or(cmp.Compare(a.Dir, b.Dir), a.Since.Compare(b.Since)) })
	return views
}

// everyEntry returns all entries, also detached ones. The caller holds the lock.
func (t *Table) everyEntry() []*entry {
	return slices.AppendSeq(slices.Collect(maps.Values(t.mu.entries)), maps.Keys(t.mu.detached))
}

// info describes e. The caller holds the lock of the table.
func (e *entry) info() control.MountInfo {
	i := control.MountInfo{Dir: e.dir, State: e.state, Since: e.since, Reason: e.reason}
	if e.spec != (Spec{}) { // unknown in StateKept
		i.Spec, i.Options = e.spec.String(), e.opts.String()
	}
	if e.instance != nil {
		e.instance.Describe(&i)
	}
	switch {
	case i.State != control.StateMounted:
	case i.Failure != "":
		i.State = control.StateFailed
	case e.stall.age > 0:
		i.State, i.Reason = control.StateStalled, e.stall.reason
	}
	i.Stalled = e.stall.age.Seconds()
	return i
}

// Status returns the status of the mount at dir, or of all mounts if dir is empty. It never waits
// for a server.
func (t *Table) Status(ctx context.Context, dir string) ([]control.MountStatus, error) {
	return describe(ctx, t, "status", dir, func(v view) control.MountStatus {
		// During the build there are no calls and no history.
		s := control.MountStatus{Calls: []control.PendingCall{}, History: []control.ConnEvent{},
			Numbers: control.Numbers{Metrics: stats.Values{}}}
		if v.instance != nil {
			snap := v.snapshot()
			s = v.instance.Status(&snap)
		}
		s.MountInfo = v.MountInfo
		return s
	})
}

// Stats returns the counters of the mount at dir, or of all mounts if dir is empty. It never waits
// for a server. A mount that is not built yet has none.
func (t *Table) Stats(ctx context.Context, dir string) ([]control.MountStats, error) {
	return describe(ctx, t, "stats", dir, func(v view) control.MountStats {
		s := control.MountStats{Numbers: control.Numbers{Metrics: stats.Values{}}}
		if v.instance != nil {
			snap := v.snapshot()
			s = v.instance.Stats(&snap)
		}
		s.Dir, s.Since, s.Spec, s.State = v.Dir, v.Since, v.Spec, v.State
		return s
	})
}

// Slow returns the slowest calls of the mount at dir, or of all mounts if dir is empty. It never
// waits for a server.
func (t *Table) Slow(ctx context.Context, dir string) ([]control.SlowCalls, error) {
	return describe(ctx, t, "status", dir, func(v view) control.SlowCalls {
		s := control.SlowCalls{Requests: []control.SlowCall{}, Calls: []control.SlowCall{}}
		if v.instance != nil {
			s = v.instance.Slow()
		}
		s.Dir, s.Since = v.Dir, v.Since
		return s
	})
}

// describe calls f for the mount at dir, or for all mounts if dir is empty.
func describe[T any](ctx context.Context, t *Table, operation, dir string, f func(view) T) ([]T, error) {
	switch {
	case dir == "":
	case control.FromGroup(ctx): // dir must be the name in the list
		dir = filepath.Clean(dir)
	default:
		resolved, err := t.resolve(ctx, dir)
		if err != nil {
			return nil, err
		}
		dir = resolved
	}
	all := []T{}
	for _, v := range t.all() {
		if dir == "" || v.Dir == dir {
			all = append(all, f(v))
		}
	}
	switch {
	case dir == "" || len(all) > 0:
		return all, nil
	case control.FromGroup(ctx):
		return nil, control.Errorf(control.CodeNotMounted, "%s %s: not in the list of mounts; use the directory that "+
			"nfsrdmad list shows", operation, dir)
	}
	return nil, notMounted(operation, dir)
}

// Snapshots returns the statistics of all completed mounts. It leaves detached mounts out, because
// their mount point may have another mount.
func (t *Table) Snapshots() []metrics.Snapshot {
	t.mu.Lock()
	views := make([]view, 0, len(t.mu.entries))
	for _, e := range t.mu.entries {
		if e.instance != nil {
			views = append(views, view{instance: e.instance, stalled: e.stall.age, stalls: e.stalls})
		}
	}
	t.mu.Unlock()
	snaps := make([]metrics.Snapshot, len(views))
	for i := range views {
		snaps[i] = views[i].snapshot()
	}
	return snaps
}

// Metrics returns the metrics of all mounts together. They include mounts that have ended.
func (t *Table) Metrics() []stats.Metric {
	const lost = "Written bytes that did not become stable: rejected by a server, or dropped by an unmount."
	all := []stats.Metric{
		stats.New("stall_aborts_total", "Mounts that were aborted because of the mount option stallabort.",
			&t.stallAborts),
		stats.New("write_lost_bytes_total", lost, &t.shared.rejected).With("reason", "rejected"),
		stats.New("write_lost_bytes_total", lost, &t.shared.unmount).With("reason", "unmount"),
	}
	for state, n := range t.states() {
		all = append(all, stats.New("mounts", "Mounts by state.", &n).With("state", state))
	}
	return all
}

// states returns the number of mounts in each state.
func (t *Table) states() map[string]uint64 {
	states := make(map[string]uint64, len(control.MountStates))
	for _, s := range control.MountStates {
		states[string(s)] = 0
	}
	for _, v := range t.all() {
		states[string(v.State)]++
	}
	return states
}
