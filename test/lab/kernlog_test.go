package lab

import (
	"slices"
	"testing"
)

func TestKernelErrorsExceptExpected(t *testing.T) {
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
		o              Options
		want, expected []string
	}{
		{Options{Kernel: "6.12"}, []string{warning, tail}, nil},
		{Options{Kernel: "6.1"}, []string{tail}, log[1:2]},
		{Options{Kernel: "6.12", ExpectedKernelErrors: []string{`WARNING: .*restrack_clean`, "page fault"}}, nil,
			log[1:3]},
	} {
		if got, expected := kernelErrors(log, c.o); !slices.Equal(got, c.want) || !slices.Equal(expected, c.expected) {
			t.Errorf("%+v: got errors %q and expected errors %q, want %q and %q", c.o, got, expected, c.want,
				c.expected)
		}
	}
}
