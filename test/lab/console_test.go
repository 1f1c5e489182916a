package lab

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// TestConsoleDropsEmulatorFaults checks that the log keeps everything but the output of a boot in
// which the emulator caused a kernel error.
func TestConsoleDropsEmulatorFaults(t *testing.T) {
	c := &console{}
	say := func(lines ...string) { c.read(strings.NewReader(strings.Join(lines, "\r\n") + "\r\n")) }
	c.beginBoot("")
	say("one", "LAB ready a")
	if mark := c.mark(); c.dropEmulatorFault(mark) || mark != 2 {
		t.Error("got an emulator fault in a boot without kernel errors")
	}
	for i, boot := range [][]string{{"[ 1.7] Oops: int3: 0000 [#1] PREEMPT SMP", "Kernel panic - not syncing: Fatal"},
		{"Oops: int3: 0000", "LAB ready b"}} {
		mark := c.mark()
		c.note("reset")
		b := c.beginBoot("a")
		say(boot...)
		<-b.settled
		if panicked := errors.Is(b.err, ErrPanic); panicked != (i == 0) {
			t.Errorf("boot %d: got error %v, want a panic: %v", i, b.err, i == 0)
		}
		if !c.dropEmulatorFault(mark) {
			t.Errorf("boot %d: got no emulator fault, want one", i)
		}
		say("---[ end Kernel panic ]---")
	}
	mark := c.mark()
	c.beginBoot("b")
	say("WARNING: two", "Kernel panic - not syncing: another")
	if c.dropEmulatorFault(mark) {
		t.Error("got an emulator fault for an unrelated panic")
	}
	const note = "==== lab: output of a boot dropped: the emulator caused a kernel error"
	want := []string{"one", "LAB ready a", note, note, "WARNING: two", "Kernel panic - not syncing: another"}
	if got := c.text(); !slices.Equal(got, want) {
		t.Errorf("got the log\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestBootRetriesEmulatorFaults checks that a boot is repeated after an emulator fault, at most
// bootTries times.
func TestBootRetriesEmulatorFaults(t *testing.T) {
	for _, faults := range []int{0, 1, bootTries - 1, bootTries} {
		g := &Guest{console: &console{}}
		tries := 0
		err := g.retryEmulatorFaults(func(try int) error {
			if tries++; try != tries {
				t.Errorf("got try number %d, want %d", try, tries)
			}
			b := g.console.beginBoot("")
			if try <= faults {
				g.console.line("Oops: int3: 0000")
				g.console.line("Kernel panic - not syncing")
				return b.err
			}
			return nil
		})
		if want := min(faults+1, bootTries); tries != want || (err != nil) != (faults == bootTries) {
			t.Errorf("%d faulty boots: got %d tries and error %v, want %d tries", faults, tries, err, want)
		}
		if found, _ := kernelErrors(g.console.text(), Options{}); (len(found) > 0) != (faults == bootTries) {
			t.Errorf("%d faulty boots: got kernel errors %q", faults, found)
		}
	}
}
