package testutil

import (
	"os"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
)

// TestLeaksAreFound: each kind of thing left behind fails the check that Main makes.
func TestLeaksAreFound(t *testing.T) {
	before := openDescriptors()
	if code := checkLeaks(before, nil, leakTimeout); code != 0 {
		t.Fatalf("nothing is left, and the check says %d", code)
	}
	for name, leak := range map[string]func() func(){
		"MR": func() func() {
			leakcheck.Track(leakcheck.MR, 1)
			return func() { leakcheck.Track(leakcheck.MR, -1) }
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
			t.Errorf("a %s was left and not found", name)
		}
		undo()
	}
}
