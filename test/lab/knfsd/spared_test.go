package knfsd

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// A spared case does not apply to some setups. doc.go has the same list.
type sparedCase struct {
	name             string
	provider, device string // "" is any
	why              string
}

var sparedCases = []sparedCase{
	{"crc", rdmacore.Name, "", "CRCs are the device's affair: siw's module has a parameter, RoCE has one always"},
	{"split", rdmacore.Name, "", "it is about MPA's CRC, and a relay of TCP octets takes no RDMA device"},
	{"remote invalidation", rdmacore.Name, "",
		"neither soft device can offer it to a peer; \"own invalidation\" is the case instead"},
	{"own invalidation", softi, "", "softiwarp offers remote invalidation"},
}

// spares says why a case does not apply to a setup, or nothing.
func (s setup) spares(name string) string {
	for _, c := range sparedCases {
		if c.name == name && (c.provider == "" || c.provider == s.name) && (c.device == "" || c.device == s.device) {
			return c.why
		}
	}
	return ""
}

// TestSpared needs no server: whatever is spared is a case, says why, and stands in doc.go.
func TestSpared(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(strings.ReplaceAll(string(doc), "//", "")), " ")
	for _, c := range sparedCases {
		if !slices.ContainsFunc(cases, func(t testCase) bool { return t.name == c.name }) {
			t.Errorf("%q is no case", c.name)
		}
		line := c.name + ", with "
		if c.provider != "" {
			line += c.provider
		}
		if c.device != "" {
			line += " on " + c.device
		}
		if line += ": " + c.why; c.why == "" || !strings.Contains(text, line) {
			t.Errorf("doc.go does not have the line %q", line)
		}
	}
}
