package mount

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// A Spec is the source of a mount: HOST:/EXPORT.
type Spec struct {
	Host   string // name or address, without brackets
	Export string // absolute path on the server
}

const (
	maxExportLen = 1024 // bytes; MNTPATHLEN of RFC 1813 §5.1.4
	maxHostLen   = 255  // bytes; RFC 1035 §2.3.4
)

// ParseSpec parses HOST:/EXPORT. An IPv6 address is in brackets, as in nfs(5).
func ParseSpec(s string) (Spec, error) {
	invalid := func(why string) (Spec, error) {
		return Spec{}, control.Errorf(control.CodeUsage,
			"mount source %q: %s; write HOST:/EXPORT, or [ADDRESS]:/EXPORT for IPv6", control.Brief(s), why)
	}
	var host, export string
	if rest, ok := strings.CutPrefix(s, "["); ok {
		var found bool
		if host, export, found = strings.Cut(rest, "]:"); !found {
			return invalid("missing \"]:\" after the address")
		}
		addr, err := netip.ParseAddr(host)
		switch {
		case err != nil:
			return invalid("invalid IPv6 address in brackets")
		case addr.Is6() && addr.IsLinkLocalUnicast() && addr.Zone() == "": // RFC 4007 §11
			return invalid("a link-local address needs its interface, as in [fe80::1%eth0]")
		}
	} else {
		var found bool
		if host, export, found = strings.Cut(s, ":"); !found {
			return invalid("missing colon between server and export")
		}
	}
	switch {
	case host == "":
		return invalid("missing server")
	case len(host) > maxHostLen:
		return invalid(fmt.Sprintf("server name longer than %d bytes", maxHostLen))
	case strings.ContainsAny(host, "/ \t\n"):
		return invalid("invalid server name")
	case !strings.HasPrefix(export, "/"):
		return invalid("export is not an absolute path")
	case len(export) > maxExportLen:
		return invalid(fmt.Sprintf("export longer than %d bytes", maxExportLen))
	case strings.ContainsAny(export, "\x00\n"):
		return invalid("control character in the export")
	}
	return Spec{Host: host, Export: export}, nil
}

func (s Spec) String() string {
	if strings.Contains(s.Host, ":") {
		return "[" + s.Host + "]:" + s.Export
	}
	return s.Host + ":" + s.Export
}
