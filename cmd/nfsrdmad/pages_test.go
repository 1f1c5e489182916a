package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// documents returns the text of the pages for users, by name.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := make(map[string]string)
	for _, pattern := range []string{"../../*.md", "../../docs/*.md"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			pages[strings.TrimPrefix(name, "../../")] = string(text)
		}
	}
	return pages
}

var (
	fencedBlock = regexp.MustCompile("(?ms)^ *```(\\w+)\n(.*?)^ *```\n")
	inlineCode  = regexp.MustCompile("`([^`]+)`")
	// shellWord matches a word or an operator of the shell. Quotes are around a whole word.
	shellWord = regexp.MustCompile(`"[^"]*"|'[^']*'|[^\s&|;<>]+|[&|;<>]+`)
	operator  = regexp.MustCompile(`^[&|;<>]`)
	comment   = regexp.MustCompile(`(^|\s)# .*`)
	// placeholders are characters of usage lines: "[DIR]", "...".
	placeholders = regexp.MustCompile(`[][…]|\.\.\.`)
)

// blocks calls f for each block of code.
func blocks(t *testing.T, f func(page, language, text string)) {
	t.Helper()
	for page, text := range documents(t) {
		for _, m := range fencedBlock.FindAllStringSubmatch(text, -1) {
			f(page, m[1], m[2])
		}
	}
}

// shellCommands returns the commands of a block, as words. In a block of language console, the lines
// that begin with "# " or "$ " are commands.
func shellCommands(language, text string) (all [][]string) {
	for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", " ")) {
		if language == "console" {
			if !strings.HasPrefix(line, "# ") && !strings.HasPrefix(line, "$ ") {
				continue
			}
			line = line[2:]
		}
		var words []string
		for _, word := range shellWord.FindAllString(comment.ReplaceAllString(line, ""), -1) {
			if operator.MatchString(word) {
				all, words = append(all, words), nil
				continue
			}
			words = append(words, strings.Trim(word, `"'`))
		}
		all = append(all, words)
	}
	return slices.DeleteFunc(all, func(words []string) bool { return len(words) == 0 })
}

// TestDocumentedCommandsParse checks each command of this program in the blocks of the
// documentation: the command, its flags, the number of arguments, and the mount options.
func TestDocumentedCommandsParse(t *testing.T) {
	n := 0
	blocks(t, func(page, language, text string) {
		if language != "sh" && language != "console" {
			return
		}
		for _, words := range shellCommands(language, text) {
			if len(words) > 3 && words[0] == "podman" && words[1] == "exec" {
				words = words[3:] // after the name of the container
			}
			if !isCommand(words) {
				continue
			}
			n++
			if err := parseCommand(words, true); err != nil {
				t.Errorf("%s: %s: %v", page, strings.Join(words, " "), err)
			}
		}
	})
	if n < 15 {
		t.Errorf("got %d commands, want more; the pattern is wrong", n)
	}
}

// TestDocumentedInlineCommandsParse does the same for inline code. There, "nfsrdmad trace" and
// "nfsrdmad serve --backend" can stand for a command or a flag without arguments.
func TestDocumentedInlineCommandsParse(t *testing.T) {
	n := 0
	for page, text := range documents(t) {
		for _, m := range inlineCode.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
			line := strings.Join(strings.Fields(placeholders.ReplaceAllString(m[1], " ")), " ")
			if page == "docs/reference.md" || !strings.HasPrefix(line, "nfsrdmad ") &&
				!strings.HasPrefix(line, "mount -t nfsrdma ") {
				continue
			}
			n++
			err := parseCommand(shellCommands("sh", line)[0], false)
			if err != nil && !strings.HasPrefix(err.Error(), "flag needs an argument") {
				t.Errorf("%s: `%s`: %v", page, m[1], err)
			}
		}
	}
	if n < 30 {
		t.Errorf("got %d commands, want more; the pattern is wrong", n)
	}
}

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
	blocks(t, func(page, language, text string) {
		found[language]++
		switch language {
		case "fstab":
			for line := range strings.Lines(text) {
				if err := parseFstab(line); err != nil {
					t.Errorf("%s: %q: %v", page, line, err)
				}
			}
		case "toml":
			path := filepath.Join(t.TempDir(), "nfsrdmad.toml")
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := daemon.LoadConfig(path); err != nil {
				t.Errorf("%s: %s: %v", page, text, err)
			}
		}
	})
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
