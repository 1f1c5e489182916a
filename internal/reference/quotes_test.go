package reference

import (
	"slices"
	"syscall"
	"testing"
)

// foreign are messages of other programs that docs/troubleshooting.md quotes.
var foreign = []string{
	"unknown filesystem type 'nfsrdma'", // mount(8)
	"target is busy",                    // umount(8)
}

// TestQuotedMessagesExist checks each message that docs/troubleshooting.md quotes against the texts
// of the source and the errors of the system.
func TestQuotedMessagesExist(t *testing.T) {
	s := source(t)
	texts := s.Texts()
	for i, text := range texts {
		texts[i] = withoutVerbs(text)
	}
	for e := range 134 {
		texts = append(texts, syscall.Errno(e).Error())
	}
	n := 0
	for _, p := range pages(t) {
		if p.Name != "docs/troubleshooting.md" {
			continue
		}
		for _, q := range p.Quotes() {
			n++
			if slices.Contains(foreign, q) {
				continue
			}
			if missing := MissingParts(q, texts); len(missing) > 0 {
				t.Errorf("%s quotes `%s`, but the source does not have %q", p.Name, q, missing)
			}
		}
	}
	if n < 60 {
		t.Errorf("got %d quoted messages, want more; a pattern is wrong", n)
	}
	if len(MissingParts("mount point DIR: this is not a message", texts)) == 0 {
		t.Error("a message that does not exist was found")
	}
}
