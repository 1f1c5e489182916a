package packages

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

const root = "../.."

// output runs a command, which must succeed and write nothing to standard error.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("%s: %v: %s%s", cmd, err, out, &stderr)
	}
	return strings.TrimSpace(string(out))
}

// build makes a package in a new directory, and returns its file.
func build(t *testing.T, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	args = append([]string{"VERSION=v1.2.3", "DIST=" + dir, "MAINTAINER=Maintainer <m@example.com>"}, args...)
	kit.Make(t, root, args...)
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Fatalf("make %q: got files %v and error %v, want one package", args, files, err)
	}
	return filepath.Join(dir, files[0].Name())
}

// common are files of both packages, besides the man pages of the commands.
var common = []string{
	"/etc/nfsrdmad.toml",
	"/usr/lib/systemd/system/nfsrdmad.service",
	"/usr/sbin/mount.nfsrdma",
	"/usr/sbin/nfsrdmad",
	"/usr/share/bash-completion/completions/nfsrdmad",
	"/usr/share/doc/nfsrdmad/README.md",
	"/usr/share/doc/nfsrdmad/changelog.gz",
	"/usr/share/doc/nfsrdmad/copyright",
	"/usr/share/doc/nfsrdmad/docs/operator.md",
	"/usr/share/doc/nfsrdmad/docs/troubleshooting.md",
	"/usr/share/doc/nfsrdmad/examples/nfsrdmad.rules.yml",
	"/usr/share/fish/vendor_completions.d/nfsrdmad.fish",
	"/usr/share/man/man5/nfsrdma.5.gz",
	"/usr/share/man/man8/mount.nfsrdma.8.gz",
	"/usr/share/man/man8/nfsrdmad-mount.8.gz",
	"/usr/share/man/man8/nfsrdmad.8.gz",
}

// contains checks that a package has the wanted files, given its files with their modes.
func contains(t *testing.T, have map[string]string, want []string) {
	t.Helper()
	for _, path := range append(slices.Clone(common), want...) {
		mode := "-rw-r--r--"
		switch filepath.Base(path) {
		case "mount.nfsrdma":
			mode = "lrwxrwxrwx"
		case "nfsrdmad":
			if filepath.Dir(path) == "/usr/sbin" {
				mode = "-rwxr-xr-x"
			}
		}
		// nfpm writes no mode for symbolic links.
		if have[path] != mode && (mode[0] != 'l' || have[path] == "" || have[path][0] != 'l') {
			t.Errorf("%s: got mode %q, want %q", path, have[path], mode)
		}
	}
}

func TestDeb(t *testing.T) {
	kit.NeedsPrograms(t, "make", "git", "dpkg-deb", "man", "mandoc", "bash")
	deb := build(t, "deb")
	field := func(name string) string { return output(t, "dpkg-deb", "-f", deb, name) }
	if got := field("Version"); got != "1.2.3-1" {
		t.Errorf("version: got %q, want 1.2.3-1", got)
	}
	if got := field("Depends"); !strings.HasPrefix(got, "libc6 (>= 2.") {
		t.Errorf("dependencies: got %q, want the C library, which the rdma-core provider uses", got)
	}
	have := make(map[string]string)
	for line := range strings.Lines(output(t, "dpkg-deb", "-c", deb)) {
		f := strings.Fields(line)
		if f[1] != "root/root" {
			t.Errorf("%s: got owner %s, want root", f[5], f[1])
		}
		if strings.HasPrefix(f[0], "d") && f[0] != "drwxr-xr-x" {
			t.Errorf("%s: got mode %s, want drwxr-xr-x", f[5], f[0])
		}
		have[strings.TrimPrefix(f[5], ".")] = f[0]
	}
	contains(t, have, []string{"/usr/share/doc/nfsrdmad/changelog.Debian.gz",
		"/usr/share/zsh/vendor-completions/_nfsrdmad"})

	control, data := t.TempDir(), t.TempDir()
	output(t, "dpkg-deb", "-e", deb, control)
	output(t, "dpkg-deb", "-x", deb, data)
	if b, err := os.ReadFile(filepath.Join(control, "conffiles")); err != nil || string(b) != "/etc/nfsrdmad.toml\n" {
		t.Errorf("conffiles: got %q, %v; want the configuration", b, err)
	}
	for _, script := range []string{"postinst", "prerm", "postrm"} {
		output(t, "sh", "-n", filepath.Join(control, script))
	}
	output(t, "bash", "-n", filepath.Join(data, "usr/share/bash-completion/completions/nfsrdmad"))
	if got, err := os.Readlink(filepath.Join(data, "usr/sbin/mount.nfsrdma")); err != nil || got != "nfsrdmad" {
		t.Errorf("mount.nfsrdma: got a link to %q, %v; want nfsrdmad", got, err)
	}
	copyright, err := os.ReadFile(filepath.Join(data, "usr/share/doc/nfsrdmad/copyright"))
	if err != nil || !bytes.Contains(copyright, []byte("\n---- github.com/spf13/cobra v")) {
		t.Errorf("copyright: %v; want one with the licenses of the modules", err)
	}
	checkPages(t, data)
	checkLinks(t, filepath.Join(data, "usr/share/doc/nfsrdmad"))

	again, err := os.ReadFile(build(t, "deb"))
	first, err1 := os.ReadFile(deb)
	if err != nil || err1 != nil || !bytes.Equal(first, again) {
		t.Errorf("two packages of one commit differ (%v, %v)", err, err1)
	}
}

// checkPages checks that there is a page for each command, and that all pages render without
// warnings.
func checkPages(t *testing.T, data string) {
	t.Helper()
	pages, err := filepath.Glob(filepath.Join(data, "usr/share/man/man?/*.gz"))
	if err != nil {
		t.Fatal(err)
	}
	have := make(map[string]bool)
	for _, page := range pages {
		have[strings.TrimSuffix(filepath.Base(page), ".8.gz")] = true
		output(t, "mandoc", "-T", "lint", "-W", "warning", page)
		output(t, "man", "--warnings", "-l", page)
	}
	help := output(t, filepath.Join(data, "usr/sbin/nfsrdmad"), "--help")
	_, commands, found := strings.Cut(help, "Available Commands:\n")
	commands, _, _ = strings.Cut(commands, "\n\n")
	checked := 0
	for line := range strings.Lines(commands) {
		name := strings.Fields(line)[0]
		if name == "completion" || name == "help" { // of cobra
			continue
		}
		checked++
		if !have["nfsrdmad-"+name] {
			t.Errorf("command %s has no man page; pages: %v", name, slices.Sorted(maps.Keys(have)))
		}
	}
	if !found || checked < 12 {
		t.Errorf("found %d commands in the help, want 12 or more", checked)
	}
}

var link = regexp.MustCompile(`\]\(([^)#\s]+)`)

// checkLinks checks that the relative links of the documentation lead to files of the package.
func checkLinks(t *testing.T, doc string) {
	t.Helper()
	checked := 0
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		pages, err := filepath.Glob(filepath.Join(doc, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, page := range pages {
			text, err := os.ReadFile(page)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range link.FindAllSubmatch(text, -1) {
				target := string(m[1])
				if strings.Contains(target, "://") {
					continue
				}
				checked++
				if _, err := os.Stat(filepath.Join(filepath.Dir(page), target)); err != nil {
					t.Errorf("%s: dead link: %v", filepath.Base(page), err)
				}
			}
		}
	}
	if checked < 50 {
		t.Errorf("found %d relative links, want 50 or more", checked)
	}
}

func TestRPM(t *testing.T) {
	kit.NeedsPrograms(t, "make", "git", "rpm")
	file := build(t, "rpm")
	query := func(args ...string) string {
		return output(t, "rpm", append([]string{"--dbpath", t.TempDir(), "-qp"}, append(args, file)...)...)
	}
	if got := query("--qf", "%{VERSION}-%{RELEASE} %{BUILDHOST}"); got != "1.2.3-1 localhost" {
		t.Errorf("version and host: got %q, want 1.2.3-1 localhost", got)
	}
	if got := query("--requires"); !strings.Contains(got, "libc.so.6(GLIBC_2.") {
		t.Errorf("requirements: got %q, want the C library, which the rdma-core provider uses", got)
	}
	have := make(map[string]string)
	for line := range strings.Lines(query("--qf", "[%{FILEMODES:perms} %{FILENAMES}\n]")) {
		f := strings.Fields(line)
		have[f[1]] = f[0]
	}
	contains(t, have, []string{"/usr/share/zsh/site-functions/_nfsrdmad"})
	if got := query("-c"); got != "/etc/nfsrdmad.toml" {
		t.Errorf("configuration files: got %q, want /etc/nfsrdmad.toml", got)
	}
	if got := query("--scripts"); !strings.Contains(got, "try-restart") || !strings.Contains(got, "umount -a") {
		t.Errorf("scripts: got %q, want those that restart and unmount", got)
	}
}

// TestVersions checks the versions of packages, and that dpkg and rpm sort them in the order of the
// table.
func TestVersions(t *testing.T) {
	kit.NeedsPrograms(t, "dpkg", "rpm")
	before := ""
	for _, tt := range []struct{ description, want string }{
		{"94bf203", "0~20260102030405.g94bf203"},
		{"v0.9.0", "0.9.0"},
		{"v0.9.0-12-gdeadbee", "0.9.0+12.gdeadbee"},
		{"v1.0.0-rc1", "1.0.0~rc1"},
		{"v1.0.0-rc1-3-g1234567", "1.0.0~rc1+3.g1234567"},
		{"v1.0.0-rc2", "1.0.0~rc2"},
		{"v1.0.0", "1.0.0"},
		{"v1.0.0-3-g1234567", "1.0.0+3.g1234567"},
		{"v1.0.0-3-g1234567-dirty", "1.0.0+3.g1234567+dirty"},
		{"v1.0.0-20-g1234567", "1.0.0+20.g1234567"},
		{"v1.0.1", "1.0.1"},
	} {
		got := output(t, filepath.Join(root, "deploy/package/version.sh"), tt.description, "1767323045")
		if got != tt.want {
			t.Errorf("%s: got version %s, want %s", tt.description, got, tt.want)
		}
		if before != "" {
			output(t, "dpkg", "--compare-versions", before, "lt", got)
			if c := output(t, "rpm", "--eval", `%{lua: print(rpm.vercmp("`+before+`", "`+got+`"))}`); c != "-1" {
				t.Errorf("rpm compares %s with %s: got %s, want -1", before, got, c)
			}
		}
		before = got
	}
}
