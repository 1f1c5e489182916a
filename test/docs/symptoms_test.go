package docs

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/reference"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// symptoms are shell programs that fail, in order, and the message that docs/troubleshooting.md
// quotes for the failure.
var symptoms = []struct{ script, quote string }{
	{`setpriv --reuid 65534 --clear-groups nfsrdmad list`,
		`daemon at SOCKET: permission denied; run as root, or as a member of its control_group`},
	{`echo 'log_leve = "info"' >c.toml; nfsrdmad daemon --config c.toml`, `configuration FILE:LINE: unknown key "KEY"`},
	{`echo 'connect_timeout = 3' >c.toml; nfsrdmad daemon --config c.toml`,
		`configuration FILE:LINE: KEY must be a string in quotes`},
	{`nfsrdmad daemon --config none.toml`, `read configuration: ...; set its path with --config`},
	{`nfsrdmad daemon`,
		`control socket SOCKET: in use by the daemon with pid N; stop it, or choose another --control-socket`},
	{`mkdir -m 0777 w; chmod 0777 w; nfsrdmad daemon --control-socket $PWD/w/s`,
		`control socket SOCKET: directory D is writable by other users`},
	{`nfsrdmad daemon --control-socket /run/s --control-group nosuchgroup`,
		`unknown group "NAME"; create it with groupadd, or correct the name`},
	{`nfsrdmad mount server:/export /mnt -o hardd`, `mount option "NAME": unknown; see nfsrdmad mount --help`},
	{`nfsrdmad mount server:/export /mnt -o vers=4`, `only NFS version 3 is supported`},
	{`nfsrdmad mount server:/export /mnt -o sec=krb5`, `Kerberos is not supported`},
	{`nfsrdmad mount server /mnt`, `missing colon between server and export`},
	{`nfsrdmad mount server:/export none`, `mount point DIR does not exist; create it with mkdir`},
	{`nfsrdmad mount server:/export /run`, `mount point DIR: already a mount of type TYPE; unmount it first`},
	{`setpriv --reuid 65534 --clear-groups nfsrdmad mount --foreground server:/export /mnt`,
		`no privilege to mount: CAP_SYS_ADMIN is missing`},
	{`nfsrdmad mount nosuchhost:/export /mnt`, `server "NAME": lookup NAME ...; check the spelling, or use an address`},
	{`nfsrdmad mount server:/export /mnt -o port=9`, "RDMA connection to A:P: connect: unreachable: ... connection " +
		"refused; check that the server listens for NFS/RDMA there, or set port="},
	{`nfsrdmad mount server:/export /mnt -o port=111`,
		`the peer closed the connection without an MPA reply`},
	{`nfsrdmad mount 127.0.0.1:/export /mnt -o port=9620`, `the peer does not speak MPA`},
	{`nfsrdmad mount server:/export /mnt -o mountport=9`, `MOUNT service does not answer`},
	{`nfsrdmad mount server:/none /mnt`, `MNT3ERR_NOENT (no such directory is exported)`},
	{`nfsrdmad mount server:/export /mnt -o provider=rdmacore`, `program was built without the rdma-core provider`},
	{`nfsrdmad umount /mnt`, `unmount DIR: not mounted by this daemon; see nfsrdmad list`},
	{`rm /usr/sbin/mount.nfsrdma; mount -t nfsrdma server:/export /mnt`, `unknown filesystem type 'nfsrdma'`},
	{`nfsrdmad mount server:/export /mnt && nfsrdmad mount server:/export /mnt`,
		`mount point DIR: already an nfsrdma mount; unmount it first, with umount(8) if its daemon was killed`},
	{`exec 6</mnt/hello; umount /mnt; r=$?; exec 6<&-; (exit $r)`, `target is busy`},
	{`echo a >/run/root/export/f; exec 6</mnt/f; rm /run/root/export/f; cat <&6; r=$?; exec 6<&-; (exit $r)`,
		`Stale file handle`},
	{`nfsrdmad umount /mnt; nfsrdmad mount server:/export /mnt -o ro && touch /mnt/new`, `Read-only file system`},
	{`nfsrdmad umount /mnt; nfsrdmad mount server:/export /mnt -o nlmport=9 && touch /mnt/l && flock /mnt/l true`,
		`No locks available`},
	{`cat /run/daemon.log; false`, `locks fail with ENOLCK`},
	{`nfsrdmad daemon --control-socket /run/nfsrdmad/s --metrics-listen 127.0.0.1:111 >m.log 2>&1 & p=$!
until_true 'grep -q started m.log' $p; kill $p; wait $p; cat m.log; false`,
		`metrics are not available; the daemon retries`},
	// The writer closes no descriptor of its file, which would commit its data.
	{`mkdir soft; nfsrdmad mount server:/export soft -o soft,timeo=20,retrans=1
nfsrdmad umount /mnt; nfsrdmad mount server:/export /mnt
sh -c 'printf data; : 3>written; exec tail -f /dev/null' >/mnt/lost & writer=$!
until_true 'test -e written'; kill $server; wait $server; cat soft/hello`, `Input/output error`},
	{`cat /run/daemon.log; false`, `connection lost`},
	{`umount -l soft; nfsrdmad umount /mnt`,
		`unmount DIR: in use; close its files (fuser -m lists the processes), or use --lazy or --force`},
	{`nfsrdmad umount --force /mnt; kill $writer; cat /run/daemon.log; false`,
		`written data lost: the mount ended before the server had it`},
	{`nfsrdmad stop; nfsrdmad list`,
		`daemon at SOCKET: not running; start it with "systemctl start nfsrdmad" or "nfsrdmad daemon"`},
	{`serve; nfsrdmad daemon --keep-mounts=false >/run/daemon.log 2>&1 & p=$!
until_true 'nfsrdmad list >/dev/null 2>&1' $p; until_true 'grep -qs "serving RDMA" /run/serve.log'
nfsrdmad mount server:/export /mnt; kill -KILL $p; wait $p; ls /mnt`, `Transport endpoint is not connected`},
	{`start_daemon; nfsrdmad status /mnt`, `another process owns the mount at DIR; use umount(8)`},
	{`cat /run/daemon.log; umount /mnt; false`,
		`other processes own nfsrdma mounts; remove those of a killed daemon with umount(8)`},
}

// TestSymptoms makes failures, and checks that they have the messages that docs/troubleshooting.md
// quotes.
func TestSymptoms(t *testing.T) {
	kit.NeedsFUSE(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	page := strings.Join(strings.Fields(string(text)), " ")
	script := setup + "serve\nstart_daemon\nset +eu\n"
	for i, s := range symptoms {
		if !strings.Contains(page, "`"+s.quote+"`") {
			t.Errorf("docs/troubleshooting.md does not quote `%s`", s.quote)
		}
		script += fmt.Sprintf("%s\necho \"@@ %d $?\"\n", s.script, i)
	}
	out := runScript(t, buildProgram(t), script)
	for i, s := range symptoms {
		output, after, found := strings.Cut(out, fmt.Sprintf("@@ %d ", i))
		if !found {
			t.Fatalf("%s: did not run: %s", s.script, out)
		}
		code, rest, _ := strings.Cut(after, "\n")
		out = rest
		missing := reference.MissingParts(s.quote, []string{strings.Join(strings.Fields(output), " ")})
		if code == "0" || len(missing) > 0 {
			t.Errorf("%s: got exit code %s and %q, want a failure with %q", s.script, code, output, s.quote)
		}
	}
}

// buildProgram returns the path of the program.
func buildProgram(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "nfsrdmad")
	build := exec.Command("go", "build", "-o", program, "./cmd/nfsrdmad")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", build, err, out)
	}
	return program
}

// fstab returns the lines of fstab(5) that the pages show.
func fstab(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, p := range pages(t) {
		for _, block := range p.Blocks {
			if block.Language == "fstab" {
				b.WriteString(block.Text)
			}
		}
	}
	return b.String()
}

// runScript runs a shell program with the functions of setup in namespaces for itself, and returns
// its output.
func runScript(t *testing.T, program, script string) string {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(filepath.Join(root, "test/isolate"), "bash", "-c", script)
	cmd.Env = append(os.Environ(), "PROGRAM="+program, "FSTAB="+fstab(t))
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait() // the codes in the output count
	timer.Stop()
	return out.String()
}

// TestMetricsAreDocumented checks that docs/reference.md has each metric of a daemon with a mount,
// with its type. A native histogram looks like a histogram without buckets in text.
func TestMetricsAreDocumented(t *testing.T) {
	kit.NeedsFUSE(t)
	page, err := os.ReadFile(filepath.Join(root, "docs/reference.md"))
	if err != nil {
		t.Fatal(err)
	}
	out := runScript(t, buildProgram(t), setup+`serve
start_daemon
nfsrdmad mount server:/export /mnt
cat /mnt/hello
exec 6<>/dev/tcp/127.0.0.1/9620
printf 'GET /metrics HTTP/1.0\r\n\r\n' >&6
cat <&6
`)
	n := 0
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		if len(words) != 4 || words[1] != "TYPE" || !strings.HasPrefix(words[2], "nfsrdmad_") {
			continue
		}
		n++
		row := fmt.Sprintf("| `%s` | %s |", words[2], words[3])
		if !strings.Contains(string(page), row) &&
			!strings.Contains(string(page), strings.Replace(row, "| histogram", "| native histogram", 1)) {
			t.Errorf("docs/reference.md has no row %s", row)
		}
	}
	if n < 60 {
		t.Errorf("got %d metrics, want those of a mount: %s", n, out)
	}
}
