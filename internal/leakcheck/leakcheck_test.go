package leakcheck_test

import (
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
)

func TestReportNamesEveryKind(t *testing.T) {
	if l := leakcheck.Report(); l != "" {
		t.Fatalf("report before the test: got %q, want none", l)
	}
	for k := leakcheck.Buffer; k <= leakcheck.Slot; k++ {
		leakcheck.Track(k, 2)
		if l := leakcheck.Report(); !strings.HasPrefix(l, "2 ") || len(l) < 4 || leakcheck.Count(k) != 2 {
			t.Errorf("report with two resources of kind %d: got %q and count %d, want \"2 NAME\" and 2", k, l,
				leakcheck.Count(k))
		}
		leakcheck.Track(k, -2)
	}
}
