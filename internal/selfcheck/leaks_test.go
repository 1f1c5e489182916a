package selfcheck_test

import (
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
)

func TestLeaksNamesEveryKind(t *testing.T) {
	if l := selfcheck.Leaks(); l != "" {
		t.Fatalf("report before the test: got %q, want none", l)
	}
	for k := selfcheck.Buffer; k <= selfcheck.Slot; k++ {
		selfcheck.Track(k, 2)
		if l := selfcheck.Leaks(); !strings.HasPrefix(l, "2 ") || len(l) < 4 || selfcheck.Count(k) != 2 {
			t.Errorf("report with two resources of kind %d: got %q and count %d, want \"2 NAME\" and 2", k, l,
				selfcheck.Count(k))
		}
		selfcheck.Track(k, -2)
	}
}
