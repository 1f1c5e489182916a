package main

import (
	"fmt"
	"os"
	"path"
	"strings"
)

// A rule describes tolerated differences by patterns of path.Match, in which * matches everything
// except a slash.
type rule struct{ op, field, kernel, ours string }

// An entry is a section of KNOWN_DIFFERENCES.md: a heading, the reason, a table of rules, and
// operations in a fenced block that show the difference.
type entry struct {
	name  string
	rules []rule
	ops   []op
}

func (r rule) matches(d *difference) bool {
	for _, m := range []struct{ pattern, s string }{{r.op, d.op.do}, {r.field, d.field}, {r.kernel, d.kernel},
		{r.ours, d.ours}} {
		if ok, err := path.Match(m.pattern, strings.ReplaceAll(m.s, "/", "|")); err != nil || !ok {
			return false
		}
	}
	return true
}

func (e *entry) matches(d *difference) bool {
	for _, r := range e.rules {
		if r.matches(d) {
			return true
		}
	}
	return false
}

// readKnown reads KNOWN_DIFFERENCES.md.
func readKnown(file string) (list []entry, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseKnown(string(text))
}

func parseKnown(text string) (list []entry, err error) {
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
			list = append(list, entry{name: name})
		case len(list) == 0:
		case line == "```" && block != nil:
			if list[len(list)-1].ops, err = parseOps(block.String()); err != nil {
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

// tolerate returns a function that reports whether an entry permits a difference.
func tolerate(list []entry) func(*difference) bool {
	return func(d *difference) bool {
		for i := range list {
			if list[i].matches(d) {
				return true
			}
		}
		return false
	}
}

// checkKnown runs the operations of the entries, and returns the rules whose differences no longer
// occur.
func checkKnown(p *pair, list []entry) (obsolete []string, err error) {
	defer func(was bool) { p.keepGoing = was }(p.keepGoing)
	p.keepGoing = true
	for i := range list {
		e := &list[i]
		_, known, err := p.run(e.ops, func(*difference) bool { return true })
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
				obsolete = append(obsolete, fmt.Sprintf("%s: %s %s: kernel's client %s, ours %s", e.name, r.op, r.field,
					r.kernel, r.ours))
			}
		}
	}
	return obsolete, nil
}
