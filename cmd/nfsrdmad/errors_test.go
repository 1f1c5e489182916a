package main

import (
	"crypto/rand"
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
// fail in bounded time with one line that names the operation and the object. The daemon and the
// other mount must go on.
func TestMountErrors(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	good := w.mkdir(t, "good")
	w.mount(t, good).succeeds(t)
	free := w.mkdir(t, "free")
	file := filepath.Join(w.dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	closed := kit.ClosedPort(t)
	readRequest := func(c net.Conn) { _, _ = io.ReadFull(c, make([]byte, mpaRequestBytes)) }
	hangs := peer(t, func(net.Conn) {})
	hangsInReply := peer(t, func(c net.Conn) { readRequest(c); _, _ = c.Write([]byte("MPA ID Rep")) })
	web := peer(t, func(c net.Conn) {
		readRequest(c)
		_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
	})
	noise := peer(t, func(c net.Conn) { readRequest(c); _, _ = io.CopyN(c, rand.Reader, 4096) })
	closes := peer(t, func(c net.Conn) { readRequest(c); c.Close() })
	// RFC 5044 §7.1.1: R set; revision 2 would carry IRD and ORD
	rejects := peer(t, func(c net.Conn) {
		readRequest(c)
		_, _ = c.Write(append([]byte("MPA ID Rep Frame"), 0x20, 2, 0, 0))
	})
	at := func(a netip.AddrPort) string { return w.opts(a) }
	mountAt := func(a netip.AddrPort) string { return fmt.Sprintf("mountport=%d", a.Port()) }
	withMount := func(a netip.AddrPort) string {
		return fmt.Sprintf("port=%d,mountport=%d", w.server.RDMAAddr.Port(), a.Port())
	}
	mountd := func(answer tcpAnswer) string { return withMount(rpcPeer(t, "127.0.0.1:0", answer)) }
	check := func(name, spec, dir, opts string, code int, want string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if dir == "" {
				dir = w.mkdir(t, strings.ReplaceAll(name, " ", "-"))
			}
			o := nfsrdmad(t, "mount", "--control-socket", w.socket, spec, dir, "-o", opts)
			o.fails(t, code, strings.Split(want, "|")...)
			w.checkMount(t, good)
		})
	}
	good0 := w.opts(w.server.RDMAAddr)
	const spec = "127.0.0.1:/"

	for _, tt := range []struct {
		name, opts string
		want       string // texts in the error, separated by |
	}{
		{"closed port", at(closed), closed.String() + "|refused|port="},
		{"HTTP server", at(web), web.String() + "|does not speak MPA"},
		{"random bytes", at(noise), noise.String() + "|does not speak MPA"},
		{"closes at once", at(closes), closes.String() + "|closed the connection"},
		{"MPA reject", at(rejects), rejects.String() + "|reject"},
		{"hangs after connect", at(hangs), hangs.String() + "|did not answer"},
		{"hangs within the MPA reply", at(hangsInReply), hangsInReply.String() + "|did not answer"},

		{"MOUNT port closed", withMount(closed), "MOUNT|" + closed.String() + "|refused|mountport="},
		{"MOUNT port hangs", mountAt(hangs), "MOUNT|" + hangs.String() + "|mountport="},
		{"MOUNT port is an HTTP server", mountAt(web), "MNT /|" + web.String() + "|NFS version 3"},
		{"MOUNT port sends random bytes", mountAt(noise), "MNT /|" + noise.String() + "|NFS version 3"},
		{"export not known", mountd(words(2)), "MNT /|MNT3ERR_NOENT|check the path"},
		{"export refused", mountd(words(13)), "MNT /|MNT3ERR_ACCES|exports it to this client"},
		{"export not permitted", mountd(words(1)), "MNT /|MNT3ERR_PERM|exports it to this client"},
		{"export is not a directory", mountd(words(20)), "MNT3ERR_NOTDIR"},
		{"MOUNT status out of range", mountd(words(4711)), "4711"},
		{"MOUNT reply is truncated", mountd(words(0, 64)), "MNT /|NFS version 3"},
		{"MOUNT handle length overflows", mountd(words(0, 0xfffffffc, 1)), "MNT /|NFS version 3"},
		{"MOUNT flavors overflow", mountd(words(0, 4, 1, 0x40000001, 1)), "MNT /|NFS version 3"},
		{"MOUNT wants Kerberos", mountd(words(0, 4, 1, 1, 390003)), "MNT /|krb5|sec=sys"},
		{"MOUNT with another XID", mountd(otherXID), "MNT /"},
		{"MOUNT of another version", mountd(otherVersion), "MNT /|version"},
		{"MOUNT denies the credential", mountd(deniedCredential), "MNT /|credential"},
	} {
		check(tt.name, spec, "", tt.opts, 32, tt.want)
	}

	for _, tt := range []struct {
		name            string
		spec, dir, opts string // an empty dir stands for a new directory
		code            int
		want            string
	}{
		{"unknown host", "no-such-host.invalid:/", "", good0, 32, `"no-such-host.invalid"|check the spelling`},
		{"no such export", "127.0.0.1:/nowhere", "", good0, 32, "/nowhere"},
		{"server name too long", strings.Repeat("x", 300) + ":/", free, good0, 1, "longer than 255 bytes"},
		{"mount point missing", spec, w.dir + "/missing", good0, 32, "missing|does not exist|mkdir"},
		{"mount point below a missing one", spec, w.dir + "/missing/er", good0, 32, "missing/er|does not exist"},
		{"mount point a file", spec, file, good0, 32, file + "|not a directory"},
		{"mount point below a file", spec, filepath.Join(file, "x"), good0, 32, file + "|not a directory"},
		{"mounted already", spec, good, good0, 32, good + "|already an nfsrdma mount|unmount it first|umount(8)"},
		{"another is mounted already", spec, "/proc", good0, 32, "/proc|already a mount of type proc|unmount it first"},
		{"no colon", "127.0.0.1", free, good0, 1, "127.0.0.1|HOST:/EXPORT"},
		{"IPv6 without brackets", "::1:/", free, good0, 1, "::1:/|[ADDRESS]"},
		{"link-local without interface", "[fe80::1]:/", free, good0, 1, "fe80::1|needs its interface|%eth0"},
		{"option unknown", spec, free, "frobnicate=1", 1, `"frobnicate=1"|unknown`},
		{"option out of range", spec, free, "rsize=7", 1, `"rsize=7"|4096 to 1048576`},
		{"options contradict", spec, free, "hard,soft", 1, `"soft"|"hard"`},
	} {
		check(tt.name, tt.spec, tt.dir, tt.opts, tt.code, tt.want)
	}
}

func otherXID(c sunrpc.CallHeader) []byte { return acceptedWords(c.XID+1, 0) }

func otherVersion(c sunrpc.CallHeader) []byte {
	return sunrpc.AppendProgMismatchReply(nil, c.XID, 1, 1)
}

func deniedCredential(c sunrpc.CallHeader) []byte {
	return sunrpc.AppendDeniedReply(nil, c.XID, sunrpc.AuthTooWeak)
}

// TestDaemonRefusesCommands covers commands other than mount that the daemon must refuse.
func TestDaemonRefusesCommands(t *testing.T) {
	w := newTestEnv(t)
	good := w.mkdir(t, "good")
	w.mount(t, good).succeeds(t)
	free := w.mkdir(t, "free")
	t.Run("second daemon", func(t *testing.T) {
		nfsrdmad(t, "daemon", "--control-socket", w.socket, "--metrics-listen", "", "--state-dir", w.dir).fails(t, 2,
			w.socket, fmt.Sprint("pid ", w.daemon.Process.Pid))
		w.checkMount(t, good)
	})
	t.Run("umount of a directory without a mount", func(t *testing.T) {
		nfsrdmad(t, "umount", "--control-socket", w.socket, free).fails(t, 32, free)
		w.checkMount(t, good)
	})
	t.Run("umount of a mount of another process", func(t *testing.T) {
		nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", "/proc").fails(t, 32, "/proc",
			"another process owns the mount", "umount(8)")
		nfsrdmad(t, "status", "--control-socket", w.socket, "/proc").fails(t, 32, "/proc",
			"another process owns the mount")
		nfsrdmad(t, "status", "--control-socket", w.socket, free).fails(t, 32, free, "nfsrdmad list")
		gone := filepath.Join(free, "no", "where")
		for _, verb := range []string{"status", "umount", "trace"} {
			o := nfsrdmad(t, verb, "--control-socket", w.socket, gone)
			o.fails(t, 32, gone, "does not exist")
			if strings.Contains(o.stderr, "mkdir") {
				t.Errorf("%s: %s", verb, o.stderr)
			}
		}
		w.checkMount(t, good)
	})
	t.Run("umount while in use", func(t *testing.T) {
		f, err := os.Open(filepath.Join(good, "hello"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		nfsrdmad(t, "umount", "--control-socket", w.socket, good).fails(t, 32, good, "in use", "--lazy")
		w.checkMount(t, good)
	})
	t.Run("another user", func(t *testing.T) {
		_ = os.Chmod(w.dir, 0o755)
		cmd := program(t, "nfsrdmad", "list", "--control-socket", w.socket)
		asUnprivileged(t, cmd)
		finish(t, cmd).fails(t, 1, w.socket, "run as root")
	})
}

// asUnprivileged makes cmd run as an unprivileged user. It uses a copy of the program that this
// user can read.
func asUnprivileged(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	const uid = 65534
	dir, err := os.MkdirTemp("/tmp", "nfsrdmad-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin, err := os.ReadFile(cmd.Path)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Path = filepath.Join(dir, "nfsrdmad")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(cmd.Path, bin, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.Dir = "/"
}

func TestForegroundWithoutPrivilege(t *testing.T) {
	kit.NeedsRoot(t)
	cmd := program(t, "nfsrdmad", "mount", "--foreground", "127.0.0.1:/", "/mnt")
	asUnprivileged(t, cmd)
	finish(t, cmd).fails(t, control.ExitUsage, "no privilege", "run as root")
}

func TestNoFuseDevice(t *testing.T) {
	kit.NeedsRoot(t)
	inner := program(t, "nfsrdmad")
	cmd := exec.Command("unshare", "-m", "sh", "-c",
		`mount -t tmpfs none /dev && exec "$0" mount --foreground 127.0.0.1:/ /mnt`, inner.Path)
	cmd.Env = inner.Env
	finish(t, cmd).fails(t, control.ExitSystem, "/dev/fuse", "modprobe fuse")
}

func TestUsageErrors(t *testing.T) {
	gone, long := filepath.Join(t.TempDir(), "s"), "/tmp/"+strings.Repeat("x", 200)
	for _, tt := range []struct {
		name string
		args string // separated by spaces
		code int
		want string // texts in the error, separated by |
	}{
		{"no daemon", "list --control-socket=" + gone, 2, gone + "|not running|systemctl start"},
		{"unknown command", "frobnicate", 1, "frobnicate"},
		{"unknown flag", "list --frobnicate", 1, "frobnicate"},
		{"output", "version --output xml", 1, "xml|text or json"},
		{"mistyped command", "mont", 1, `"mont"|did you mean mount or umount?|nfsrdmad --help`},
		{"unknown flag names the help command", "umount --frobnicate /mnt", 1, "nfsrdmad umount --help"},
		{"too few arguments", "mount a:/b", 1, "1 argument given|nfsrdmad mount HOST:/EXPORT DIR"},
		{"too many arguments", "mount a:/b /mnt -o hard soft", 1, "3 arguments given|HOST:/EXPORT DIR"},
		{"unexpected argument", "list /mnt", 1, "1 argument given|usage: nfsrdmad list"},
		{"no number", "trace /mnt --last x", 1, `"x"|--last|must be a number; see nfsrdmad trace --help`},
		{"force and lazy", "umount --force --lazy /mnt", 1, "[force lazy]|none of the others"},
		{"empty socket", "list --control-socket=", 1, "empty path|--control-socket"},
		{"socket path too long", "list --control-socket " + long, 2, "/tmp/xxx|invalid argument"},
		{"remount", "mount a:/b /mnt -o remount,ro", 1, `"remount"|unmount it, then mount it again`},
		{"lock", "mount a:/b /mnt -o lock,nolock", 1, `"nolock"|contradicts`},
		{"background", "mount a:/b /mnt -o bg", 1, `"bg"|nofail`},
		{"quote in an option", `mount a:/b /mnt -o rsize=8192,"x`, 1, "unknown"},
		{"demo of no files", "demo --files 0", 1, "--files=0|1 or more"},
		{"another namespace", "mount a:/b /mnt -N /proc/1/ns/mnt", 1, "-N"},
		{"config missing", "daemon --config " + gone, 1, gone},
		{"serve nothing", "serve", 1, "directory or a backend"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nfsrdmad(t, strings.Fields(tt.args)...).fails(t, tt.code, strings.Split(tt.want, "|")...)
		})
	}
	t.Run("demo without time", func(t *testing.T) {
		kit.NeedsFUSE(t)
		nfsrdmad(t, "demo", "--timeout", "1ns").fails(t, 32, "not done after 1ns", "--timeout")
	})
	t.Run("long option", func(t *testing.T) {
		o := nfsrdmad(t, "mount", "a:/b", "/mnt", "-o", strings.Repeat("x", 9000))
		o.fails(t, 1, "unknown", "9000 bytes")
		if len(o.stderr) > 500 {
			t.Errorf("got an error of %d bytes, want at most 500", len(o.stderr))
		}
	})
	t.Run("helper and namespace", func(t *testing.T) {
		finish(t, program(t, helperName, "a:/b", "/mnt", "-N", "/proc/1/ns/mnt")).fails(t, 1, "-N",
			"run a daemon or nfsrdmad mount --foreground in that namespace")
	})
}

// TestWrongFUSEDevice binds another device over /dev/fuse. mount and doctor must report it before
// they contact a server.
func TestWrongFUSEDevice(t *testing.T) {
	kit.NeedsRoot(t)
	for _, args := range []string{"mount --foreground 127.0.0.1:/ /mnt", "doctor --output json"} {
		inner := program(t, "nfsrdmad")
		cmd := exec.Command("unshare", "-m", "sh", "-c", `mount --bind /dev/null /dev/fuse && exec "$0" `+args,
			inner.Path)
		cmd.Env = inner.Env
		if o := finish(t, cmd); o.code != control.ExitSystem ||
			!strings.Contains(o.stderr, "/dev/fuse: not the FUSE device") ||
			strings.Count(o.stderr, "\n") != 1 {
			t.Errorf("%s: got exit code %d: %s", args, o.code, o.stderr)
		}
	}
}

func TestForegroundMountReportsErrorOnce(t *testing.T) {
	kit.NeedsFUSE(t)
	nfsrdmad(t, "mount", "--foreground", "127.0.0.1:/", t.TempDir(), "-o",
		fmt.Sprintf("mountport=%d", kit.ClosedPort(t).Port())).fails(t, 32, "refused", "mountport=")
}

// TestDaemonWithoutPrivilege checks that a daemon that cannot mount logs the reason when it starts.
func TestDaemonWithoutPrivilege(t *testing.T) {
	log := daemonWithout(t, "sys_admin", "every mount will fail")
	if !strings.Contains(log, "CAP_SYS_ADMIN is missing") {
		t.Errorf("got log %s, want CAP_SYS_ADMIN", log)
	}
}

// TestConfigurationErrors checks that the daemon names the file, the line and the key of a
// configuration error, and does not start.
func TestConfigurationErrors(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		args       string // separated by spaces
		code       int
		want       string // texts in the error, separated by |
	}{
		{"unknown key", "log_level = 'info'\n\nlog_color = 7\n", "", 1, `c.toml:3|unknown key "log_color"|remove it`},
		{"wrong type", "log_format = \"json\"\nconnect_timeout = 30\n", "", 1, "c.toml:2|connect_timeout"},
		{"wrong type of a string", "log_level = 7\n", "", 1, "c.toml:1|log_level"},
		{"capitals", "\nConnect_Timeout = 30000000000\n", "", 1, `c.toml:2|"Connect_Timeout"|write it connect_timeout`},
		{"table", "[daemon]\nlog_level = \"info\"\n", "", 1, `c.toml:1|"daemon"`},
		{"not TOML", "log_level: info\n", "", 1, "c.toml:1"},
		{"out of range", "shutdown_timeout = \"2h\"\n", "", 1, "c.toml|shutdown_timeout|from 1s to 5m0s"},
		{"not a duration", "shutdown_timeout = \"soon\"\n", "", 1, `c.toml|"soon"|30s`},
		{"mount options", "mount_options = \"hard,soft\"\n", "", 1, `c.toml|mount_options|"soft"|contradicts "hard"`},
		{"flag out of range", "", "--connect-timeout 1ms", 1, "connect_timeout|from 1s"},
		{"flag is not a duration", "", "--connect-timeout soon", 1, `connect-timeout|"soon"`},
		{"socket path too long", "", "--control-socket /tmp/" + strings.Repeat("x", 120), 1, "control socket|bytes"},
		{"socket below a file", "", "--control-socket /proc/version/s", 2, "/proc/version/s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "c.toml")
			if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			args := append([]string{"daemon", "--config", file, "--control-socket", filepath.Join(dir, "s"),
				"--metrics-listen", ""}, strings.Fields(tt.args)...)
			nfsrdmad(t, args...).fails(t, tt.code, strings.Split(tt.want, "|")...)
			if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
				t.Errorf("got files %v, %v; want only the configuration", left, err)
			}
		})
	}
}

func TestDaemonReplacesSocketOfKilledDaemon(t *testing.T) {
	w := newTestEnv(t)
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	if _, err := os.Lstat(w.socket); err != nil {
		t.Fatal("socket of the killed daemon: ", err)
	}
	nfsrdmad(t, "list", "--control-socket", w.socket).fails(t, 2, w.socket, "not running")
	w.startDaemon(t)
	if fi, err := os.Lstat(w.socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("got socket mode %v, %v; want 0600", fi.Mode(), err)
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
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	if _, err := os.ReadDir(dir); !errors.Is(err, syscall.ENOTCONN) {
		t.Errorf("read of the mount of the killed daemon: got %v, want ENOTCONN", err)
	}
	w.log.Reset()
	w.startDaemonWith(t, "--metrics-listen", "", "--keep-mounts=false")
	w.mount(t, dir).fails(t, 32, dir, "nfsrdma mount", "umount(8)")
	if err := exec.Command("umount", dir).Run(); err != nil {
		t.Error(err)
	}
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	w.stop(t, w.daemon)
	if log := w.log.String(); !strings.Contains(log, "remove those of a killed daemon") || !strings.Contains(log, dir) {
		t.Errorf("got log %s, want a line about mounts of a killed daemon", log)
	}
}

func TestDaemonKeepsFileAtSocketPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	nfsrdmad(t, "daemon", "--control-socket", path, "--metrics-listen", "").fails(t, 2, path, "not a socket")
	if b, _ := os.ReadFile(path); !strings.Contains(string(b), "content") {
		t.Error("the daemon removed the file")
	}
}
