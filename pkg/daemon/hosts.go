package daemon

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// hostNames are the host names that requests to the metrics listener may use, beside addresses and
// localhost. They have no trailing dot and no capital letters.
type hostNames map[string]bool

// parseHosts parses names that are separated by spaces.
func parseHosts(text string) (hostNames, error) {
	names := make(hostNames)
	for _, name := range strings.Fields(text) {
		if strings.ContainsAny(name, ":/[]@*") {
			return nil, fmt.Errorf("%q must be a host name without a port", name)
		}
		names[plainHost(name)] = true
	}
	return names, nil
}

func plainHost(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// allow reports whether a Host header, with or without a port, names this listener. A page of
// another site, whose name has got an address of this host, must not read the data (DNS rebinding).
// The browser then sends the name of that site. An address cannot be a name of a site.
func (n hostNames) allow(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	host = plainHost(host)
	return host == "localhost" || n[host]
}

// guard returns a handler that refuses requests for other hosts.
func (n hostNames) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !n.allow(r.Host) {
			http.Error(w, "unknown host name: use an IP address or localhost in the URL, or add the name to "+
				"metrics_hosts", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}
