package kit

import (
	"fmt"
	"strings"
)

// Splice replaces the text between the lines begin and end of a page. If the page has no line
// begin, Splice appends the lines with the text.
func Splice(page, begin, end, text string) (string, error) {
	before, rest, ok := strings.Cut(page, begin)
	_, after, okEnd := strings.Cut(rest, end)
	if !ok {
		return strings.TrimRight(page, "\n") + "\n\n" + begin + text + end, nil
	}
	if !okEnd {
		return "", fmt.Errorf("page with %q has no %q after it", begin, end)
	}
	return before + begin + text + end + after, nil
}
