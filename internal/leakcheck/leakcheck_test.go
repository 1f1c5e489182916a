package leakcheck_test

import (
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
)

// TestReportNamesEveryKind: every kind is named while something of it exists.
func TestReportNamesEveryKind(t *testing.T) {
	if l := leakcheck.Report(); l != "" {
		t.Fatalf("left before the test: %s", l)
	}
	for k := leakcheck.Buffer; k <= leakcheck.Slot; k++ {
		leakcheck.Track(k, 2)
		if l := leakcheck.Report(); !strings.HasPrefix(l, "2 ") || len(l) < 4 || leakcheck.Count(k) != 2 {
			t.Errorf("two of kind %d: %q", k, l)
		}
		leakcheck.Track(k, -2)
	}
}
