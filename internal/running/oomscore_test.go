package running

import (
	"os"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestAdjustOOMScore begins with a score that needs no privilege to be lowered again.
func TestAdjustOOMScore(t *testing.T) {
	before, err := os.ReadFile(scoreFile)
	kit.Must(t, err)
	t.Cleanup(func() { kit.Must(t, os.WriteFile(scoreFile, before, 0)) })
	kit.Must(t, os.WriteFile(scoreFile, []byte("300"), 0))
	for _, step := range []struct {
		add  int
		want string
	}{{-100, "200\n"}, {900, "1000\n"}, {-50, "950\n"}} {
		kit.Must(t, AdjustOOMScore(step.add))
		if got, err := os.ReadFile(scoreFile); err != nil || string(got) != step.want {
			t.Errorf("after %+d: got score %q, %v; want %q", step.add, got, err, step.want)
		}
	}
}
