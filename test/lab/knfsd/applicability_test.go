package knfsd

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// An inapplicableCase does not apply to some setups. doc.go has the same list.
type inapplicableCase struct {
	name             string
	provider, device string // "" is any
	why              string
}

var inapplicableCases = []inapplicableCase{
	{"crc", rdmacore.Name, "", "the device decides on CRCs: siw has a module parameter, RoCE always has a CRC"},
	{"split", rdmacore.Name, "", "the case is about MPA's CRC, and RDMA devices do not connect through a TCP relay"},
	{"remote invalidation", rdmacore.Name, "",
		"neither soft device can offer it to a peer; \"local invalidation\" replaces it"},
	{"local invalidation", softiwarpName, "", "softiwarp offers remote invalidation"},
}

// skipReason returns why a case does not apply to a setup, or "" if it applies.
func (s setup) skipReason(name string) string {
	for _, c := range inapplicableCases {
		if c.name == name && (c.provider == "" || c.provider == s.name) && (c.device == "" || c.device == s.device) {
			return c.why
		}
	}
	return ""
}

// TestInapplicableCasesAreDocumented needs no server. It checks that every inapplicable case
// exists, has a reason, and is listed in doc.go.
func TestInapplicableCasesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(strings.ReplaceAll(string(doc), "//", "")), " ")
	for _, c := range inapplicableCases {
		if !slices.ContainsFunc(cases, func(t testCase) bool { return t.name == c.name }) {
			t.Errorf("unknown case %q", c.name)
		}
		line := c.name + ", with "
		if c.provider != "" {
			line += c.provider
		}
		if c.device != "" {
			line += " on " + c.device
		}
		if line += ": " + c.why; c.why == "" || !strings.Contains(text, line) {
			t.Errorf("doc.go: missing line %q", line)
		}
	}
}
