package oomscore

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestAdjust begins with a score that needs no privilege to be lowered again.
func TestAdjust(t *testing.T) {
	before, err := os.ReadFile(file)
	kit.Must(t, err)
	t.Cleanup(func() { kit.Must(t, os.WriteFile(file, before, 0)) })
	kit.Must(t, os.WriteFile(file, []byte("300"), 0))
	for _, step := range []struct {
		add  int
		want string
	}{{-100, "200\n"}, {900, "1000\n"}, {-50, "950\n"}} {
		kit.Must(t, Adjust(step.add))
		if got, err := os.ReadFile(file); err != nil || string(got) != step.want {
			t.Errorf("after %+d: got score %q, %v; want %q", step.add, got, err, step.want)
		}
	}
}
