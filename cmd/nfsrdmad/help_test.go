package main

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestHelpFits80Columns(t *testing.T) {
	var visit func(*cobra.Command)
	pages := 0
	visit = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" { // cobra writes its pages
			return
		}
		var out bytes.Buffer
		cmd.SetOut(&out)
		if err := cmd.Help(); err != nil {
			t.Fatal(err)
		}
		pages++
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns {
				t.Errorf("%s --help: got a line of %d columns: %s", cmd.CommandPath(), n, line)
			}
		}
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	for _, root := range []*cobra.Command{rootCommand(), helperCommand()} {
		root.InitDefaultHelpFlag()
		visit(root)
	}
	if pages < 12 {
		t.Errorf("got %d help pages, want 12 or more", pages)
	}
}

// TestHelpListsMountOptions checks that the help lists every option that this client interprets. It
// leaves the options of mount(8) and fstab(5) to their own pages.
func TestHelpListsMountOptions(t *testing.T) {
	words := strings.FieldsFunc(mountLong, func(r rune) bool { return strings.ContainsRune(" \n,=|()", r) })
	others := strings.Fields(`auto noauto nofail defaults _netdev relatime norelatime nostrictatime async fg
		exec atime diratime`) // options of mount(8) and fstab(5)
	for _, name := range mount.OptionNames() {
		// "auto" and "defaults" also occur as plain words.
		if slices.Contains(others, name) == slices.Contains(words, name) && name != "auto" && name != "defaults" {
			t.Errorf("option %q: got %v for its presence in the help, want %v", name, slices.Contains(words, name),
				!slices.Contains(others, name))
		}
	}
}

func TestServePrintsWorkingMountCommand(t *testing.T) {
	w := newTestEnv(t)
	var out bytes.Buffer
	printServing(&out, &nfsserve.Config{}, w.server)
	_, command, found := strings.Cut(out.String(), "to mount it: nfsrdmad mount ")
	if !found {
		t.Fatalf("got output %q, want a mount command", &out)
	}
	dir := w.mkdir(t, "from-output")
	args := strings.Fields(strings.Replace(command, " DIR ", " "+dir+" ", 1))
	w.run(t, "mount", args...).succeeds(t)
	w.checkMount(t, dir)
}

// TestServePrintsAddressForBothPorts checks that the printed mount command uses an address that
// reaches the RDMA port and the TCP port. Without one, serve prints no command.
func TestServePrintsAddressForBothPorts(t *testing.T) {
	for _, tt := range []struct{ rdma, tcp, want string }{
		{"[::]:20049", "127.0.0.1:111", "mount 127.0.0.1:/ DIR\n"},
		{"127.0.0.1:20049", "127.0.0.1:20048", "mount 127.0.0.1:/ DIR\n"},
		{"[::]:20049", "[::]:111", "mount localhost:/ DIR\n"},
		{"192.0.2.1:20049", "0.0.0.0:2049", "mount 192.0.2.1:/ DIR -o mountport=2049\n"},
		{"[2001:db8::1]:7", "[::]:111", "mount [2001:db8::1]:/ DIR -o port=7\n"},
		{"192.0.2.1:20049", "127.0.0.1:111", ""},
	} {
		var out bytes.Buffer
		printServing(&out, &nfsserve.Config{}, &nfsserve.Server{RDMAAddr: netip.MustParseAddrPort(tt.rdma),
			TCPAddr: tt.tcp})
		if _, got, _ := strings.Cut(out.String(), "to mount it: nfsrdmad "); got != tt.want {
			t.Errorf("RDMA on %s, TCP on %s: got command %q, want %q", tt.rdma, tt.tcp, got, tt.want)
		}
	}
}

// TestMountPointsWithUnusualNames checks that a name with control characters does not reach the
// terminal, and that a name that is not UTF-8 is refused.
func TestMountPointsWithUnusualNames(t *testing.T) {
	w := newTestEnv(t)
	latin, escape, link := filepath.Join(w.dir, "caf\xe9"), w.mkdir(t, "\x1b[31mred"), filepath.Join(w.dir, "link")
	kit.Must(t, errors.Join(os.Mkdir(latin, 0o755), os.Symlink(latin, link)))
	w.mount(t, latin).fails(t, 1, `caf\xe9`, "UTF-8", "symbolic link")
	w.mount(t, link).succeeds(t)
	w.mount(t, escape).succeeds(t)
	w.checkMount(t, link)
	for _, verb := range []string{"list", "status"} {
		if out := w.run(t, verb).succeeds(t).stdout; strings.Contains(out, "\x1b") ||
			!strings.Contains(out, "?[31mred") {
			t.Errorf("%s: got output %q, want control characters replaced", verb, out)
		}
	}
	w.run(t, "umount", link).succeeds(t)
}

func TestVersionFlag(t *testing.T) {
	word, _, _ := strings.Cut(strings.TrimPrefix(nfsrdmad(t, "version").succeeds(t).stdout, "nfsrdmad "), " ")
	if out := nfsrdmad(t, "--version").succeeds(t).stdout; word == "" || out != "nfsrdmad "+word+"\n" {
		t.Errorf("got %q from --version and %q from version, want the same", out, word)
	}
}
