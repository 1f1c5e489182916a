package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/internal/reference"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// documents returns the pages for users.
func documents(t *testing.T) []*reference.Page {
	t.Helper()
	pages, err := reference.Pages("../..")
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// TestDocumentedCommandsParse checks each command of this program in the blocks of the
// documentation: the command, its flags, the number of arguments, and the mount options. test/docs
// runs the blocks.
func TestDocumentedCommandsParse(t *testing.T) {
	n := 0
	for _, p := range documents(t) {
		for _, b := range p.Blocks {
			if b.Language != "sh" && b.Language != "console" {
				continue
			}
			statements, err := reference.Statements(&b)
			if err != nil {
				t.Errorf("%s: %v", &b, err)
				continue
			}
			for _, s := range statements {
				for _, words := range s.Commands {
					if len(words) > 3 && words[0] == "podman" && words[1] == "exec" {
						words = words[3:] // after the name of the container
					}
					if !isCommand(words) {
						continue
					}
					n++
					if err := parseCommand(words, true); err != nil {
						t.Errorf("%s:%d: %s: %v", p.Name, s.Line, strings.Join(words, " "), err)
					}
				}
			}
		}
	}
	if n < 15 {
		t.Errorf("got %d commands, want more; the pattern is wrong", n)
	}
}

// TestDocumentedInlineCommandsParse does the same for inline code. There, "nfsrdmad trace" and
// "nfsrdmad serve --backend" can stand for a command or a flag without arguments.
func TestDocumentedInlineCommandsParse(t *testing.T) {
	n := 0
	for _, p := range documents(t) {
		for _, s := range p.Spans {
			text := placeholders.ReplaceAllString(s.Text, " ")
			if p.Name == "docs/reference.md" || !strings.HasPrefix(text, "nfsrdmad ") &&
				!strings.HasPrefix(text, "mount -t nfsrdma ") {
				continue
			}
			n++
			words, err := reference.Words(text)
			if err == nil {
				err = parseCommand(words, false)
			}
			if err != nil && !strings.HasPrefix(err.Error(), "flag needs an argument") {
				t.Errorf("%s:%d: `%s`: %v", p.Name, s.Line, s.Text, err)
			}
		}
	}
	if n < 30 {
		t.Errorf("got %d commands, want more; the pattern is wrong", n)
	}
}

// placeholders are characters of usage lines: "[DIR]", "...".
var placeholders = regexp.MustCompile(`[][…]|\.\.\.`)

// isCommand reports whether words are a command of this program, or of mount(8) for it.
func isCommand(words []string) bool {
	return words[0] == "nfsrdmad" && len(words) > 1 ||
		words[0] == "mount" && len(words) > 2 && words[1] == "-t" && words[2] == "nfsrdma"
}

// parseCommand parses a command line without running it. With all, no argument may be missing.
func parseCommand(words []string, all bool) error {
	root := rootCommand()
	if words[0] == "mount" { // mount(8) calls the helper with the source and the directory first
		root = helperCommand()
		root.SetArgs(words[3:])
	}
	root.SetOut(io.Discard)
	cmd, args, err := root.Find(words[1:])
	if words[0] == "mount" {
		cmd, args, err = root, words[3:], nil
	}
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	if err := cmd.ParseFlags(args); err != nil {
		return err
	}
	if cmd == root && words[0] != "mount" && cmd.Flags().NArg() > 0 {
		return fmt.Errorf("unknown command %s", cmd.Flags().Arg(0))
	}
	if help, _ := cmd.Flags().GetBool("help"); !help && (all || cmd.Flags().NArg() > 0) {
		if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
			return err
		}
	}
	return parseOptionFlag(cmd)
}

// parseOptionFlag parses the mount options of a command. OPTIONS is a placeholder.
func parseOptionFlag(cmd *cobra.Command) error {
	if cmd.Flags().Lookup("options") == nil {
		return nil
	}
	list, err := cmd.Flags().GetStringArray("options")
	if err != nil { // "demo" has another type
		return nil
	}
	for _, o := range list {
		if o == "OPTIONS" {
			continue
		}
		if _, err := mount.ParseOptions(mount.DefaultOptions(), o); err != nil {
			return err
		}
	}
	return nil
}

// TestDocumentedFilesParse checks the lines of fstab(5) and the configurations in the pages.
func TestDocumentedFilesParse(t *testing.T) {
	found := make(map[string]int)
	for _, p := range documents(t) {
		for _, b := range p.Blocks {
			found[b.Language]++
			switch b.Language {
			case "fstab":
				for line := range strings.Lines(b.Text) {
					if err := parseFstab(line); err != nil {
						t.Errorf("%s: %q: %v", &b, line, err)
					}
				}
			case "toml":
				path := filepath.Join(t.TempDir(), "nfsrdmad.toml")
				if err := os.WriteFile(path, []byte(b.Text), 0o644); err != nil {
					t.Fatal(err)
				}
				if _, err := daemon.LoadConfig(path); err != nil {
					t.Errorf("%s: %v", &b, err)
				}
			}
		}
	}
	if found["fstab"] == 0 || found["toml"] == 0 {
		t.Errorf("got blocks %v, want fstab and toml", found)
	}
}

func parseFstab(line string) error {
	fields := strings.Fields(line)
	if len(fields) == 0 || strings.HasPrefix(line, "#") {
		return nil
	}
	if len(fields) != 6 || fields[2] != "nfsrdma" {
		return fmt.Errorf("want six fields and type nfsrdma")
	}
	if _, err := mount.ParseSpec(fields[0]); err != nil {
		return err
	}
	_, err := mount.ParseOptions(mount.DefaultOptions(), fields[3])
	return err
}

// TestParseCommandRefuses checks that the tests above find errors.
func TestParseCommandRefuses(t *testing.T) {
	for _, line := range []string{"nfsrdmad mont server:/export /mnt", "nfsrdmad mount server:/export",
		"nfsrdmad status --slowly", "nfsrdmad mount server:/export /mnt -o rsize=1", "nfsrdmad umount --force",
		"mount -t nfsrdma server:/export /mnt -o nconect=2"} {
		words, err := reference.Words(line)
		if err != nil {
			t.Fatal(err)
		}
		if err := parseCommand(words, true); err == nil {
			t.Errorf("%s: got no error", line)
		}
	}
	if err := parseFstab("server:/export /mnt nfsrdma hardd 0 0"); err == nil {
		t.Error("fstab: got no error for an unknown option")
	}
}
