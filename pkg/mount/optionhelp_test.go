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
