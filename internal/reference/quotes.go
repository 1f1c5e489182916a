package reference

import (
	"regexp"
	"slices"
	"strings"
)

var (
	// firstCell matches the first cell of a row.
	firstCell = regexp.MustCompile("^\\| (`[^|]*`) \\|")
	// logged matches a message after words that announce it.
	logged = regexp.MustCompile("(?:the log|The log|status` |commands|stop:) (?:of the (?:next|earlier) daemon )?" +
		"(?:has|have|says|show)\\s+`([^`]+)`(?:(?:,| or|, or) `([^`]+)`)?")
	// listed matches a message at the start of an item of a list.
	listed = regexp.MustCompile("(?m)^- `([^`]+)`:")
	// separator matches what separates the parts of a message: placeholders, colons and semicolons.
	separator = regexp.MustCompile(`\b(?:SOCKET|FILE|LINE|KEY|NAME|DIR|TYPE|EXPORT|VERB|[ADNP])\b|\.\.\.|[:;"]`)
)

// Quotes returns the messages that the page quotes: the first cells of tables with the head
// "message", items of lists that begin with one, and texts that the log has.
func (p *Page) Quotes() []string {
	var all []string
	inTable := false
	for line := range strings.Lines(p.Text) {
		if !strings.HasPrefix(line, "|") {
			inTable = false
		}
		if strings.HasPrefix(line, "| message ") {
			inTable = true
		}
		if m := firstCell.FindStringSubmatch(line); inTable && m != nil {
			for _, span := range inline.FindAllStringSubmatch(m[1], -1) {
				all = append(all, span[1])
			}
		}
	}
	for _, m := range listed.FindAllStringSubmatch(p.Text, -1) {
		all = append(all, strings.Join(strings.Fields(m[1]), " "))
	}
	for _, m := range logged.FindAllStringSubmatch(strings.Join(strings.Fields(p.Text), " "), -1) {
		all = append(all, m[1])
		if m[2] != "" {
			all = append(all, m[2])
		}
	}
	return all
}

// MissingParts returns the parts of a quoted message that no text has. The parts are those between
// placeholders, colons and semicolons.
func MissingParts(quoted string, texts []string) []string {
	var missing []string
	longest := 0
	for _, part := range separator.Split(quoted, -1) {
		part = strings.TrimSpace(part)
		longest = max(longest, len(part))
		if part != "" && !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, part) }) {
			missing = append(missing, part)
		}
	}
	if longest < 10 {
		missing = append(missing, quoted) // too short to mean anything
	}
	return missing
}
