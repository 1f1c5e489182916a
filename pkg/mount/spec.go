package mount

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// A Spec is what to mount: HOST:/EXPORT.
type Spec struct {
	Host   string // name or address, without brackets
	Export string // absolute path on the server
}

// maxPathLen bounds what a user can give for an export: MNTPATHLEN of RFC 1813 §5.1.4.
const maxPathLen = 1024

// maxHostLen is that of a name in the DNS (RFC 1035 §2.3.4).
const maxHostLen = 255

// ParseSpec reads HOST:/EXPORT; an IPv6 address stands in brackets, as in nfs(5).
func ParseSpec(s string) (Spec, error) {
	bad := func(why string) (Spec, error) {
		return Spec{}, control.Errorf(control.CodeUsage, "mount source %q: %s; write HOST:/EXPORT, or [ADDRESS]:/EXPORT for IPv6",
			control.Brief(s), why)
	}
	var host, export string
	if rest, ok := strings.CutPrefix(s, "["); ok {
		var found bool
		if host, export, found = strings.Cut(rest, "]:"); !found {
			return bad("no \"]:\" after the address")
		}
		addr, err := netip.ParseAddr(host)
		switch {
		case err != nil:
			return bad("no IPv6 address within the brackets")
		case addr.Is6() && addr.IsLinkLocalUnicast() && addr.Zone() == "": // RFC 4007 §11
			return bad("a link-local address needs its interface, as in [fe80::1%eth0]")
		}
	} else {
		var found bool
		if host, export, found = strings.Cut(s, ":"); !found {
			return bad("no colon between server and export")
		}
	}
	switch {
	case host == "":
		return bad("no server")
	case len(host) > maxHostLen:
		return bad(fmt.Sprintf("the server name is longer than %d octets", maxHostLen))
	case strings.ContainsAny(host, "/ \t\n"):
		return bad("no valid server name")
	case !strings.HasPrefix(export, "/"):
		return bad("the export is not an absolute path")
	case len(export) > maxPathLen:
		return bad("the export is longer than 1024 octets")
	case strings.ContainsAny(export, "\x00\n"):
		return bad("the export has a control character")
	}
	return Spec{Host: host, Export: export}, nil
}

func (s Spec) String() string {
	if strings.Contains(s.Host, ":") {
		return "[" + s.Host + "]:" + s.Export
	}
	return s.Host + ":" + s.Export
}
