package mount

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParseAddrList(t *testing.T) {
	for _, c := range []struct {
		text string
		want string // the addresses
		back string // the text of the list, if it differs
	}{
		{"192.0.2.1", "192.0.2.1", ""},
		{"192.0.2.9-192.0.2.11", "192.0.2.9 192.0.2.10 192.0.2.11", ""},
		{"192.0.2.255~192.0.3.0", "192.0.2.255 192.0.3.0", ""},
		{"192.0.2.2~192.0.2.1~192.0.2.5-192.0.2.6", "192.0.2.2 192.0.2.1 192.0.2.5 192.0.2.6", ""},
		{"192.0.2.2~192.0.2.3", "192.0.2.2 192.0.2.3", "192.0.2.2-192.0.2.3"},
		{"255.255.255.253-255.255.255.254", "255.255.255.253 255.255.255.254", ""},
		{"2001:db8::fe-2001:db8::100~192.0.2.1", "2001:db8::fe 2001:db8::ff 2001:db8::100 192.0.2.1", ""},
		{"2001:db8::ffff~2001:db8::1:0", "2001:db8::ffff 2001:db8::1:0", ""},
		{"::ffff:192.0.2.1", "192.0.2.1", "192.0.2.1"},
	} {
		l, err := parseAddrList(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if got := strings.Trim(fmt.Sprint([]netip.Addr(l)), "[]"); got != c.want {
			t.Errorf("%s: got %s, want %s", c.text, got, c.want)
		}
		if c.back == "" {
			c.back = c.text
		}
		if l.String() != c.back {
			t.Errorf("%s: got text %s, want %s", c.text, l, c.back)
		}
	}
	if l, err := parseAddrList("192.0.2.1-192.0.2.64"); err != nil || len(l) != maxAddresses {
		t.Errorf("64 addresses: got %d, %v", len(l), err)
	}
}

func TestParseAddrListErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     `"" is not an IP address`,
		"dns":                                  "list the addresses",
		"192.0.2.1~":                           `"" is not an IP address`,
		"192.0.2.1-2":                          `"2" is not an IP address`,
		"192.0.2.1-192.0.3.1":                  "differ before their last part",
		"2001:db8::1-2001:db8::1:1":            "differ before their last part",
		"192.0.2.2-192.0.2.1":                  "last address first",
		"192.0.2.1-192.0.2.65":                 "more than 64 addresses",
		"192.0.2.1-192.0.2.3~::ffff:192.0.2.2": "192.0.2.2 is given twice",
		"fe80::1%eth0":                         "link-local",
		"0.0.0.0":                              "not the address of a host",
		"ff02::1":                              "not the address of a host",
		"192.0.2.1:20049":                      "is not an IP address",
	} {
		l, err := parseAddrList(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, %v; want an error with %q", text, l, err, want)
		}
	}
}

// FuzzParseAddrList checks the bounds of each list, and that its text parses to the same list.
func FuzzParseAddrList(f *testing.F) {
	for _, s := range []string{"192.0.2.1-192.0.2.8", "192.0.2.9~2001:db8::1-2001:db8::3", "dns",
		"255.255.255.254-255.255.255.255",
		"fe80::1%a-b", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := parseAddrList(text)
		if err != nil {
			return
		}
		if len(l) == 0 || len(l) > maxAddresses {
			t.Fatalf("%q: got %d addresses", text, len(l))
		}
		sorted := slices.Clone(l)
		slices.SortFunc(sorted, netip.Addr.Compare)
		if len(slices.Compact(sorted)) != len(l) {
			t.Fatalf("%q: got an address twice in %v", text, l)
		}
		back, err := parseAddrList(l.String())
		if err != nil || !reflect.DeepEqual(back, l) {
			t.Fatalf("%q: text %q parses to %v, %v; want %v", text, l, back, err, l)
		}
	})
}
