package daemon

import "testing"

// TestMemoryIsReturnedWhenIdle checks that memory is returned once after each load, and not during
// it.
func TestMemoryIsReturnedWhenIdle(t *testing.T) {
	var m memoryReturn
	allocated := uint64(0)
	for i, step := range []struct {
		bytes uint64
		want  bool
	}{
		{worthBytes, false}, // the start of a load
		{10 * worthBytes, false},
		{idleBytes, true},
		{idleBytes, false}, // nothing new to return
		{0, false},
		{worthBytes, false},
		{0, true},
		{idleBytes, false}, {idleBytes, false}, {idleBytes, false}, {idleBytes, true}, // an idle daemon
	} {
		allocated += step.bytes
		if got := m.due(allocated); got != step.want {
			t.Errorf("step %d: got %v, want %v", i, got, step.want)
		}
	}
}
