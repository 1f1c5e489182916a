package docs

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// commands are lines of pages that must succeed, in order. The output must have the lines that the
// page shows.
var commands = []struct{ page, line string }{
	{"docs/doctor.md", "nfsrdmad doctor"},
	{"docs/doctor.md", "nfsrdmad doctor server:/export --write"},
	{"docs/install.md", "nfsrdmad doctor server:/export"},
	{"docs/install.md", "nfsrdmad mount server:/export /mnt"},
	{"docs/install.md", "nfsrdmad list"},
	{"docs/troubleshooting.md", "nfsrdmad status /mnt"},
	{"docs/troubleshooting.md", "nfsrdmad stats /mnt"},
	{"docs/troubleshooting.md", "nfsrdmad status --slow /mnt"},
	{"docs/troubleshooting.md", "nfsrdmad trace /mnt --follow=false --last 20"},
	{"docs/troubleshooting.md", "nfsrdmad doctor server:/export --bundle report.tar.gz"},
	{"docs/install.md", "nfsrdmad umount /mnt"},
	{"docs/mount.md", "nfsrdmad mount server:/export /mnt -o soft,timeo=100"},
	{"docs/troubleshooting.md", "umount /mnt"},
	{"docs/mount.md", "nfsrdmad mount '[2001:db8::1]:/export' /mnt"},
	{"README.md", "nfsrdmad umount /mnt"},
	{"docs/mount.md", "mount -t nfsrdma server:/export /mnt"},
	{"docs/troubleshooting.md", "umount /mnt"},
	{"docs/mount.md", "mount -fv /mnt"},
	{"docs/mount.md", "mount /mnt"},
	{"docs/troubleshooting.md", "umount /mnt"},
	{"docs/mount.md", "mount -t nfsrdma server:/export /mnt -o allow_suid,allow_dev"},
	{"docs/mount.md", "findmnt -no VFS-OPTIONS /mnt"},
	{"docs/troubleshooting.md", "umount /mnt"},
	{"docs/tuning.md", "nfsrdmad mount 192.0.2.1:/data DIR -o nconnect=5,remoteports=192.0.2.1-192.0.2.4"},
	{"docs/virtiofs.md", "nfsrdmad virtiofs --socket /run/vm1.sock server:/export"},
}

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
	{`nfsrdmad umount /mnt; nfsrdmad mount server:/export /mnt
sh -c 'printf data; : 3>written; exec tail -f /dev/null' >/mnt/lost & writer=$!
until_true 'test -e written'; kill $server; wait $server
until_true 'grep -q "connection lost" /run/daemon.log'; cat /run/daemon.log; false`, `connection lost`},
	{`nfsrdmad umount /mnt`,
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
start_daemon() {
	nfsrdmad daemon >/run/daemon.log 2>&1 &
	until_true 'nfsrdmad list >/dev/null 2>&1' $!
}
finish() { # leave no mount and no process of a mount
	for d in /mnt DIR; do if mountpoint -q $d; then umount -l $d; fi; done
	nfsrdmad stop >/dev/null 2>&1 || true
	kill $(jobs -p) 2>/dev/null || true
}
trap finish EXIT
`

// TestCommands runs documented commands, and makes the failures of docs/troubleshooting.md. The last
// command shows the metrics.
func TestCommands(t *testing.T) {
	kit.NeedsFUSE(t)
	all := pages(t)
	script := setup + "serve\nstart_daemon\nset +eu\n"
	n := 0
	run := func(text string) {
		script += fmt.Sprintf("%s\necho \"@@ %d $?\"\n", text, n)
		n++
	}
	for _, c := range commands {
		run(c.line)
	}
	run("umount DIR; curl -sf http://127.0.0.1:9620/metrics")
	for _, s := range symptoms {
		run(s.script)
	}
	rest := runScript(t, buildProgram(t), script)
	next := func(text string) (code, output string) {
		t.Helper()
		output, tail, found := strings.Cut(rest, "@@ ")
		if !found {
			t.Fatalf("%s: did not run: %s", text, rest)
		}
		line, tail, _ := strings.Cut(tail, "\n")
		rest = tail
		return strings.Fields(line)[1], output
	}
	for _, c := range commands {
		code, output := next(c.line)
		shown := shownOutput(t, all[c.page], c.page, c.line)
		if code != "0" || len(missingLines(shown, output)) > 0 {
			t.Errorf("%s: %s: got exit code %s, and no lines %q in:\n%s", c.page, c.line, code,
				missingLines(shown, output), output)
		}
	}
	_, metrics := next("metrics")
	checkMetrics(t, all["docs/reference.md"], metrics)
	page := strings.Join(strings.Fields(all["docs/troubleshooting.md"]), " ")
	for _, s := range symptoms {
		code, output := next(s.script)
		if !strings.Contains(page, "`"+s.quote+"`") {
			t.Errorf("docs/troubleshooting.md does not quote `%s`", s.quote)
		}
		missing := missingParts(s.quote, strings.Join(strings.Fields(output), " "))
		if code == "0" || len(missing) > 0 {
			t.Errorf("%s: got exit code %s and %q, want a failure with %q", s.script, code, output, s.quote)
		}
	}
}

// shownOutput returns the lines that a page shows below a command. The page must have the command.
func shownOutput(t *testing.T, text, page, line string) []string {
	t.Helper()
	m := regexp.MustCompile(`(?m)^(# )?` + regexp.QuoteMeta(line) + `(?: +#.*| &)?\n((?s:.*?))(?:^# |^` + "```)").
		FindStringSubmatch(text)
	if m == nil {
		t.Errorf("%s does not have the command %s", page, line)
		return nil
	}
	if m[1] == "" { // not a console
		return nil
	}
	return strings.Split(m[2], "\n")
}

// varying matches what differs between runs: durations, other numbers, and the width of columns.
var varying = regexp.MustCompile(`[\d.]+ (ms|s)\b|[\d.]+|\s+`)

// missingLines returns the shown lines that output does not have.
func missingLines(shown []string, output string) (missing []string) {
	have := varying.ReplaceAllString(output, "")
	for _, line := range shown {
		if line != "..." && !strings.Contains(have, varying.ReplaceAllString(line, "")) {
			missing = append(missing, line)
		}
	}
	return missing
}

// checkMetrics checks that docs/reference.md has each metric of a daemon with its type. A native
// histogram looks like a histogram without buckets in text.
func checkMetrics(t *testing.T, page, metrics string) {
	t.Helper()
	all := regexp.MustCompile(`(?m)^# TYPE (nfsrdmad_\w+) (\w+)$`).FindAllStringSubmatch(metrics, -1)
	for _, m := range all {
		row := regexp.MustCompile("(?m)^\\| `" + m[1] + "` \\| (native )?" + m[2] + " \\|")
		if !row.MatchString(page) {
			t.Errorf("docs/reference.md has no metric %s of type %s", m[1], m[2])
		}
	}
	if len(all) < 60 {
		t.Errorf("got %d metrics, want those of a mount: %s", len(all), metrics)
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

// runScript runs a shell program in namespaces for itself, and returns its output.
func runScript(t *testing.T, program, script string) string {
	t.Helper()
	fstab := ""
	for _, text := range pages(t) {
		for _, m := range fencedBlock.FindAllStringSubmatch(text, -1) {
			if m[1] == "fstab" {
				fstab += m[2]
			}
		}
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, "test/isolate"), "bash", "-c", script)
	cmd.Env = append(os.Environ(), "PROGRAM="+program, "FSTAB="+fstab)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(10*time.Minute, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait() // the codes in the output count
	timer.Stop()
	return out.String()
}
