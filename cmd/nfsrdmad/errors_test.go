package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// mpaRequestBytes is the size of the fixed part of an MPA request (RFC 5044 §7.1.1).
const mpaRequestBytes = 20

// TestMountErrors gives invalid input and invalid servers to the mount command. Each mount must
// fail with one line that names the operation and the object. The daemon and the other mount must
// go on. pkg/mount tests invalid replies of NFS.
func TestMountErrors(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--connect-timeout", "5m") // no case waits for it
	good := w.mkdir(t, "good")
	w.mount(t, good).succeeds(t)
	free, file := w.mkdir(t, "free"), filepath.Join(w.dir, "file")
	kit.Must(t, os.WriteFile(file, nil, 0o600))
	closed := kit.ClosedPort(t)
	readRequest := func(c net.Conn) { _, _ = io.ReadFull(c, make([]byte, mpaRequestBytes)) }
	web := peer(t, func(c net.Conn) {
		readRequest(c)
		_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
	})
	closes := peer(t, func(c net.Conn) { readRequest(c); c.Close() })
	// RFC 5044 §7.1.1: R set; revision 2 would carry IRD and ORD
	rejects := peer(t, func(c net.Conn) {
		readRequest(c)
		_, _ = c.Write(append([]byte("MPA ID Rep Frame"), 0x20, 2, 0, 0))
	})
	mountAt := func(a netip.AddrPort) string { return fmt.Sprintf("mountport=%d", a.Port()) }
	mountd := func(answer tcpAnswer) string { return mountAt(rpcPeer(t, answer)) }
	good0 := w.opts(w.server.RDMAAddr)
	const spec = "127.0.0.1:/"
	for _, tt := range []struct {
		name            string
		spec, dir, opts string
		code            int
		want            string // texts in the error, separated by |
	}{
		{"closed port", spec, free, w.opts(closed), 32, closed.String() + "|refused|port="},
		{"HTTP server", spec, free, w.opts(web), 32, web.String() + "|does not speak MPA"},
		{"closes at once", spec, free, w.opts(closes), 32, closes.String() + "|closed the connection"},
		{"MPA reject", spec, free, w.opts(rejects), 32, rejects.String() + "|reject"},
		{"MOUNT port closed", spec, free, mountAt(closed), 32, "MOUNT|" + closed.String() + "|refused|mountport="},
		{"MOUNT port is an HTTP server", spec, free, mountAt(web), 32, "MNT /|" + web.String() + "|NFS version 3"},
		{"export not known", spec, free, mountd(words(2)), 32, "MNT /|MNT3ERR_NOENT|check the path"},
		{"export refused", spec, free, mountd(words(13)), 32, "MNT /|MNT3ERR_ACCES|exports it to this client"},
		{"MOUNT reply is truncated", spec, free, mountd(words(0, 64)), 32, "MNT /|NFS version 3"},
		{"MOUNT wants Kerberos", spec, free, mountd(words(0, 4, 1, 1, 390003)), 32, "MNT /|krb5|sec=sys"},
		{"MOUNT denies the credential", spec, free, mountd(deniedCredential), 32, "MNT /|credential"},
		{"unknown host", "no-such-host.invalid:/", free, good0, 32, `"no-such-host.invalid"|check the spelling`},
		{"no such export", "127.0.0.1:/nowhere", free, good0, 32, "/nowhere"},
		{"server name too long", strings.Repeat("x", 300) + ":/", free, good0, 1, "longer than 255 bytes"},
		{"mount point missing", spec, w.dir + "/missing", good0, 32, "missing|does not exist|mkdir"},
		{"mount point a file", spec, file, good0, 32, file + "|not a directory"},
		{"mount point below a file", spec, file + "/x", good0, 32, file + "|not a directory"},
		{"mounted already", spec, good, good0, 32, good + "|already an nfsrdma mount|unmount it first|umount(8)"},
		{"another is mounted already", spec, "/proc", good0, 32, "/proc|already a mount of type proc|unmount it first"},
		{"no colon", "127.0.0.1", free, good0, 1, "127.0.0.1|HOST:/EXPORT"},
		{"link-local without interface", "[fe80::1]:/", free, good0, 1, "fe80::1|needs its interface|%eth0"},
		{"option out of range", spec, free, "rsize=7", 1, `"rsize=7"|4096 to 1048576`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.run(t, "mount", tt.spec, tt.dir, "-o", tt.opts).fails(t, tt.code, strings.Split(tt.want, "|")...)
		})
	}
	w.checkMount(t, good)
	nfsrdmad(t, "mount", "--foreground", spec, free, "-o", mountAt(closed)).fails(t, 32, "refused", "mountport=")
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--connect-timeout", "1s")
	hangs := peer(t, func(net.Conn) {})
	w.run(t, "mount", spec, free, "-o", mountAt(hangs)).fails(t, 32, "MOUNT", hangs.String(), "mountport=")
}

func deniedCredential(c sunrpc.CallHeader) []byte {
	return sunrpc.AppendDeniedReply(nil, c.XID, sunrpc.AuthTooWeak)
}

// TestDaemonRefusesCommands covers commands other than mount that the daemon must refuse.
func TestDaemonRefusesCommands(t *testing.T) {
	w := newTestEnv(t)
	good, free := w.mkdir(t, "good"), w.mkdir(t, "free")
	w.mount(t, good).succeeds(t)
	w.run(t, "daemon", "--metrics-listen", "", "--state-dir", w.dir).fails(t, 2, w.socket,
		fmt.Sprint("pid ", w.daemon.Process.Pid))
	f, err := os.Open(filepath.Join(good, "hello"))
	kit.Must(t, err)
	defer f.Close()
	w.run(t, "umount", good).fails(t, 32, good, "in use", "--lazy")
	w.run(t, "umount", free).fails(t, 32, free)
	w.run(t, "umount", "--force", "/proc").fails(t, 32, "/proc", "another process owns the mount", "umount(8)")
	w.run(t, "status", "/proc").fails(t, 32, "/proc", "another process owns the mount")
	w.run(t, "status", free).fails(t, 32, free, "nfsrdmad list")
	gone := filepath.Join(free, "no", "where")
	for _, verb := range []string{"status", "umount", "trace", "stats"} {
		o := w.run(t, verb, gone)
		o.fails(t, 32, gone, "does not exist")
		if strings.Contains(o.stderr, "mkdir") {
			t.Errorf("%s: %s", verb, o.stderr)
		}
	}
	w.checkMount(t, good)

	kit.Must(t, os.Chmod(w.dir, 0o755))
	cmd := program(t, "nfsrdmad", "list", "--control-socket", w.socket)
	asUnprivileged(t, cmd)
	finish(t, cmd).fails(t, 1, w.socket, "run as root")
	cmd = program(t, "nfsrdmad", "mount", "--foreground", "127.0.0.1:/", "/mnt")
	asUnprivileged(t, cmd)
	finish(t, cmd).fails(t, control.ExitUsage, "no privilege", "run as root")
}

// asUnprivileged makes cmd run as an unprivileged user. It uses a copy of the program that this
// user can read.
func asUnprivileged(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	const uid = 65534
	dir, err := os.MkdirTemp("/tmp", "nfsrdmad-test-")
	kit.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin, err := os.ReadFile(cmd.Path)
	kit.Must(t, err)
	cmd.Path = filepath.Join(dir, "nfsrdmad")
	kit.Must(t, errors.Join(os.Chmod(dir, 0o755), os.WriteFile(cmd.Path, bin, 0o755)))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.Dir = "/"
}

func TestUsageErrors(t *testing.T) {
	dir := t.TempDir()
	gone, file, config := filepath.Join(dir, "s"), filepath.Join(dir, "file"), filepath.Join(dir, "c.toml")
	long := "/tmp/" + strings.Repeat("x", 200)
	kit.Must(t, os.WriteFile(file, []byte("content"), 0o600))
	kit.Must(t, os.WriteFile(config, []byte("log_level = 'info'\n\ninject = 'disconnect-every=often'\n"), 0o600))
	for _, tt := range []struct {
		name string
		args string // separated by spaces
		code int
		want string // texts in the error, separated by |
	}{
		{"no daemon", "list --control-socket=" + gone, 2, gone + "|not running|systemctl start"},
		{"no daemon to stop", "stop --control-socket " + gone, 2, gone + "|not running"},
		{"no daemon to watch", "stats --watch --control-socket " + gone, 2, "not running; start it"},
		{"unknown command", "frobnicate", 1, "frobnicate"},
		{"unknown flag", "umount --frobnicate /mnt", 1, "frobnicate|nfsrdmad umount --help"},
		{"output", "version --output xml", 1, "xml|text or json"},
		{"mistyped command", "mont", 1, `"mont"|did you mean mount or umount?|nfsrdmad --help`},
		{"too few arguments", "mount a:/b", 1, "1 argument given|nfsrdmad mount HOST:/EXPORT DIR"},
		{"too many arguments", "mount a:/b /mnt -o hard soft", 1, "3 arguments given|HOST:/EXPORT DIR"},
		{"no number", "trace /mnt --last x", 1, `"x"|--last|must be a number; see nfsrdmad trace --help`},
		{"force and lazy", "umount --force --lazy /mnt", 1, "[force lazy]|none of the others"},
		{"empty socket", "list --control-socket=", 1, "empty path|--control-socket"},
		{"socket path too long", "list --control-socket " + long, 2, "/tmp/xxx|invalid argument"},
		{"remount", "mount a:/b /mnt -o remount,ro", 1, `"remount"|unmount it, then mount it again`},
		{"background", "mount a:/b /mnt -o bg", 1, `"bg"|nofail`},
		{"long option", "mount a:/b /mnt -o " + strings.Repeat("x", 9000), 1, "unknown|9000 bytes"},
		{"another namespace", "mount a:/b /mnt -N /proc/1/ns/mnt", 1, "-N"},
		{"share without socket", "virtiofs 127.0.0.1:/", 1, "--socket is missing"},
		{"demo of no files", "demo --files 0", 1, "--files=0|1 or more"},
		{"stats interval", "stats --interval 1ms", 1, "invalid --interval 1ms: use 100ms or more"},
		{"stats count", "stats --count 3", 1, "--count needs --interval or --watch"},
		{"stats of no interval", "stats --interval 1s --count 0", 1, "invalid --count 0"},
		{"bench without directory", "bench", 1, "usage: nfsrdmad bench DIR"},
		{"bench of nothing", "bench /tmp --size 0", 1, "--size=0: must be from 1 to"},
		{"bench without time", "bench /tmp --time 0", 1, "--time=0s: must be more than 0"},
		{"bench elsewhere", "bench " + gone, 1, gone + "|no such file or directory"},
		{"doctor configuration", "doctor --config " + gone, 1, "no such file"},
		{"doctor of nothing", "doctor --write", 1, "HOST:/EXPORT"},
		{"doctor option", "doctor a:/b -o nonsense", 1, "nonsense"},
		{"doctor timeout", "doctor a:/b --timeout 0s", 1, "--timeout"},
		{"config missing", "daemon --config " + gone, 1, gone},
		{"config invalid", "daemon --config " + config, 1, config + `|inject|"disconnect-every=often"`},
		{"flag of the daemon", "daemon --connect-timeout soon", 1, `connect-timeout|"soon"`},
		{"switch of the daemon", "daemon --keep-mounts=no", 1, "keep-mounts|must be true or false"},
		{"socket is a file", "daemon --metrics-listen= --control-socket " + file, 2, file + "|not a socket"},
		{"socket below a file", "daemon --control-socket /proc/version/s", 2, "/proc/version/s"},
		{"fault", "daemon --inject seed=7,disconect-every=60", 1, `"disconect-every=60"|no such fault`},
		{"fault of serve", "serve " + dir + " --inject late-write=0", 1, `"late-write=0"|number from 1`},
		{"fault in the background", "mount --inject lose-reply=3 a:/b " + dir, 1, "--inject|--foreground"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := nfsrdmad(t, strings.Fields(tt.args)...)
			o.fails(t, tt.code, strings.Split(tt.want, "|")...)
			if len(o.stderr) > 500 {
				t.Errorf("got an error of %d bytes, want at most 500", len(o.stderr))
			}
		})
	}
	finish(t, program(t, helperName, "a:/b", "/mnt", "-N", "/proc/1/ns/mnt")).fails(t, 1, "-N",
		"run a daemon or nfsrdmad mount --foreground in that namespace")
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("got files %v, %v; want only the two of the test", left, err)
	}
}

// TestWrongFUSEDevice starts commands without /dev/fuse, and with another device in its place. They
// must report it before they contact a server.
func TestWrongFUSEDevice(t *testing.T) {
	kit.NeedsRoot(t)
	for _, tt := range []struct{ setUp, args, want string }{
		{"mount -t tmpfs none /dev", "mount --foreground 127.0.0.1:/ /mnt", "modprobe fuse"},
		{"mount --bind /dev/null /dev/fuse", "mount --foreground 127.0.0.1:/ /mnt", "not the FUSE device"},
		{"mount --bind /dev/null /dev/fuse", "doctor --output json", "not the FUSE device"},
	} {
		inner := program(t, "nfsrdmad")
		cmd := exec.Command("unshare", "-m", "sh", "-c", tt.setUp+` && exec "$0" `+tt.args, inner.Path)
		cmd.Env = inner.Env
		if o := finish(t, cmd); o.code != control.ExitSystem || !strings.Contains(o.stderr, "/dev/fuse") ||
			!strings.Contains(o.stderr, tt.want) || strings.Count(o.stderr, "\n") != 1 {
			t.Errorf("%s: got exit code %d: %s", tt.args, o.code, o.stderr)
		}
	}
}

// TestDaemonReportsMountsOfKilledDaemon checks that a new daemon logs the mounts that a killed
// daemon without keep_mounts left, and that a mount error there says what to do.
func TestDaemonReportsMountsOfKilledDaemon(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.kill()
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	if _, err := os.ReadDir(dir); !errors.Is(err, syscall.ENOTCONN) {
		t.Errorf("read of the mount of the killed daemon: got %v, want ENOTCONN", err)
	}
	w.run(t, "list").fails(t, 2, w.socket, "not running")
	w.log.Reset()
	w.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	w.mount(t, dir).fails(t, 32, dir, "nfsrdma mount", "umount(8)")
	kit.Must(t, exec.Command("umount", dir).Run())
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	w.stop(t, w.daemon)
	if log := w.log.String(); !strings.Contains(log, "remove those of a killed daemon") || !strings.Contains(log, dir) {
		t.Errorf("got log %s, want a line about mounts of a killed daemon", log)
	}
}
