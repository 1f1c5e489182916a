package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// servingLine matches the first line of serve.
var servingLine = regexp.MustCompile(`^serving RDMA on (\S+), (?:MOUNT and NFS on|for the NFS server at) TCP (\S+)\n$`)

// serve starts "nfsrdmad serve" on free ports. It returns the two addresses of the server and a
// function that ends the server with SIGTERM.
func serve(t *testing.T, args ...string) (rdma, tcp string, end func()) {
	t.Helper()
	flags := []string{"--rdma-listen", "127.0.0.1:0"}
	if !slices.Contains(args, "--backend") {
		flags = append(flags, "--tcp-listen", "127.0.0.1:0", "--no-root-squash")
	}
	return serveAt(t, append(flags, args...)...)
}

// serveAt is serve with the listen addresses of args.
func serveAt(t *testing.T, args ...string) (rdma, tcp string, end func()) {
	t.Helper()
	args = append([]string{"serve"}, args...)
	cmd := program(t, "nfsrdmad", args...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("serve %v: %v", args, err)
		}
	}
	t.Cleanup(end)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	m := servingLine.FindStringSubmatch(line)
	if err != nil || m == nil {
		t.Fatalf("serve %v: got output %q, %v", args, line, err)
	}
	return m[1], m[2], end
}

// ports returns the mount options for the addresses of a server.
func ports(t *testing.T, rdma, tcp string) string {
	t.Helper()
	return "port=" + mounts.PortOf(t, rdma) + ",mountport=" + mounts.PortOf(t, tcp)
}

// TestServeBackend writes a file through three processes: a mount, "serve --backend", and "serve
// DIR" as the backend on TCP.
func TestServeBackend(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	_, tcp, endBackend := serve(t, filepath.Join(w.dir, "export"))
	front, named, _ := serve(t, "--backend", tcp)
	if named != tcp {
		t.Errorf("serve --backend %s: got backend %s in the output", tcp, named)
	}
	dir := w.mkdir(t, "mnt")
	opts := "soft,timeo=50,retrans=0," + ports(t, front, tcp)
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", opts).succeeds(t)
	big := strings.Repeat("through two servers ", 200_000)
	if err := os.WriteFile(filepath.Join(dir, "big"), []byte(big), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(w.dir, "export", "big"), filepath.Join(dir, "big")} {
		if b, err := os.ReadFile(path); err != nil || string(b) != big {
			t.Errorf("read %s: got %d bytes, %v", path, len(b), err)
		}
	}
	endBackend()
	if _, err := os.ReadDir(dir); err == nil {
		t.Error("ReadDir succeeded after the backend ended")
	}
	nfsrdmad(t, "status", "--control-socket", w.socket, dir).succeeds(t)
	nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", dir).succeeds(t)
}

func TestServeErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
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
		{"not this host's address", dir + " --rdma-listen 192.0.2.1:0 --tcp-listen " + free, 2, "192.0.2.1"},
		{"backend without port", "--backend 127.0.0.1" + onRDMA + free, 1, `"127.0.0.1"|HOST:PORT`},
		{"backend is not an NFS server", "--backend " + mail + onRDMA + free, 2, "NFSv3 on that TCP port"},
		{"backend not running", "--backend " + closed + onRDMA + free, 2, "NFS server 127|refused|is it running"},
		{"option of a directory", "--backend " + taken + " --read-only", 1, "backend|read-only"},
		{"invalid client address", dir + " --allow 10.0.0.0/8,host", 1, "host|ADDRESS/BITS"},
		{"directory and backend", dir + " --backend " + taken, 1, "directory or a backend"},
		{"no arguments", "", 1, "directory or a backend"},
		{"no connections", dir + " --max-connections 1", 1, "--max-connections=1|from 2 to 65536"},
		{"no memory", dir + " --message-memory 0", 1, "--message-memory=0|from 4 to"},
		{"log level", dir + " --log-level loud", 1, "loud|trace, debug"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// Without root, the server also logs a warning.
			args := append([]string{"serve", "--log-level", "error"}, strings.Fields(tt.args)...)
			o := nfsrdmad(t, args...)
			o.fails(t, tt.code, strings.Split(tt.want, "|")...)
		})
	}
}

// TestServeLimitsConnectionsPerClient allows two connections, of which one client gets one. The
// second mount of the client must fail, and must succeed after the first mount has ended.
func TestServeLimitsConnectionsPerClient(t *testing.T) {
	w := newTestEnv(t)
	rdma, tcp, _ := serve(t, filepath.Join(w.dir, "export"), "--max-connections", "2", "--message-memory", "4")
	opts := ports(t, rdma, tcp)
	first, second := w.mkdir(t, "first"), w.mkdir(t, "second")
	mount := func(dir string) outcome {
		return nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o", opts)
	}
	mount(first).succeeds(t)
	w.checkMount(t, first)
	big := strings.Repeat("more than one call needs as data", 100_000)
	if err := os.WriteFile(filepath.Join(first, "big"), []byte(big), 0o644); err != nil {
		t.Error(err)
	}
	mount(second).fails(t, 32, rdma, "reject")
	nfsrdmad(t, "umount", "--control-socket", w.socket, first).succeeds(t)
	// The server notices the end of the connection a moment later.
	for deadline := time.Now().Add(limit); ; {
		o := mount(second)
		if o.code == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(o.stderr)
		}
	}
	w.checkMount(t, second)
}

// TestIPv6 serves, mounts and lists over IPv6, and checks addresses in errors.
func TestIPv6(t *testing.T) {
	w := newTestEnv(t)
	cmd := exec.Command("ip", "-6", "addr", "show", "dev", "lo")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "::1") {
		t.Fatalf("this test needs an IPv6 loopback address: %v: %s", err, out)
	}
	rdma, tcp, _ := serve(t, filepath.Join(w.dir, "export"), "--rdma-listen", "[::1]:0", "--tcp-listen", "[::1]:0")
	dir, free := w.mkdir(t, "mnt"), w.mkdir(t, "free")
	opts := ports(t, rdma, tcp)
	nfsrdmad(t, "mount", "--control-socket", w.socket, "[::1]:/", dir, "-o", opts).succeeds(t)
	w.checkMount(t, dir)
	if out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout; !strings.Contains(out,
		"[::1]:/ ") || !strings.Contains(out, rdma) {
		t.Errorf("list: got %s, want the mount and its server", out)
	}
	if mounts, _ := os.ReadFile("/proc/mounts"); !strings.Contains(string(mounts), "[::1]:/ "+dir+" fuse.nfsrdma ") {
		t.Error("/proc/mounts does not list [::1]:/")
	}
	closed := kit.ClosedPort(t).Port() // also closed on [::1]
	nfsrdmad(t, "mount", "--control-socket", w.socket, "[::1]:/", free, "-o",
		fmt.Sprintf("port=%d,mountport=%s", closed, mounts.PortOf(t, tcp))).
		fails(t, 32, "[::1]:/ on ", fmt.Sprintf("RDMA connection to [::1]:%d: ", closed), "refused")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "[::1]:/", free, "-o", fmt.Sprintf("mountport=%d", closed)).
		fails(t, 32, fmt.Sprintf("MNT / at [::1]:%d: ", closed), "refused")
}
