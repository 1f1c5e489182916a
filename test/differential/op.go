package differential

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// An Op is one operation of a stream. String and parseOp use one line of text for an Op: the verb,
// and the nonzero fields as NAME=VALUE. The text describes the operation completely, including the
// bytes that it writes, so that any part of a stream can run on its own.
type Op struct {
	do   string
	by   int    // index of the process
	as   int    // index of users
	fd   int    // slot of an open file
	path string // relative to the stream's directory; see expandPath
	to   string // second path, or the target of a symbolic link
	// flags of open(2), renameat2(2) or fallocate(2); base of lseek(2); mode of access(2)
	flags int
	mode  int
	off   int
	n     int // length or size
	uid   int
	gid   int
	atime int // see timeOf
	mtime int
	seed  int  // seed of the bytes to write
	quiet bool // do not observe the files afterwards, which keeps the caches as they are
}

func (o *Op) ints() []struct {
	name string
	base int
	v    *int
} {
	return []struct {
		name string
		base int
		v    *int
	}{
		{"by", 10, &o.by},
		{"as", 10, &o.as},
		{"fd", 10, &o.fd},
		{"flags", 16, &o.flags},
		{"mode", 8, &o.mode},
		{"off", 10, &o.off},
		{"n", 10, &o.n},
		{"uid", 10, &o.uid},
		{"gid", 10, &o.gid},
		{"atime", 10, &o.atime},
		{"mtime", 10, &o.mtime},
		{"seed", 10, &o.seed},
	}
}

var prefixes = map[int]string{8: "0", 10: "", 16: "0x"}

func (o Op) String() string {
	var b strings.Builder
	b.WriteString(o.do)
	for _, s := range []struct{ name, v string }{{"path", o.path}, {"to", o.to}} {
		if s.v != "" {
			b.WriteString(" " + s.name + "=" + s.v)
		}
	}
	for _, f := range o.ints() {
		if *f.v != 0 {
			b.WriteString(" " + f.name + "=" + prefixes[f.base] + strconv.FormatInt(int64(*f.v), f.base))
		}
	}
	if o.quiet {
		b.WriteString(" quiet=1")
	}
	return b.String()
}

func parseOp(line string) (o Op, err error) {
	words := strings.Fields(line)
	if len(words) == 0 {
		return o, fmt.Errorf("parse operation: empty line")
	}
	o.do = words[0]
	if verbs[o.do] == nil {
		return o, fmt.Errorf("parse operation %q: unknown verb", line)
	}
next:
	for _, w := range words[1:] {
		name, value, _ := strings.Cut(w, "=")
		switch name {
		case "path":
			o.path = value
			continue
		case "to":
			o.to = value
			continue
		case "quiet":
			o.quiet = true
			continue
		}
		for _, f := range o.ints() {
			if f.name == name {
				v, err := strconv.ParseInt(value, 0, 64)
				if err != nil {
					return o, fmt.Errorf("parse operation %q: %w", line, err)
				}
				*f.v = int(v)
				continue next
			}
		}
		return o, fmt.Errorf("parse operation %q: unknown field %q", line, name)
	}
	return o, nil
}

// ParseOps parses operations, one on each line.
func ParseOps(text string) (ops []Op, err error) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		o, err := parseOp(line)
		if err != nil {
			return nil, err
		}
		ops = append(ops, o)
	}
	return ops, nil
}

// expandPath returns a path of an Op as the kernel gets it. An element ~N stands for a name of N
// bytes, and %XX for the byte with this number. A path that begins with @N/ is expanded to N bytes,
// below a root of rootLen bytes.
func expandPath(path string, rootLen int) string {
	if !strings.ContainsAny(path, "~%@") {
		return path
	}
	if n, rest, ok := strings.Cut(path, "/"); ok && strings.HasPrefix(n, "@") {
		total, _ := strconv.Atoi(n[1:])
		path = rest
		if missing := total - rootLen - len("/") - len(rest); missing > 0 {
			path = strings.Repeat("./", missing/2) + strings.Repeat("/", missing%2) + rest
		}
	}
	parts := strings.Split(path, "/")
	for i, p := range parts {
		if n, err := strconv.Atoi(strings.TrimPrefix(p, "~")); err == nil && strings.HasPrefix(p, "~") {
			parts[i] = strings.Repeat("n", n)
		} else if name, err := url.PathUnescape(p); err == nil {
			parts[i] = name
		}
	}
	return strings.Join(parts, "/")
}
