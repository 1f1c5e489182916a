package mount

import (
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestHelpNamesDefaults parses each default of the help as an option, which must change nothing.
func TestHelpNamesDefaults(t *testing.T) {
	inParentheses := regexp.MustCompile(` \(([^()]*)\)(?:;.*)?$`)
	checked := 0
	for _, section := range OptionSections() {
		for _, h := range section.Options {
			m := inParentheses.FindStringSubmatch(h.Text)
			if m == nil {
				continue
			}
			value, _, _ := strings.Cut(m[1], ": ")
			value, _, _ = strings.Cut(value, "; ")
			var list []string
			for i, v := range strings.Split(value, ", ") {
				_, err := strconv.Atoi(v)
				switch {
				case slices.Contains(h.Names, v) && optionByName[v].word:
					list = append(list, v)
				case i < len(h.Names) && (err == nil || strings.Contains(h.Syntax, v)):
					list = append(list, h.Names[i]+"="+v)
				}
			}
			if len(list) == 0 {
				continue // a default in words, such as "the server's maximum"
			}
			checked++
			got, err := ParseOptions(DefaultOptions(), strings.Join(list, ","))
			if err != nil || !reflect.DeepEqual(got, DefaultOptions()) {
				t.Errorf("%s: the help gives the default %q: got options %v and error %v, want the defaults", h.Syntax,
					list, got, err)
			}
		}
	}
	if checked < 24 {
		t.Errorf("checked %d defaults, want 24 or more", checked)
	}
}

func TestHelpShowsRanges(t *testing.T) {
	ranges := make(map[string]string)
	for _, section := range OptionSections() {
		for _, h := range section.Options {
			if len(h.Names) == 0 {
				t.Errorf("%s: names no option of the table", h.Syntax)
			}
			if strings.Contains(h.Text, "{") {
				t.Errorf("%s: got text %q, want the range", h.Syntax, h.Text)
			}
			for _, name := range h.Names {
				ranges[name] = h.Range
			}
		}
	}
	for name, want := range map[string]string{"wsize": "4096 to 1048576", "slots": "4 to 1024",
		"acdirmax": "0 to 4194304", "inline": "1024 to 65536", "lookupcache": "", "hard": ""} {
		if got, listed := ranges[name]; got != want || !listed {
			t.Errorf("%s: got range %q, listed %v; want %q", name, got, listed, want)
		}
	}
}
