package lab

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// TestTripped leaves out of the log what a kernel says that tripped over the emulator, and nothing
// else.
func TestTripped(t *testing.T) {
	c := &console{}
	say := func(lines ...string) { c.read(strings.NewReader(strings.Join(lines, "\r\n") + "\r\n")) }
	c.expect("")
	say("one", "LAB ready a")
	if mark := c.mark(); c.forgetTripped(mark) || mark != 2 {
		t.Error("a kernel that said nothing has tripped")
	}
	for i, boot := range [][]string{{"[ 1.7] Oops: int3: 0000 [#1] PREEMPT SMP", "Kernel panic - not syncing: Fatal"},
		{"Oops: int3: 0000", "LAB ready b"}} {
		mark := c.mark()
		c.note("reset")
		b := c.expect("a")
		say(boot...)
		<-b.settled
		if panicked := errors.Is(b.err, ErrPanic); panicked != (i == 0) {
			t.Errorf("boot %d: %v", i, b.err)
		}
		if !c.forgetTripped(mark) {
			t.Errorf("boot %d has not tripped", i)
		}
		say("---[ end Kernel panic ]---")
	}
	mark := c.mark()
	c.expect("b")
	say("WARNING: two", "Kernel panic - not syncing: another")
	if c.forgetTripped(mark) {
		t.Error("a panic of another kind is taken for the emulator's")
	}
	const note = "==== lab: a boot that does not count: its kernel tripped over the emulator"
	want := []string{"one", "LAB ready a", note, note, "WARNING: two", "Kernel panic - not syncing: another"}
	if got := c.text(); !slices.Equal(got, want) {
		t.Errorf("the log is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestUntripped boots again while the kernel trips, but not for ever.
func TestUntripped(t *testing.T) {
	for _, trips := range []int{0, 1, bootTries - 1, bootTries} {
		g := &Guest{console: &console{}}
		tries := 0
		err := g.untripped(func(try int) error {
			if tries++; try != tries {
				t.Errorf("try %d is called %d", tries, try)
			}
			b := g.console.expect("")
			if try <= trips {
				g.console.line("Oops: int3: 0000")
				g.console.line("Kernel panic - not syncing")
				return b.err
			}
			return nil
		})
		if want := min(trips+1, bootTries); tries != want || (err != nil) != (trips == bootTries) {
			t.Errorf("%d boots that trip: %d tries, %v", trips, tries, err)
		}
		if found, _ := complaints(g.console.text(), Options{}); (len(found) > 0) != (trips == bootTries) {
			t.Errorf("%d boots that trip: complaints %q", trips, found)
		}
	}
}
