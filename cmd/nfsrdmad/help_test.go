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

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// Help fits a terminal of 80 columns: a line that is longer breaks in the middle of a word.
func TestHelpFits(t *testing.T) {
	var visit func(*cobra.Command)
	pages := 0
	visit = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" { // its pages are cobra's
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
				t.Errorf("%s --help: %d columns: %s", cmd.CommandPath(), n, line)
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
		t.Errorf("%d pages", pages)
	}
}

// Help tells every mount option that is this client's to understand.
func TestHelpHasEveryOption(t *testing.T) {
	words := strings.FieldsFunc(mountLong, func(r rune) bool { return strings.ContainsRune(" \n,=|()", r) })
	of := strings.Fields(`auto noauto nofail defaults _netdev relatime norelatime strictatime nostrictatime async fg
		suid dev exec atime diratime`) // mount(8)'s and fstab(5)'s
	for _, name := range mount.OptionNames() {
		// words of the page, too
		if slices.Contains(of, name) == slices.Contains(words, name) && name != "auto" && name != "defaults" {
			t.Errorf("option %q: in help is %v", name, slices.Contains(words, name))
		}
	}
}

// What serve says to type is what mounts it.
func TestServeSaysHowToMount(t *testing.T) {
	w := newWorld(t)
	var out bytes.Buffer
	printServing(&out, &nfsserve.Config{}, w.server)
	_, command, found := strings.Cut(out.String(), "to mount it: nfsrdmad mount ")
	if !found {
		t.Fatalf("says %q", &out)
	}
	dir := w.mkdir(t, "as-told")
	args := strings.Fields(strings.Replace(command, " DIR ", " "+dir+" ", 1))
	nfsrdmad(t, append([]string{"mount", "--control-socket", w.socket}, args...)...).succeeds(t)
	w.unharmed(t, dir)
}

// The name that serve says to mount is one that reaches both ports; where none does, it says none.
func TestServeSaysWhatReachesBothPorts(t *testing.T) {
	for _, tt := range []struct{ rdma, tcp, says string }{
		{"[::]:20049", "127.0.0.1:111", "mount 127.0.0.1:/ DIR\n"},
		{"[::]:20049", "[::]:111", "mount localhost:/ DIR\n"},
		{"192.0.2.1:20049", "0.0.0.0:2049", "mount 192.0.2.1:/ DIR -o mountport=2049\n"},
		{"[2001:db8::1]:7", "[::]:111", "mount [2001:db8::1]:/ DIR -o port=7\n"},
		{"192.0.2.1:20049", "127.0.0.1:111", ""},
	} {
		var out bytes.Buffer
		printServing(&out, &nfsserve.Config{}, &nfsserve.Server{RDMAAddr: netip.MustParseAddrPort(tt.rdma),
			TCPAddr: tt.tcp})
		if _, says, _ := strings.Cut(out.String(), "to mount it: nfsrdmad "); says != tt.says {
			t.Errorf("RDMA on %s, TCP on %s: says %q, want %q", tt.rdma, tt.tcp, says, tt.says)
		}
	}
}

// Names of directories are anything: none commands the terminal, or costs the others their metrics.
func TestStrangeMountPoints(t *testing.T) {
	w := newWorld(t)
	latin, escape, link := filepath.Join(w.dir, "caf\xe9"), w.mkdir(t, "\x1b[31mred"), filepath.Join(w.dir, "link")
	if err := errors.Join(os.Mkdir(latin, 0o755), os.Symlink(latin, link)); err != nil {
		t.Fatal(err)
	}
	w.mount(t, latin).fails(t, 1, `caf\xe9`, "UTF-8", "symbolic link")
	w.mount(t, link).succeeds(t)
	w.mount(t, escape).succeeds(t)
	if b, err := os.ReadFile(filepath.Join(link, "hello")); err != nil || string(b) != "world" {
		t.Errorf("%q, %v", b, err)
	}
	for _, verb := range []string{"list", "status"} {
		if out := nfsrdmad(t, verb, "--control-socket", w.socket).succeeds(t).stdout; strings.Contains(out, "\x1b") ||
			!strings.Contains(out, "?[31mred") {
			t.Errorf("%s says %q", verb, out)
		}
	}
	nfsrdmad(t, "umount", "--control-socket", w.socket, link).succeeds(t)
}

func TestVersionFlag(t *testing.T) {
	word, _, _ := strings.Cut(strings.TrimPrefix(nfsrdmad(t, "version").succeeds(t).stdout, "nfsrdmad "), " ")
	if out := nfsrdmad(t, "--version").succeeds(t).stdout; word == "" || out != "nfsrdmad "+word+"\n" {
		t.Errorf("says %q, and \"version\" says %q", out, word)
	}
}

func TestStatusOfNothing(t *testing.T) {
	w := newWorld(t)
	if out := nfsrdmad(t, "status", "--control-socket",
		w.socket).succeeds(t).stdout; out != "nothing is mounted by this daemon\n" {
		t.Errorf("says %q", out)
	}
}
