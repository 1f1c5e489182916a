package mount

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxAddresses is the maximum number of addresses of the option remoteports.
const maxAddresses = 64

// An addrList is the value of the option remoteports: addresses of one server. Its text has the
// form of VAST's NFS client: addresses and ranges FIRST-LAST, separated by "~".
type addrList []netip.Addr

// parseAddrList parses the text of an addrList.
func parseAddrList(text string) (addrList, error) {
	if text == "dns" {
		return nil, fmt.Errorf("dns is not supported; list the addresses")
	}
	var l addrList
	for part := range strings.SplitSeq(text, "~") {
		first, last, isRange := strings.Cut(part, "-")
		a, err := parseServerAddr(first)
		if err != nil {
			return nil, err
		}
		b := a
		if isRange {
			if b, err = parseServerAddr(last); err != nil {
				return nil, err
			}
			if !sameBlock(a, b) {
				return nil, fmt.Errorf("the addresses of the range %s differ before their last part", part)
			}
			if b.Less(a) {
				return nil, fmt.Errorf("the range %s has its last address first", part)
			}
		}
		for ; a.Compare(b) <= 0; a = a.Next() {
			if slices.Contains(l, a) {
				return nil, fmt.Errorf("%s is given twice", a)
			}
			if len(l) == maxAddresses {
				return nil, fmt.Errorf("more than %d addresses", maxAddresses)
			}
			l = append(l, a)
		}
	}
	return l, nil
}

// parseServerAddr parses an address that a server can have.
func parseServerAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch a = a.Unmap(); {
	case err != nil:
		return a, fmt.Errorf("%q is not an IP address", s)
	case a.Zone() != "" || a.IsLinkLocalUnicast():
		return a, fmt.Errorf("%s is a link-local address, which is not supported", a)
	case a.IsUnspecified() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return a, fmt.Errorf("%s is not the address of a host", a)
	}
	return a, nil
}

// sameBlock reports whether a and b differ at most in their last part: one byte of IPv4, two of
// IPv6.
func sameBlock(a, b netip.Addr) bool {
	last := 1
	if a.Is6() {
		last = 2
	}
	x, y := a.AsSlice(), b.AsSlice()
	return len(x) == len(y) && bytes.Equal(x[:len(x)-last], y[:len(y)-last])
}

// String returns the text of l, with a range for each run of addresses.
func (l addrList) String() string {
	var parts []string
	for i := 0; i < len(l); {
		end := i
		for end+1 < len(l) && l[end+1] == l[end].Next() && sameBlock(l[i], l[end+1]) {
			end++
		}
		part := l[i].String()
		if end > i {
			part += "-" + l[end].String()
		}
		parts = append(parts, part)
		i = end + 1
	}
	return strings.Join(parts, "~")
}
