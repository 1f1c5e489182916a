package docs

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

var (
	// duration matches a time with its unit, which depends on the machine.
	duration = regexp.MustCompile(`\b\d+(\.\d+)? ?(ns|µs|ms|s|min|h)\b`)
	number   = regexp.MustCompile(`\d+(\.\d+)*`)
	rule     = regexp.MustCompile(`[ \t]+`)
)

// shape returns a line without what differs between runs: numbers, times, and the width of columns.
func shape(line string) string {
	line = number.ReplaceAllString(duration.ReplaceAllString(line, "TIME"), "N")
	return strings.TrimSpace(rule.ReplaceAllString(line, " "))
}

// sameShape returns an error if output does not have the lines of the documented output, in order.
// A documented line "..." stands for any number of lines. Empty lines do not count.
func sameShape(output, documented string) error {
	have := shapes(output)
	skip := false
	for _, want := range shapes(documented) {
		if want == "..." {
			skip = true
			continue
		}
		i := 0
		for skip && i < len(have) && have[i] != want {
			i++
		}
		if i >= len(have) || have[i] != want {
			return fmt.Errorf("want the line %q", want)
		}
		have, skip = have[i+1:], false
	}
	if len(have) > 0 && !skip {
		return fmt.Errorf("the page does not show the line %q", have[0])
	}
	return nil
}

func shapes(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if s := shape(line); s != "" {
			all = append(all, s)
		}
	}
	return all
}

func TestSameShape(t *testing.T) {
	for _, tt := range []struct {
		output, documented string
		same               bool
	}{
		{"a 1\nb 22\n", "a 333\nb 4\n", true},
		{"a   1.5 ms\n", "a 2 s\n", true},
		{"a\nb\nc\n", "a\n...\nc\n", true},
		{"a\nb\n", "a\n", false},
		{"a\n", "a\nb\n", false},
		{"a\nb\n", "...\n", true},
		{"a\nb\n", "a\n...\nc\n", false},
		{"", "", true},
	} {
		if err := sameShape(tt.output, tt.documented); (err == nil) != tt.same {
			t.Errorf("%q and %q: got %v, want same %v", tt.output, tt.documented, err, tt.same)
		}
	}
}
