package lab

import (
	"slices"
	"testing"
)

func TestComplaintLines(t *testing.T) {
	log := []string{
		"[    1.0] clocksource: Switched to clocksource tsc",
		"[    2.0] WARNING: CPU: 0 PID: 7 at drivers/infiniband/core/restrack.c:132 restrack_clean",
		"[    3.0] BUG: unable to handle page fault for address: 0",
		"[    3.1] Call Trace:",
		"[    4.0] nothing",
	}
	tail := "[    3.0] BUG: unable to handle page fault for address: 0\n[    3.1] Call Trace:\n[    4.0] nothing"
	warning := log[1] + "\n" + tail
	for _, c := range []struct {
		o    Options
		want []string
	}{
		{Options{Kernel: "6.12"}, []string{warning, tail}},
		{Options{Kernel: "6.1"}, []string{tail}},
		{Options{Kernel: "6.12", Complaints: []string{`WARNING: .*restrack_clean`, "page fault"}}, nil},
	} {
		if got := complaints(log, c.o); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.o, got, c.want)
		}
	}
}
