//go:build manual

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

func init() { buildCommands = append(buildCommands, manualCommand()) }

// manualCommand returns the command that "make install" runs. Only a program with the build tag
// "manual" has it: the libraries behind it do not belong into the daemon.
func manualCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "manual DIR",
		Short:  "Write man pages and shell completions below DIR",
		Hidden: true,
		Args:   argCount(1, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := writeManual(args[0]); err != nil {
				return systemError(fmt.Errorf("write manual: %w", err))
			}
			return nil
		},
	}
}

// writeManual writes the files below dir in the layout of /usr/share.
func writeManual(dir string) error {
	root := rootCommand()
	files := map[string][]byte{"man/man5/nfsrdma.5": optionPage()}
	for _, cmd := range append(root.Commands(), root, helperCommand()) {
		if cmd.Hidden {
			continue
		}
		page, err := commandPage(cmd)
		if err != nil {
			return err
		}
		files["man/man8/"+strings.ReplaceAll(cmd.CommandPath(), " ", "-")+".8"] = page
	}
	for _, c := range []struct {
		path     string
		generate func(*bytes.Buffer) error
	}{
		{"bash-completion/completions/nfsrdmad",
			func(b *bytes.Buffer) error { return root.GenBashCompletionV2(b, true) }},
		{"zsh/site-functions/_nfsrdmad", func(b *bytes.Buffer) error { return root.GenZshCompletion(b) }},
		{"fish/vendor_completions.d/nfsrdmad.fish",
			func(b *bytes.Buffer) error { return root.GenFishCompletion(b, true) }},
	} {
		var b bytes.Buffer
		if err := c.generate(&b); err != nil {
			return err
		}
		files[c.path] = b.Bytes()
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// rootSections are the sections of nfsrdmad(8) that the help does not have.
const rootSections = `.SH FILES
.TP
.I /etc/nfsrdmad.toml
Configuration of the daemon. The comments of the file describe each key.
.TP
.I ` + control.DefaultSocket + `
Control socket of the daemon.
.TP
.I /var/lib/nfsrdmad
Journal of locks.
.SH EXIT STATUS
The exit codes are those of
.BR mount (8):
.TP
.B 0
success
.TP
.B 1
usage or permission
.TP
.B 2
system: no daemon, no /dev/fuse, a socket or port in use, or no reply of a backend
.TP
.B 4
internal error
.TP
.B 8
interrupted
.TP
.B 32
a mount or unmount failed, or written data was lost
`

// indented matches the first line of a block that must keep its line breaks.
var indented = regexp.MustCompile(`(?m)(?:^ .*\n?)+`)

// commandPage returns the man page of a command.
func commandPage(cmd *cobra.Command) ([]byte, error) {
	seeAlso := []string{"nfsrdma(5)"}
	switch {
	case cmd.Long == mountLong: // nfsrdma(5) has the options
		cmd.Long = "Mount the export of an NFS server over RDMA. **nfsrdma(5)** describes the options of **-o**."
	case !cmd.HasParent():
		cmd.Long = "Userspace client for NFS over RDMA. One daemon owns the RDMA connections and their memory " +
			"regions, and serves the files through FUSE. **nfsrdmad daemon** runs the daemon. The other commands " +
			"use it, and **mount -t nfsrdma** calls **mount.nfsrdma(8)**."
		seeAlso = append(seeAlso, "mount.nfsrdma(8)", "mount(8)")
	default:
		cmd.Long = indented.ReplaceAllString(cmd.Long, "```\n$0\n```\n")
		seeAlso = nil
	}
	cmd.DisableAutoGenTag = true
	var page bytes.Buffer
	if err := doc.GenMan(cmd, &doc.GenManHeader{Section: "8"}, &page); err != nil {
		return nil, err
	}
	_, body, _ := strings.Cut(page.String(), ".SH NAME\n")
	body = flagEntry.ReplaceAllString(emptyDefault.ReplaceAllString(body, "$1"), ".TP\n$1\n")
	var b strings.Builder
	b.WriteString(heading(cmd.CommandPath(), 8) + ".SH NAME\n")
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, ".") {
			line = strings.ReplaceAll(line, "-", `\-`)
		}
		if strings.TrimSpace(line) != "" {
			b.WriteString(line)
		}
	}
	const links = ".SH SEE ALSO\n"
	body, others, found := strings.Cut(b.String(), links)
	if cmd.HasSubCommands() {
		body += rootSections
	}
	for _, page := range seeAlso {
		if found {
			others = strings.TrimSpace(others) + ", "
		}
		others, found = others+`\fB`+roff(page)+"\\fP\n", true
	}
	return []byte(body + links + others), nil
}

var (
	// flagEntry matches a flag in the output of package doc, whose description begins with a tab.
	flagEntry = regexp.MustCompile(`(?m)^(?:\.PP\n)?(\\fB-.*)\n\t`)
	// emptyDefault matches a default of a flag that says nothing.
	emptyDefault = regexp.MustCompile(`(?m)^(\\fB-.*\\fP)(?:\[=false\]|=""|=\[\])$`)
)

// heading returns the first line of a man page. The date is that of the source, in
// SOURCE_DATE_EPOCH, or today.
func heading(name string, section int) string {
	date := time.Now()
	if n, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
		date = time.Unix(n, 0)
	}
	title := strings.ToUpper(strings.ReplaceAll(name, " ", "-"))
	return fmt.Sprintf(".TH %s %d %s nfsrdmad \"nfsrdmad manual\"\n", roff(title), section,
		date.UTC().Format(time.DateOnly))
}

// optionPage returns the man page nfsrdma(5).
func optionPage() []byte {
	var b bytes.Buffer
	b.WriteString(heading("nfsrdma", 5) + `.SH NAME
nfsrdma \- mount options of nfsrdmad
.SH SYNOPSIS
.nf
.BI "mount \-t nfsrdma \-o " OPTIONS " HOST" :/ "EXPORT DIR"
.IB HOST :/ "EXPORT DIR" " nfsrdma " OPTIONS " 0 0"
.fi
.SH DESCRIPTION
The file system type
.B nfsrdma
is an NFS export that
.BR nfsrdmad (8)
mounts over RDMA. In
.BR fstab (5),
.B _netdev
makes
.BR systemd (1)
start the daemon before the mount. Options are separated by commas. An unknown, invalid or contradictory option is
an error. The options of a mount override
.B mount_options
in
.IR /etc/nfsrdmad.toml .
`)
	for _, section := range mount.OptionSections() {
		title, _, _ := strings.Cut(section.Title, " of -o")
		fmt.Fprintf(&b, ".SH %s\n", strings.ToUpper(title))
		if title != section.Title {
			b.WriteString("The names and meanings are those of\n.BR nfs (5).\nDefaults are in parentheses.\n")
		}
		for _, o := range section.Options {
			fmt.Fprintf(&b, ".TP\n.B %s\n%s.\n", roff(strings.ReplaceAll(o.Syntax, `"`, `\(dq`)), roff(sentence(o)))
		}
	}
	fmt.Fprintf(&b, `.SH OPTIONS WITHOUT EFFECT
These options are accepted for compatibility: %s, and the options of
.BR fstab (5)
for other programs.
.SH SEE ALSO
.BR nfsrdmad (8),
.BR nfsrdmad\-mount (8),
.BR nfs (5),
.BR fstab (5),
.BR mount (8)
`, roff(mount.NoEffect))
	return b.Bytes()
}

// sentence returns the text of an option with a capital letter, and with its range if the text
// leaves it out.
func sentence(o mount.OptionHelp) string {
	text := o.Text
	if o.Range != "" && !strings.Contains(text, o.Range) {
		text += "; " + o.Range
	}
	if strings.HasPrefix(text, "fcntl") { // a name
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// roff escapes text for troff.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "~", `\(ti`, "^", `\(ha`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		return `\&` + text
	}
	return text
}
