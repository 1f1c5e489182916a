package mount

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// Allowed are the sources and the directories that a [Table] may mount. The zero Allowed allows
// everything.
type Allowed struct {
	sources, dirs []pattern // empty: all
}

// ParseAllowed parses patterns that are separated by white space. A pattern that begins with "/" is
// for directories, another one has the form HOST:/EXPORT. A mount needs a pattern that matches its
// source, if there are patterns for sources, and one that matches its directory, if there are
// patterns for directories.
//
// In a pattern, "*" matches any number of characters except "/", and "?" matches one. A pattern
// that ends with "/**" matches everything below its directory, but not the directory itself. A host
// is matched without regard to case, as it was written: neither names nor addresses are looked up.
func ParseAllowed(text string) (a Allowed, err error) {
	for word := range strings.FieldsSeq(text) {
		if strings.HasPrefix(word, "/") {
			p, err := parsePattern("", word)
			if err != nil {
				return a, fmt.Errorf("%q: %w", word, err)
			}
			a.dirs = append(a.dirs, p)
			continue
		}
		end := strings.Index(word, ":/")
		if last := strings.Index(word, "]:/"); strings.HasPrefix(word, "[") && last > 0 { // IPv6
			end = last + 1
		}
		if end <= 0 {
			return a, fmt.Errorf("%q is neither a directory nor HOST:/EXPORT; write /DIR or HOST:/EXPORT", word)
		}
		p, err := parsePattern(hostText(strings.Trim(word[:end], "[]")), word[end+1:])
		if err != nil {
			return a, fmt.Errorf("%q: %w", word, err)
		}
		a.sources = append(a.sources, p)
	}
	return a, nil
}

// A pattern matches a path, and the host in front of it in a source.
type pattern struct {
	host, path string // of path.Match
	below      bool   // matches what is below path
}

func parsePattern(host, p string) (pattern, error) {
	stem, below := strings.CutSuffix(p, "/**")
	if strings.Contains(stem, "**") {
		return pattern{}, fmt.Errorf("** is allowed only at the end, after a slash")
	}
	if clean := path.Clean("/" + stem); clean != "/"+strings.TrimPrefix(stem, "/") {
		return pattern{}, fmt.Errorf("the path is not in its shortest form; write %s", clean)
	}
	return pattern{host: literal(host), path: literal(stem), below: below}, nil
}

// literal escapes the special characters of path.Match other than "*" and "?".
func literal(s string) string { return strings.NewReplacer(`\`, `\\`, "[", `\[`).Replace(s) }

func (p *pattern) matches(host, name string) bool {
	if ok, err := path.Match(p.host, host); err != nil || !ok {
		return false
	}
	if !p.below {
		ok, err := path.Match(p.path, name)
		return err == nil && ok
	}
	// path.Match matches whole names: compare as many components as the pattern has.
	components := strings.SplitAfter(name, "/")
	n := strings.Count(p.path, "/") + 1
	if len(components) <= n || components[n] == "" {
		return false
	}
	ok, err := path.Match(p.path, strings.TrimSuffix(strings.Join(components[:n], ""), "/"))
	return err == nil && ok
}

// hostText returns a host for comparison: in lower case, and an address in its shortest form.
func hostText(host string) string {
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Unmap().String()
	}
	return strings.ToLower(host)
}

// CheckSource returns an error unless a mount may have the source and the addresses of the options.
func (a Allowed) CheckSource(spec Spec, o *Options) error {
	if len(a.sources) == 0 {
		return nil
	}
	refused := func(why string) error {
		return control.Errorf(control.CodePermission, "mount %s: not allowed by allow_mounts: %s", spec, why)
	}
	if path.Clean(spec.Export) != spec.Export {
		return refused(fmt.Sprintf("the export is not in its shortest form; write %s", path.Clean(spec.Export)))
	}
	may := func(host string) bool {
		return slices.ContainsFunc(a.sources, func(p pattern) bool { return p.matches(host, spec.Export) })
	}
	if !may(hostText(spec.Host)) {
		return refused("no pattern matches the source; add one to the configuration of the daemon")
	}
	for _, addr := range o.RemotePorts {
		if !may(addr.String()) {
			return refused(fmt.Sprintf("no pattern matches %s, an address of remoteports; add one to the "+
				"configuration of the daemon", Spec{addr.String(), spec.Export}))
		}
	}
	return nil
}

// RestrictsDirs reports whether there are patterns for directories.
func (a Allowed) RestrictsDirs() bool { return len(a.dirs) > 0 }

// checkDir returns an error unless a mount may have the directory dir, a path without symbolic
// links.
func (a Allowed) checkDir(dir string) error {
	if len(a.dirs) == 0 || slices.ContainsFunc(a.dirs, func(p pattern) bool { return p.matches("", dir) }) {
		return nil
	}
	return control.Errorf(control.CodePermission, "mount on %s: not allowed by allow_mounts: no pattern matches the "+
		"directory; add one to the configuration of the daemon", dir)
}

// checkSocket is checkDir for the path of a socket, whose directory may contain symbolic links.
func (a Allowed) checkSocket(ctx context.Context, socket string) error {
	if len(a.dirs) == 0 {
		return nil
	}
	dir, err := bounded(ctx, func() (string, error) { return filepath.EvalSymlinks(filepath.Dir(socket)) }, nil)
	if err != nil {
		return control.Errorf(control.CodeMount, "socket %s: %w", socket, unwrapPath(err))
	}
	if resolved := filepath.Join(dir, filepath.Base(socket)); resolved != socket {
		return control.Errorf(control.CodePermission, "mount on %s: not allowed by allow_mounts: the path has "+
			"symbolic links; write %s", socket, resolved)
	}
	return a.checkDir(socket)
}
