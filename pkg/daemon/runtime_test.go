package daemon

import (
	"runtime"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestSetProcs checks that the process gets one P more than Go's default, except when the
// environment sets GOMAXPROCS.
func TestSetProcs(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	for _, c := range []struct {
		env  string
		want int
	}{
		{"", before + 1},
		{"5", before}, // the Go runtime has read it at the start
	} {
		runtime.GOMAXPROCS(before)
		t.Setenv("GOMAXPROCS", c.env)
		SetProcs()
		if got := runtime.GOMAXPROCS(0); got != c.want {
			t.Errorf("GOMAXPROCS with %q in the environment: got %d, want %d", c.env, got, c.want)
		}
	}
}
