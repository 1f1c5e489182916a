package lab

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// TestConsole checks when a boot is settled, and that the log keeps all lines.
func TestConsole(t *testing.T) {
	c := &console{}
	for _, tt := range []struct {
		last, line string // ID of the boot before, and what the guest prints
		id         string // empty: not settled
		err        error
	}{
		{"", "LAB ready a", "a", nil},
		{"a", "LAB ready a", "", nil}, // late output of the boot before
		{"a", "LAB ready b", "b", nil},
		{"b", "[ 1.7] Kernel panic - not syncing: Fatal exception", "", ErrPanic},
	} {
		b := c.beginBoot(tt.last)
		c.read(strings.NewReader(tt.line + "\r\n"))
		settled := false
		select {
		case <-b.settled:
			settled = true
		default:
		}
		if settled != (tt.id != "" || tt.err != nil) || b.id != tt.id || !errors.Is(b.err, tt.err) {
			t.Errorf("%s after boot %q: got settled %t, ID %q, error %v; want ID %q, error %v", tt.line, tt.last,
				settled, b.id, b.err, tt.id, tt.err)
		}
	}
	want := []string{"LAB ready a", "LAB ready a", "LAB ready b", "[ 1.7] Kernel panic - not syncing: Fatal exception"}
	if got := c.text(); !slices.Equal(got, want) {
		t.Errorf("got the log %q, want %q", got, want)
	}
}
