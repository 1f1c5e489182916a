package mount

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// refused reports whether err is the refusal of a mount by allow_mounts, and fails on other errors.
func refused(t *testing.T, err error) bool {
	t.Helper()
	if err != nil && (control.CodeOf(err) != control.CodePermission ||
		!strings.Contains(err.Error(), "not allowed by allow_mounts")) {
		t.Errorf("got error %v of class %q, want a refusal by allow_mounts", err, control.CodeOf(err))
	}
	return err != nil
}

func parseAllowed(t *testing.T, text string) Allowed {
	t.Helper()
	a, err := ParseAllowed(text)
	kit.Must(t, err)
	return a
}

func TestAllowedSources(t *testing.T) {
	for _, tt := range []struct {
		patterns, source, options string
		want                      bool
	}{
		{"", "any:/thing/..", "", true},
		{"/mnt/*", "any:/thing", "", true}, // restricts directories only
		{"nas:/home", "nas:/home", "", true},
		{"nas:/home", "NAS:/home", "", true},
		{"nas:/home", "nas:/HOME", "", false},
		{"nas:/home", "nas:/home/", "", false}, // not in its shortest form
		{"nas:/home", "nas:/home/a", "", false},
		{"nas:/home", "nas2:/home", "", false},
		{"nas*:/home", "nas.example.com:/home", "", true},
		{"nas?:/home", "nas7:/home", "", true},
		{"*:/home", "192.0.2.1:/home", "", true},
		{"nas:/*", "nas:/home", "", true},
		{"nas:/*", "nas:/home/a", "", false},
		{"nas:/*", "nas:/", "", true}, // an empty name
		{"nas:/home/**", "nas:/home", "", false},
		{"nas:/home/**", "nas:/home/a/b", "", true},
		{"nas:/home/**", "nas:/home2/a", "", false},
		{"nas:/home/**", "nas:/home/../etc", "", false},
		{"nas:/home/**", "nas:/home//a", "", false},
		{"nas:/h*/x/**", "nas:/home/y/a", "", false},
		{"nas:/**", "nas:/a/b", "", true},
		{"nas:/**", "nas:/", "", false},
		{"nas:/[a]", "nas:/a", "", false}, // no sets
		{"nas:/home other:/data", "other:/home", "", false},
		{"[2001:db8::1]:/home", "[2001:DB8:0::1]:/home", "", true},
		{"[2001:db8::*]:/home", "[2001:db8::2]:/home", "", true},
		{"192.0.2.1:/home", "[::ffff:192.0.2.1]:/home", "", true},
		{"192.0.2.1:/home", "192.0.2.1:/home", "remoteports=192.0.2.1-192.0.2.2", false},
		{"192.0.2.?:/home", "192.0.2.1:/home", "remoteports=192.0.2.1-192.0.2.2", true},
		{"nas:/home", "nas:/home", "remoteports=192.0.2.1", false},
	} {
		spec, err := ParseSpec(tt.source)
		if err != nil {
			t.Fatal(err)
		}
		o, err := ParseOptions(DefaultOptions(), tt.options)
		if err != nil {
			t.Fatal(err)
		}
		if got := !refused(t, parseAllowed(t, tt.patterns).CheckSource(spec, &o)); got != tt.want {
			t.Errorf("allow_mounts %q, mount %s %s: got allowed %v, want %v", tt.patterns, tt.source, tt.options, got,
				tt.want)
		}
	}
}

func TestAllowedDirectories(t *testing.T) {
	for _, tt := range []struct {
		patterns, dir string
		want          bool
	}{
		{"", "/etc", true},
		{"nas:/home", "/etc", true}, // restricts sources only
		{"/mnt", "/mnt", true},
		{"/mnt/*", "/mnt/a", true},
		{"/mnt/*", "/mnt/a/b", false},
		{"/mnt/**", "/mnt", false},
		{"/mnt/**", "/mnt/a/b", true},
		{"/mnt/**", "/mnt2/a", false},
		{"/mnt /mnt/**", "/mnt", true},
		{"/**", "/etc", true},
		{"/**", "/", false},
	} {
		if got := !refused(t, parseAllowed(t, tt.patterns).checkDir(tt.dir)); got != tt.want {
			t.Errorf("allow_mounts %q, directory %q: got allowed %v, want %v", tt.patterns, tt.dir, got, tt.want)
		}
	}
}

func TestParseAllowedErrors(t *testing.T) {
	for text, want := range map[string]string{
		"home":               "neither a directory nor HOST:/EXPORT",
		"nas:home":           "neither a directory nor HOST:/EXPORT",
		"/a/../b":            "write /b",
		"nas:/a//b":          "write /a/b",
		"/a/**/b":            "** is allowed only at the end",
		"/a**":               "** is allowed only at the end",
		"nas:/good /a/./bad": `"/a/./bad"`,
	} {
		if _, err := ParseAllowed(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got error %v, want %q", text, err, want)
		}
	}
}

// TestAllowedMountPointIsResolved checks that a symbolic link or ".." cannot lead out of the
// allowed directories, and that a link into them is allowed.
func TestAllowedMountPointIsResolved(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	kit.Must(t, err)
	in, out := filepath.Join(top, "in"), filepath.Join(top, "out")
	if err := errors.Join(os.MkdirAll(filepath.Join(in, "a"), 0o755), os.MkdirAll(filepath.Join(out, "a"), 0o755),
		os.Symlink(out, filepath.Join(in, "escape")), os.Symlink(in, filepath.Join(out, "enter"))); err != nil {
		t.Fatal(err)
	}
	tab, _ := testTable(t, newFakeBuilder().build)
	tab.allowed = parseAllowed(t, "server:/x "+in+"/**")
	for _, tt := range []struct {
		dir  string
		want bool
	}{
		{in + "/a", true},
		{out + "/a", false},
		{in + "/../out/a", false},
		{in + "/escape/a", false},
		{in + "/escape", false},
		{out + "/enter/a", true},
		{out + "/../in/a", true},
	} {
		for _, virtiofs := range []bool{false, true} {
			want := tt.want
			if virtiofs { // a link in the path is refused; the last name is that of the socket
				want = want && !strings.Contains(tt.dir, "enter") || strings.HasSuffix(tt.dir, "escape")
			}
			p, err := tab.plan(t.Context(), control.MountRequest{Spec: "server:/x", Dir: tt.dir, Virtiofs: virtiofs})
			if p.at != nil {
				p.at.Close()
			}
			if got := !refused(t, err); got != want {
				t.Errorf("%s, virtiofs %v: got allowed %v, want %v", tt.dir, virtiofs, got, want)
			}
		}
	}
	for _, virtiofs := range []bool{false, true} {
		_, err := tab.Mount(t.Context(), control.MountRequest{Spec: "server:/y", Dir: in + "/a", Virtiofs: virtiofs})
		if !refused(t, err) {
			t.Errorf("mount of another source, virtiofs %v: allowed, want a refusal", virtiofs)
		}
	}
}
