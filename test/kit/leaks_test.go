package kit

import (
	"os"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
)

func TestCheckLeaksFindsEveryKind(t *testing.T) {
	before := openDescriptors()
	if code := checkLeaks(before, nil, leakTimeout); code != 0 {
		t.Fatalf("exit code without a leak: got %d, want 0", code)
	}
	for name, leak := range map[string]func() func(){
		"MR": func() func() {
			selfcheck.Track(selfcheck.MR, 1)
			return func() { selfcheck.Track(selfcheck.MR, -1) }
		},
		"goroutine": func() func() {
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() { defer close(stopped); <-stop }()
			return func() { close(stop); <-stopped }
		},
		"descriptor": func() func() {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			return func() { f.Close() }
		},
	} {
		undo := leak()
		if code := checkLeaks(before, nil, 200*time.Millisecond); code == 0 {
			t.Errorf("exit code with a leaked %s: got 0, want 1", name)
		}
		undo()
	}
}
