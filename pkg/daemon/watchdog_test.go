package daemon

import (
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// TestMountProblems checks what the status line says about mounts.
func TestMountProblems(t *testing.T) {
	fine := []control.MountInfo{{Dir: "/a", State: control.StateMounted}, {Dir: "/b", State: control.StateMounting},
		{Dir: "/c", State: control.StateRestoring, Reason: "connects"}, {Dir: "/d", State: control.StateUnmounting}}
	stalled := control.MountInfo{Dir: "/e", State: control.StateStalled, Reason: "no\nreply", Stalled: 61}
	failed := control.MountInfo{Dir: "/f", State: control.StateFailed, Failure: "panic: test"}
	waiting := control.MountInfo{Dir: "/g\xff", State: control.StateRestoring, Reason: "no route", Stalled: 61}
	with := func(more ...control.MountInfo) []control.MountInfo {
		return append(append(fine[:0:0], fine...), more...)
	}
	for want, l := range map[string][]control.MountInfo{
		"":                           with(),
		"/e is stalled: no reply":    with(stalled),
		"/f is failed: panic: test":  with(failed),
		"/g? is restoring: no route": with(waiting),
		"/e is stalled: no reply; 1 more mount does not answer": with(stalled, failed),
		"/e is stalled: no reply; 2 more mounts do not answer":  with(stalled, failed, waiting),
	} {
		if got := mountProblems(l); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
