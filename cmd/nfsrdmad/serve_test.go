package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// servingLine matches the first line of serve.
var servingLine = regexp.MustCompile(`^serving RDMA on (\S+), (?:MOUNT and NFS on|for the NFS server at) TCP (\S+)\n$`)

// A servedDir is a "serve" process.
type servedDir struct {
	cmd       *exec.Cmd
	rdma, tcp string // addresses
}

// serve starts "nfsrdmad serve" on free ports. It ends with the test.
func serve(t *testing.T, args ...string) *servedDir {
	t.Helper()
	flags := []string{"--rdma-listen", "127.0.0.1:0"}
	if !slices.Contains(args, "--backend") {
		flags = append(flags, "--tcp-listen", "127.0.0.1:0", "--no-root-squash")
	}
	return serveAt(t, append(flags, args...)...)
}

// serveAt is serve with the listen addresses of args.
func serveAt(t *testing.T, args ...string) *servedDir {
	t.Helper()
	cmd := program(t, "nfsrdmad", append([]string{"serve"}, args...)...)
	stdout, err := cmd.StdoutPipe()
	kit.Must(t, err)
	cmd.Stderr = os.Stderr
	// A stopped server continues when the test process dies.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGCONT}
	kit.Must(t, cmd.Start())
	s := &servedDir{cmd: cmd}
	t.Cleanup(func() {
		s.resume()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("serve %v: %v", args, err)
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	m := servingLine.FindStringSubmatch(line)
	if err != nil || m == nil {
		t.Fatalf("serve %v: got output %q, %v", args, line, err)
	}
	s.rdma, s.tcp = m[1], m[2]
	return s
}

// ports returns the mount options for the addresses of the server.
func (s *servedDir) ports(t *testing.T) string {
	t.Helper()
	return "port=" + mounts.PortOf(t, s.rdma) + ",mountport=" + mounts.PortOf(t, s.tcp)
}

// pause stops the server and returns when all its threads have stopped.
//
// A process with open files of the mount must not start another process during a pause. execve(2)
// closes files, which sends requests to the server.
func (s *servedDir) pause(t *testing.T) {
	t.Helper()
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
	waitStopped(t, s.cmd)
}

func waitStopped(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	var ws syscall.WaitStatus
	if _, err := syscall.Wait4(cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("stop process %d: %v, status %#x", cmd.Process.Pid, err, ws)
	}
}

func (s *servedDir) resume() { _ = s.cmd.Process.Signal(syscall.SIGCONT) }

// TestServeBackend writes a file through three processes: a mount, "serve --backend", and "serve
// DIR" as the backend on TCP.
func TestServeBackend(t *testing.T) {
	w := newTestEnv(t)
	backend := serve(t, filepath.Join(w.dir, "export"))
	front := serve(t, "--backend", backend.tcp)
	if front.tcp != backend.tcp {
		t.Errorf("serve --backend %s: got backend %s in the output", backend.tcp, front.tcp)
	}
	dir := w.mkdir(t, "mnt")
	w.run(t, "mount", "127.0.0.1:/", dir, "-o", front.ports(t)).succeeds(t)
	data := kit.RandomBytes(3, 4_000_000)
	kit.Must(t, os.WriteFile(filepath.Join(dir, "big"), data, 0o644))
	w.wantOnServer(t, "big", data)
	w.checkMount(t, dir)
	w.run(t, "umount", dir).succeeds(t)
}

func TestServeErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	kit.Must(t, os.WriteFile(file, nil, 0o600))
	taken := peer(t, func(net.Conn) {}).String()
	mail := peer(t, func(c net.Conn) { _, _ = c.Write([]byte("220 mail.example\r\n")) }).String()
	closed := kit.ClosedPort(t).String()
	const free, onRDMA, onTCP = "127.0.0.1:0", " --rdma-listen ", " --tcp-listen "
	for _, tt := range []struct {
		name string
		args string // separated by spaces
		code int
		want string // texts in the error, separated by |
	}{
		{"directory missing", dir + "/no" + onRDMA + free, 2, dir + "/no|no such file"},
		{"directory a file", file + onRDMA + free, 2, file + "|not a directory"},
		{"RDMA port in use", dir + onRDMA + taken + onTCP + free, 2, taken + "|in use|--rdma-listen"},
		{"TCP port in use", dir + onRDMA + free + onTCP + taken, 2, taken + "|in use|--tcp-listen"},
		{"invalid address", dir + " --rdma-listen nowhere", 1, `"nowhere"|ADDRESS:PORT`},
		{"backend without port", "--backend 127.0.0.1" + onRDMA + free, 1, `"127.0.0.1"|HOST:PORT`},
		{"backend is not an NFS server", "--backend " + mail + onRDMA + free, 2, "NFSv3 on that TCP port"},
		{"backend not running", "--backend " + closed + onRDMA + free, 2, "NFS server 127|refused|is it running"},
		{"option of a directory", "--backend " + taken + " --read-only", 1, "backend|read-only"},
		{"invalid client address", dir + " --allow 10.0.0.0/8,host", 1, "host|ADDRESS/BITS"},
		{"directory and backend", dir + " --backend " + taken, 1, "directory or a backend"},
		{"no arguments", "", 1, "directory or a backend"},
		{"no connections", dir + " --max-connections 1", 1, "--max-connections=1|from 2 to 65536"},
		{"log level", dir + " --log-level loud", 1, "loud|trace, debug"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// Without root, the server also logs a warning.
			args := append([]string{"serve", "--log-level", "error"}, strings.Fields(tt.args)...)
			nfsrdmad(t, args...).fails(t, tt.code, strings.Split(tt.want, "|")...)
		})
	}
}

// TestIPv6 serves, mounts and lists over IPv6, and checks addresses in errors.
func TestIPv6(t *testing.T) {
	w := newTestEnv(t)
	server := serve(t, filepath.Join(w.dir, "export"), "--rdma-listen", "[::1]:0", "--tcp-listen", "[::1]:0")
	dir, free := w.mkdir(t, "mnt"), w.mkdir(t, "free")
	w.run(t, "mount", "[::1]:/", dir, "-o", server.ports(t)).succeeds(t)
	w.checkMount(t, dir)
	if l := w.list(t); len(l) != 1 || l[0].Spec != "[::1]:/" || l[0].Server != server.rdma {
		t.Errorf("list: got %+v, want the mount and its server", l)
	}
	if mounts, _ := os.ReadFile("/proc/mounts"); !strings.Contains(string(mounts), "[::1]:/ "+dir+" fuse.nfsrdma ") {
		t.Error("/proc/mounts does not list [::1]:/")
	}
	closed := kit.ClosedPort(t).Port() // also closed on [::1]
	w.run(t, "mount", "[::1]:/", free, "-o", fmt.Sprintf("port=%d,mountport=%s", closed, mounts.PortOf(t, server.tcp))).
		fails(t, 32, "[::1]:/ on ", fmt.Sprintf("RDMA connection to [::1]:%d: ", closed), "refused")
}

// TestDefaultPortsNeedNoOptions serves, mounts and unmounts without any option for a port. It runs
// in a new network namespace, where all ports are free. The thread of the test ends with it, and
// the namespace ends with the thread.
func TestDefaultPortsNeedNoOptions(t *testing.T) {
	kit.NeedsFUSE(t)
	runtime.LockOSThread()
	kit.Must(t, unix.Unshare(unix.CLONE_NEWNET))
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("set loopback up: %v: %s", err, out)
	}
	w := newTestEnv(t)
	if s := serveAt(t, w.dir+"/export"); s.rdma != "127.0.0.1:20049" || s.tcp != "127.0.0.1:20048" {
		t.Errorf("serve listens on %s and %s", s.rdma, s.tcp)
	}
	dir := w.mkdir(t, "mnt")
	w.run(t, "mount", "127.0.0.1:/", dir).succeeds(t)
	w.checkMount(t, dir)
	wantText(t, "doctor", w.run(t, "doctor").succeeds(t).stdout, "ok mount-locks",
		dir+": the lock service of the server replies; ")
	w.run(t, "umount", dir).succeeds(t)
	nfsrdmad(t, "serve", w.dir+"/export", "--rdma-listen", "127.0.0.1:0").
		fails(t, 2, "127.0.0.1:20048", "in use", "--tcp-listen")
}
