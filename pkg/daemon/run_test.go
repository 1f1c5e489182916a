package daemon

import (
	"slices"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// The warning about mounts of other processes must not name mounts that the daemon continues.
func TestForeignLeavesOutRestoredMounts(t *testing.T) {
	own := []control.MountInfo{{Dir: "/restoring", State: control.StateRestoring},
		{Dir: "/kept", State: control.StateKept}}
	got := foreign([]string{"/restoring", "/killed", "/kept", "/restoring/below"}, own)
	if want := []string{"/killed", "/restoring/below"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
