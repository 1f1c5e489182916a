package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
)

// asProgram makes the test binary be the program, under the name that it holds.
const asProgram = "NFSRDMAD_TEST_AS"

func TestMain(m *testing.M) {
	if name := os.Getenv(asProgram); name != "" {
		os.Args[0] = name
		main()
	}
	os.Setenv("GORACE", "atexit_sleep_ms=0") // each program would sleep for a second at its end
	// parallel tests here wait for timeouts, they do not compute
	_ = flag.Set("test.parallel", "32")
	testutil.Main(m)
}

// limit is far above what any command may take here: 10 s for a mount that hangs.
const limit = 60 * time.Second

func program(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), asProgram+"="+name)
	return cmd
}

type outcome struct {
	code           int
	stdout, stderr string
}

func finish(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	if !timer.Stop() {
		t.Fatalf("%v did not end within %v", cmd.Args[1:], limit)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

func nfsrdmad(t *testing.T, args ...string) outcome {
	t.Helper()
	return finish(t, program(t, "nfsrdmad", args...))
}

// fails checks a failure: exit code, one line on stderr that holds all of says, and nothing on
// stdout.
func (o outcome) fails(t *testing.T, code int, says ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit code %d, want %d", o.code, code)
	}
	if strings.Count(o.stderr, "\n") != 1 || !strings.HasSuffix(o.stderr, "\n") || o.stdout != "" {
		t.Errorf("not one line: stdout %q, stderr %q", o.stdout, o.stderr)
	}
	for _, s := range says {
		if !strings.Contains(o.stderr, s) {
			t.Errorf("%q says nothing of %q", o.stderr, s)
		}
	}
}

func (o outcome) succeeds(t *testing.T) outcome {
	t.Helper()
	if o.code != 0 {
		t.Fatalf("exit code %d: %s", o.code, o.stderr)
	}
	return o
}

// A world is a daemon process and an embedded server.
type world struct {
	dir, socket string
	daemon      *exec.Cmd
	log         *bytes.Buffer
	server      *nfsserve.Server
	tcpPort     string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = filepath.Join(w.dir, "s")
	export := filepath.Join(w.dir, "export")
	if err := errors.Join(os.Mkdir(export, 0o755), os.WriteFile(filepath.Join(export, "hello"), []byte("world"),
		0o644)); err != nil {
		t.Fatal(err)
	}
	var err error
	w.server, err = nfsserve.Run(context.Background(), nfsserve.Config{Dir: export, RDMAListen: "127.0.0.1:0",
		NoRootSquash: true, StateDir: w.dir, Provider: softiwarp.New(softiwarp.Config{})})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.server.Close() })
	w.tcpPort = w.server.TCPAddr[strings.LastIndex(w.server.TCPAddr, ":")+1:]
	w.startDaemon(t)
	return w
}

func (w *world) startDaemon(t *testing.T) {
	t.Helper()
	w.startDaemonFor(t, "10s")
}

// startDaemonFor starts a daemon that gives a mount so much time.
func (w *world) startDaemonFor(t *testing.T, connect string) {
	t.Helper()
	w.startDaemonWith(t, "--metrics-listen", "127.0.0.1:0", "--connect-timeout", connect)
}

// startDaemonWith starts a daemon with further flags.
func (w *world) startDaemonWith(t *testing.T, flags ...string) {
	t.Helper()
	w.daemon = program(t, "nfsrdmad", append([]string{"daemon", "--control-socket", w.socket}, flags...)...)
	w.daemon.Stderr = w.log
	if err := w.daemon.Start(); err != nil {
		t.Fatal(err)
	}
	d := w.daemon
	t.Cleanup(func() { w.stop(t, d) })
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if nfsrdmad(t, "list", "--control-socket", w.socket).code == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the daemon does not answer: %s", w.log)
		}
	}
}

// stop ends a daemon and checks that nothing of it is left.
func (w *world) stop(t *testing.T, d *exec.Cmd) {
	if d.ProcessState != nil {
		return
	}
	_ = d.Process.Signal(syscall.SIGTERM)
	if err := d.Wait(); err != nil {
		t.Errorf("daemon: %v: %s", err, w.log)
	}
	for _, path := range []string{w.socket, w.socket + ".lock"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
	if mounts, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(mounts), w.dir) {
		t.Errorf("a mount is left below %s", w.dir)
	}
}

func (w *world) mkdir(t *testing.T, name string) string {
	t.Helper()
	d := filepath.Join(w.dir, name)
	if err := os.MkdirAll(d, 0o755); err != nil {
		t.Fatal(err)
	}
	return d
}

func (w *world) opts(rdma netip.AddrPort) string {
	return "port=" + rdma.String()[strings.LastIndex(rdma.String(), ":")+1:] + ",mountport=" + w.tcpPort
}

func (w *world) mount(t *testing.T, dir string) outcome {
	t.Helper()
	return nfsrdmad(t, "mount", "--control-socket", w.socket, "-v", "127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr))
}

// unharmed checks that the daemon lives and the mount at dir serves.
func (w *world) unharmed(t *testing.T, dir string) {
	t.Helper()
	if b, err := os.ReadFile(filepath.Join(dir, "hello")); err != nil || string(b) != "world" {
		t.Errorf("the other mount: %q, %v", b, err)
	}
	if out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout; !strings.Contains(out, dir+" ") {
		t.Errorf("the other mount is not listed: %s", out)
	}
}
