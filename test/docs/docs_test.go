package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/reference"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

const root = "../.."

// notRun are programs, and beginnings of commands, that the test does not run. The reason says why,
// and what checks them instead.
var notRun = []struct{ command, reason string }{
	{"make", "takes minutes, and needs Debian packages or the network; the target must exist"},
	{"dpkg -i", "installs on the host; test/lab/systemd installs the package"},
	{"rpm -i", "installs on the host; test/packages checks the files of the package"},
	{"systemctl", "needs systemd; test/lab/systemd runs the unit. The environment has a running daemon"},
	{"podman", "needs an image; its command of nfsrdmad must parse"},
	{"docker", "needs an image"},
	{"kubectl", "needs a cluster; test/kubernetes checks the manifests"},
	{"helm", "needs a cluster; test/kubernetes renders the chart"},
	{"qemu-system-x86_64", "needs a guest; test/lab/virtiofs starts one with these options"},
	{"journalctl", "needs the journal of the unit; test/lab/systemd reads it"},
	{"find /export -inum", "runs on the server, with an inode number of its log"},
	{"mount -t virtiofs", "runs in a guest; test/lab/virtiofs mounts there"},
}

// services are beginnings of commands that run until a signal. The test waits until the condition,
// a shell command, is true, sends SIGTERM, and expects exit code 0.
var services = []struct{ command, ready string }{
	{"nfsrdmad mount --foreground", "mountpoint -q /mnt"},
	{"nfsrdmad serve", `grep -qs "serving RDMA" "$out"`},
}

// faster are flags that the test adds to commands that otherwise take long.
var faster = []struct{ command, flags string }{
	{"nfsrdmad bench", "--size 8 --time 50ms --files 20 --runs 1"},
}

// showsFailure reports whether the output that a page shows ends with an error of the program.
func showsFailure(s *reference.Statement) bool {
	lines := strings.Split(strings.TrimSpace(s.Output), "\n")
	return strings.HasPrefix(lines[len(lines)-1], "nfsrdmad: ")
}

// isBlock reports whether b has commands.
func isBlock(b *reference.Block) bool { return b.Language == "sh" || b.Language == "console" }

// pages returns the pages whose commands run.
func pages(t *testing.T) []*reference.Page {
	t.Helper()
	all, err := reference.Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(p *reference.Page) bool {
		return p.Name != "README.md" && !strings.HasPrefix(p.Name, "docs/")
	})
}

// begins reports whether the words of command begin with those of a declaration.
func begins(command []string, declared string) bool {
	words := strings.Fields(declared)
	return len(command) >= len(words) && slices.Equal(command[:len(words)], words)
}

// reasonNotRun returns why a statement does not run, or "". A statement with several commands does
// not run if one of them does not; all of them must then be declared.
func reasonNotRun(s *reference.Statement) (reason string, err error) {
	var undeclared []string
	for _, c := range s.Commands {
		i := slices.IndexFunc(notRun, func(d struct{ command, reason string }) bool { return begins(c, d.command) })
		if i < 0 {
			undeclared = c
			continue
		}
		reason = notRun[i].reason
	}
	if reason != "" && undeclared != nil {
		err = fmt.Errorf("%q is not run and has no reason; declare it, or write it on another line", undeclared)
	}
	return reason, err
}

// TestDocumentedCommands runs the blocks.
func TestDocumentedCommands(t *testing.T) {
	kit.NeedsFUSE(t)
	program := buildProgram(t)
	found := 0
	for _, p := range pages(t) {
		for _, b := range p.Blocks {
			if !isBlock(&b) {
				continue
			}
			statements, err := reference.Statements(&b)
			if err != nil {
				t.Errorf("%s: %v", &b, err)
				continue
			}
			found += len(statements)
			t.Run(strings.ReplaceAll(b.String(), "/", "_"), func(t *testing.T) {
				run := slices.DeleteFunc(slices.Clone(statements), func(s reference.Statement) bool {
					reason, err := reasonNotRun(&s)
					if err != nil {
						t.Errorf("%s:%d: %v", b.Page, s.Line, err)
					}
					if reason != "" {
						t.Logf("not run: %s: %s", s.Text, reason)
					}
					return reason != ""
				})
				if len(run) > 0 {
					runBlock(t, program, &b, run)
				}
			})
		}
	}
	if found < 30 {
		t.Errorf("got %d commands, want more; the pattern is wrong", found)
	}
}

// setup makes the environment of a block: addresses, a server with the name "server", which exports
// /export and /data, and a daemon. The daemon continues in the namespaces of the block only.
const setup = `set -eu
for a in 192.0.2.1 192.0.2.2 192.0.2.3 192.0.2.4 198.51.100.1; do ip address add $a/24 dev d0; done
ip address add 2001:db8::1/64 dev d0 nodad
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /srv
mkdir -p /run/state /run/home/DIR /run/root/export /run/root/data /srv/data /run/vm
mount --bind /run/state /var/lib
mkdir -p /var/lib/nfsrdmad /var/lib/serve
echo hello >/run/root/export/hello
for d in /etc /usr/sbin; do # mount(8) searches its helper in directories of the system only
	mkdir -p /run/upper$d /run/work$d
	mount -t overlay overlay -o lowerdir=$d,upperdir=/run/upper$d,workdir=/run/work$d $d
done
printf '\n192.0.2.1 server\n' >>/etc/hosts
printf %s "$FSTAB" >/etc/fstab
cp "$PROGRAM" /usr/sbin/nfsrdmad
ln -s nfsrdmad /usr/sbin/mount.nfsrdma
PATH=/usr/sbin:$PATH
cd /run/home
until_true() { # COMMAND [PID]: wait until COMMAND is true, while PID runs
	n=0
	until eval "$1"; do
		if [ -n "${2:-}" ] && ! kill -0 "$2" 2>/dev/null; then return 1; fi
		n=$((n + 1))
		if [ $n -gt 600 ]; then return 1; fi
		sleep 0.1
	done
}
serve() {
	STATE_DIRECTORY=/var/lib/serve nfsrdmad serve /run/root --rdma-listen :20049 --tcp-listen :111 \
		--allow 0.0.0.0/0 --allow ::/0 --no-root-squash >/run/serve.log 2>&1 &
	server=$!
	until_true 'grep -qs "serving RDMA" /run/serve.log' $server
}
backend() { # an NFSv3 server on TCP, at the port that the pages name
	nfsrdmad serve /srv/data --rdma-listen 127.0.0.1:0 --tcp-listen 127.0.0.1:2049 >/run/backend.log 2>&1 &
	backend=$!
	until_true 'grep -qs "serving RDMA" /run/backend.log' $backend
}
start_daemon() {
	nfsrdmad daemon >/run/daemon.log 2>&1 &
	until_true 'nfsrdmad list >/dev/null 2>&1' $!
}
free() { # end the mount that an earlier alternative of the block made
	if mountpoint -q "$1"; then nfsrdmad umount "$1" || umount "$1"; fi
}
finish() { # leave no mount and no process of a mount
	for d in /mnt DIR; do if mountpoint -q $d; then umount -l $d; fi; done
	nfsrdmad stop >/dev/null 2>&1 || true
	kill $(jobs -p) 2>/dev/null || true
}
trap finish EXIT
`

// script returns the shell program of a block. It writes a line "@@ N CODE" after the output of
// statement N.
func script(statements []reference.Statement) string {
	var b strings.Builder
	b.WriteString(setup)
	serves, mounts, usesMount, backend := false, false, false, false
	for _, s := range statements {
		for _, c := range s.Commands {
			serves = serves || begins(c, "nfsrdmad serve")
			mounts = mounts || mountsAt(c, "/mnt")
			usesMount = usesMount || !mounts && slices.Contains(c, "/mnt")
			backend = backend || slices.Contains(c, "--backend")
		}
	}
	if !serves { // the block needs the ports
		b.WriteString("serve\n")
	}
	if backend {
		b.WriteString("backend\n")
	}
	b.WriteString("start_daemon\n")
	if usesMount { // before the block mounts there
		b.WriteString("nfsrdmad mount server:/export /mnt\n")
	}
	b.WriteString("set +e\n")
	for i, s := range statements {
		b.WriteString(statement(i, &s))
	}
	return b.String()
}

// mountsAt reports whether a command mounts at dir.
func mountsAt(command []string, dir string) bool {
	return (command[0] == "mount" || begins(command, "nfsrdmad mount")) && slices.Contains(command, dir)
}

// statement returns the shell program of one statement.
func statement(i int, s *reference.Statement) string {
	free := ""
	for _, c := range s.Commands {
		for _, dir := range []string{"/mnt", "DIR"} {
			if mountsAt(c, dir) {
				free += "free " + dir + "\n"
			}
		}
	}
	for _, d := range services {
		if !begins(s.Commands[0], d.command) {
			continue
		}
		if command, ok := strings.CutSuffix(s.Text, "&"); ok { // the following statements use it
			return fmt.Sprintf("%sout=/run/out.%d\n%s >$out 2>&1 &\nuntil_true %s $!; code=$?\n"+
				"cat $out; echo \"@@ %d $code\"\n", free, i, command, quote(d.ready), i)
		}
		return fmt.Sprintf("%sout=/run/out.%d\n%s >$out 2>&1 & pid=$!\nuntil_true %s $pid; code=$?\n"+
			"kill -TERM $pid; wait $pid || code=$?\ncat $out; echo \"@@ %d $code\"\n", free, i, s.Text,
			quote(d.ready), i)
	}
	text := s.Text
	for _, d := range faster {
		if begins(s.Commands[0], d.command) {
			text += " " + d.flags
		}
	}
	return fmt.Sprintf("%s%s\necho \"@@ %d $?\"\n", free, text, i)
}

// quote returns text as one word of the shell.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// limit bounds one block.
const limit = 5 * time.Minute

func runBlock(t *testing.T, program string, b *reference.Block, statements []reference.Statement) {
	t.Helper()
	rest := runScript(t, program, script(statements))
	for i, s := range statements {
		output, after, found := strings.Cut(rest, fmt.Sprintf("@@ %d ", i))
		if !found {
			t.Fatalf("%s:%d: %s: did not run: %s", b.Page, s.Line, s.Text, rest)
		}
		word, tail, _ := strings.Cut(after, "\n")
		rest = tail
		code, err := strconv.Atoi(word)
		if err != nil || (code != 0) != showsFailure(&s) {
			t.Errorf("%s:%d: %s: got exit code %s, want failure %v: %s", b.Page, s.Line, s.Text, word, showsFailure(&s),
				output)
			continue
		}
		if b.Language == "console" {
			if err := sameShape(output, s.Output); err != nil {
				t.Errorf("%s:%d: %s: %v; the output is:\n%s", b.Page, s.Line, s.Text, err, output)
			}
		}
	}
}

// TestDeclarationsAreUsed checks that each declaration matches a command.
func TestDeclarationsAreUsed(t *testing.T) {
	var commands [][]string
	for _, p := range pages(t) {
		for _, b := range p.Blocks {
			if isBlock(&b) {
				statements, err := reference.Statements(&b)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range statements {
					commands = append(commands, s.Commands...)
				}
			}
		}
	}
	check := func(declared string) {
		if !slices.ContainsFunc(commands, func(c []string) bool { return begins(c, declared) }) {
			t.Errorf("no page has a command that begins with %q; remove the declaration", declared)
		}
	}
	for _, d := range notRun {
		check(d.command)
	}
	for _, d := range services {
		check(d.command)
	}
	for _, d := range faster {
		check(d.command)
	}
}

var (
	// target matches a target of the Makefile.
	target = regexp.MustCompile(`(?m)^([a-z][a-z -]*):(?:[^=]|$)`)
	// repository matches a path of this repository.
	repository = regexp.MustCompile(`^(?:\./)?((?:cmd|configs|deploy|docs|internal|pkg|test)/[\w./-]*\w)$`)
)

// TestTargetsAndFilesExist checks the targets of make and the paths of the repository, in blocks
// and in the text.
func TestTargetsAndFilesExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	targets := make(map[string]bool)
	for _, m := range target.FindAllStringSubmatch(string(makefile), -1) {
		for name := range strings.FieldsSeq(m[1]) {
			targets[name] = true
		}
	}
	found := map[string]int{}
	check := func(where string, words []string) {
		for i, w := range words {
			if m := repository.FindStringSubmatch(w); m != nil {
				found["file"]++
				if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
					t.Errorf("%s: %s does not exist", where, w)
				}
			}
			if i > 0 && words[0] == "make" && !strings.Contains(w, "=") && !strings.HasPrefix(w, "-") {
				found["target"]++
				if !targets[w] {
					t.Errorf("%s: make %s: the Makefile has no such target", where, w)
				}
			}
		}
	}
	all, err := reference.Pages(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		for _, s := range p.Spans {
			check(fmt.Sprintf("%s:%d", p.Name, s.Line), strings.Fields(s.Text))
		}
		for _, b := range p.Blocks {
			if isBlock(&b) {
				statements, err := reference.Statements(&b)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range statements {
					for _, c := range s.Commands {
						check(fmt.Sprintf("%s:%d", p.Name, s.Line), c)
					}
				}
			}
		}
	}
	if found["file"] < 20 || found["target"] < 20 {
		t.Errorf("got %v names, want more; a pattern is wrong", found)
	}
}
