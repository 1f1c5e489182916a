package differential

import (
	"fmt"
	"os"
	"path"
	"strings"
)

// A rule describes tolerated differences by patterns, in which * matches any text. The pattern op
// matches the text of an operation if the pattern has a space, and otherwise the verb. A pattern
// NAME=VALUE in reference matches the field NAME of the reference.
type rule struct{ op, field, reference, ours string }

// An Entry is a section of KNOWN_DIFFERENCES.md: a heading, the reason, a table of rules, and
// operations in a fenced block that show the difference.
type Entry struct {
	name  string
	rules []rule
	ops   []Op
}

func (r rule) matches(d *Difference) bool {
	op := d.op.do
	if strings.Contains(r.op, " ") {
		op = d.op.String()
	}
	reference := d.reference
	if name, _, ok := strings.Cut(r.reference, "="); ok {
		reference = name + "=" + d.fields[name]
	}
	for _, m := range []struct{ pattern, s string }{{r.op, op}, {r.field, d.field},
		{r.reference, reference}, {r.ours, d.ours}} {
		if ok, err := path.Match(noSlash(m.pattern), noSlash(m.s)); err != nil || !ok {
			return false
		}
	}
	return true
}

// noSlash replaces slashes, which * of path.Match does not match.
func noSlash(s string) string { return strings.ReplaceAll(s, "/", "|") }

func (e *Entry) matches(d *Difference) bool {
	for _, r := range e.rules {
		if r.matches(d) {
			return true
		}
	}
	return false
}

// ReadKnown reads KNOWN_DIFFERENCES.md.
func ReadKnown(file string) (list []Entry, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseKnown(string(text))
}

func parseKnown(text string) (list []Entry, err error) {
	var block *strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if block != nil && line != "```" {
			block.WriteString(line + "\n")
			continue
		}
		name, heading := strings.CutPrefix(line, "## ")
		switch {
		case heading:
			list = append(list, Entry{name: name})
		case len(list) == 0:
		case line == "```" && block != nil:
			if list[len(list)-1].ops, err = ParseOps(block.String()); err != nil {
				return nil, fmt.Errorf("parse known difference %q: %w", list[len(list)-1].name, err)
			}
			block = nil
		case line == "```":
			block = new(strings.Builder)
		case strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "|---") &&
			!strings.HasPrefix(line, "| operation "):
			cells := strings.Split(strings.Trim(line, "|"), "|")
			if len(cells) != 4 {
				return nil, fmt.Errorf("parse known difference %q: got a row of %d cells, want 4: %q",
					list[len(list)-1].name, len(cells), line)
			}
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			e := &list[len(list)-1]
			e.rules = append(e.rules, rule{cells[0], cells[1], cells[2], cells[3]})
		}
	}
	for _, e := range list {
		if len(e.rules) == 0 || len(e.ops) == 0 {
			return nil, fmt.Errorf("parse known difference %q: missing table or operations", e.name)
		}
	}
	return list, nil
}

// Tolerate returns a function that reports whether an entry permits a difference.
func Tolerate(list []Entry) func(*Difference) bool {
	return func(d *Difference) bool {
		for i := range list {
			if list[i].matches(d) {
				return true
			}
		}
		return false
	}
}

// CheckKnown runs the operations of the entries, and returns the rules whose differences no longer
// occur.
func CheckKnown(p *Pair, list []Entry) (obsolete []string, err error) {
	defer func(was bool) { p.keepGoing = was }(p.keepGoing)
	p.keepGoing = true
	for i := range list {
		e := &list[i]
		_, known, err := p.Run(e.ops, func(*Difference) bool { return true })
		if err != nil {
			return nil, err
		}
		differs := make(map[rule]bool)
		for _, d := range known {
			for _, r := range e.rules {
				if r.matches(&d) {
					differs[r] = true
				}
			}
		}
		for _, r := range e.rules {
			if !differs[r] {
				obsolete = append(obsolete, fmt.Sprintf("%s: %s %s: reference %s, ours %s", e.name, r.op, r.field,
					r.reference, r.ours))
			}
		}
	}
	return obsolete, nil
}

// CheckPermitted runs the operations of the entries as Run runs random ones, and returns the
// differences that no rule permits.
func CheckPermitted(p *Pair, list []Entry) (unknown []string, err error) {
	for i := range list {
		found, _, err := p.Run(list[i].ops, Tolerate(list))
		if err != nil {
			return nil, err
		}
		if found != nil {
			unknown = append(unknown, fmt.Sprintf("%s: %v", list[i].name, found))
		}
	}
	return unknown, nil
}
