package main

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/daemon"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// programNameEnv makes the test binary run as the program. Its value is the name of the program.
const programNameEnv = "NFSRDMAD_TEST_AS"

func TestMain(m *testing.M) {
	// The daemon starts its child processes from its own program, and the holder without
	// environment. syscall.Exit leaves out the sleep of the race detector.
	if len(os.Args) > 1 && slices.Contains([]string{daemon.HolderCommand, daemon.NotifyHelperCommand}, os.Args[1]) {
		syscall.Exit(run(context.Background(), rootCommand()))
	}
	switch name := os.Getenv(programNameEnv); name {
	case "":
	case pressureWriter:
		os.Exit(writePressure())
	default:
		os.Args[0] = name
		main()
	}
	// A child process inherits an ignored SIGHUP (nohup make test) but not a handler. With a
	// handler here, the programs start with the default action, as the tests of SIGHUP expect.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	// With the race detector each program sleeps for one second when it exits.
	os.Setenv("GORACE", "atexit_sleep_ms=0")
	kit.Main(m)
}

// limit bounds one command.
const limit = kit.Timeout

// program returns a command that runs this program under the given name.
func program(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	kit.Must(t, err)
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), programNameEnv+"="+name)
	return cmd
}

// An outcome is how a command ended.
type outcome struct {
	code           int
	stdout, stderr string
}

// finish runs a command to its end.
func finish(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	kit.Must(t, cmd.Start())
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

// nfsrdmad runs the program to its end.
func nfsrdmad(t *testing.T, args ...string) outcome {
	t.Helper()
	return finish(t, program(t, "nfsrdmad", args...))
}

// fails checks that the command failed with the exit code, wrote one line with all the wanted words
// to stderr, and wrote nothing to stdout.
func (o outcome) fails(t *testing.T, code int, want ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("got exit code %d, want %d", o.code, code)
	}
	if strings.Count(o.stderr, "\n") != 1 || !strings.HasSuffix(o.stderr, "\n") || o.stdout != "" {
		t.Errorf("got stdout %q, stderr %q; want one line on stderr only", o.stdout, o.stderr)
	}
	for _, s := range want {
		if !strings.Contains(o.stderr, s) {
			t.Errorf("got error %q, want it to contain %q", o.stderr, s)
		}
	}
}

// succeeds fails the test if the command failed.
func (o outcome) succeeds(t *testing.T) outcome {
	t.Helper()
	if o.code != 0 {
		t.Fatalf("got exit code %d, want 0: %s", o.code, o.stderr)
	}
	return o
}

// A testEnv is a daemon process, an embedded server, and a directory for mount points.
type testEnv struct {
	dir, socket string
	daemon      *exec.Cmd
	log         *bytes.Buffer
	server      *nfsserve.Server
	tcpPort     string
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	kit.NeedsFUSE(t)
	w := &testEnv{dir: t.TempDir(), log: &bytes.Buffer{}}
	w.socket = filepath.Join(w.dir, "s")
	export := filepath.Join(w.dir, "export")
	kit.Must(t, os.Mkdir(export, 0o755))
	kit.Must(t, os.WriteFile(filepath.Join(export, "hello"), []byte("world"), 0o644))
	var err error
	w.server, err = nfsserve.Run(context.Background(), nfsserve.Config{Dir: export, RDMAListen: "127.0.0.1:0",
		TCPListen: "127.0.0.1:0", NoRootSquash: true, StateDir: w.dir, Provider: softiwarp.New(softiwarp.Config{})})
	kit.Must(t, err)
	t.Cleanup(func() { w.server.Close() })
	w.tcpPort = w.server.TCPAddr[strings.LastIndex(w.server.TCPAddr, ":")+1:]
	w.startDaemon(t)
	return w
}

func (w *testEnv) startDaemon(t *testing.T) {
	t.Helper()
	w.startDaemonWith(t, "--metrics-listen", "127.0.0.1:0")
}

// startDaemonWith starts a daemon with the given flags.
func (w *testEnv) startDaemonWith(t *testing.T, flags ...string) {
	t.Helper()
	args := []string{"daemon", "--control-socket", w.socket, "--state-dir", w.dir}
	w.daemon = program(t, "nfsrdmad", append(args, flags...)...)
	w.daemon.Stderr = w.log
	kit.Must(t, w.daemon.Start())
	d := w.daemon
	t.Cleanup(func() { w.stop(t, d) })
	client := control.NewClient(w.socket)
	kit.Eventually(t, "answer of the daemon", func() bool {
		_, err := client.List(t.Context())
		return err == nil
	})
}

// kill kills the daemon.
func (w *testEnv) kill() {
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
}

// stop terminates a daemon and checks that it leaves no socket and no mount.
func (w *testEnv) stop(t *testing.T, d *exec.Cmd) {
	if d.ProcessState != nil {
		return
	}
	_ = d.Process.Signal(syscall.SIGTERM)
	if err := d.Wait(); err != nil {
		t.Errorf("daemon: %v: %s", err, w.log)
	}
	for _, path := range []string{w.socket, w.socket + ".lock"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s still exists after the daemon exited", path)
		}
	}
	if mounts, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(mounts), w.dir) {
		t.Errorf("a mount below %s still exists after the daemon exited", w.dir)
	}
}

func (w *testEnv) mkdir(t *testing.T, name string) string {
	t.Helper()
	d := filepath.Join(w.dir, name)
	kit.Must(t, os.MkdirAll(d, 0o755))
	return d
}

func (w *testEnv) opts(rdma netip.AddrPort) string {
	return "port=" + rdma.String()[strings.LastIndex(rdma.String(), ":")+1:] + ",mountport=" + w.tcpPort
}

// run runs a command that uses the daemon.
func (w *testEnv) run(t *testing.T, command string, args ...string) outcome {
	t.Helper()
	return nfsrdmad(t, append([]string{command, "--control-socket", w.socket}, args...)...)
}

// list returns the mounts of the daemon.
func (w *testEnv) list(t *testing.T) []control.MountInfo {
	t.Helper()
	l, err := control.NewClient(w.socket).List(t.Context())
	kit.Must(t, err)
	return l
}

func (w *testEnv) mount(t *testing.T, dir string) outcome {
	t.Helper()
	return w.run(t, "mount", "-v", "127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr))
}

// mountWith is mount with further options. The mount must succeed.
func (w *testEnv) mountWith(t *testing.T, dir, options string) {
	t.Helper()
	w.run(t, "mount", "127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr)+","+options).succeeds(t)
}

// checkMount checks that the mount at dir serves files.
func (w *testEnv) checkMount(t *testing.T, dir string) {
	t.Helper()
	if b, err := os.ReadFile(filepath.Join(dir, "hello")); err != nil || string(b) != "world" {
		t.Errorf("read on %s: got %q, %v", dir, b, err)
	}
}

// wantText checks that wrapped output contains all parts.
func wantText(t *testing.T, what, output string, parts ...string) {
	t.Helper()
	text := strings.Join(strings.Fields(output), " ")
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: got %s, want %q", what, text, part)
		}
	}
}
