package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A silentMount is a mount whose server can become silent: its process is stopped, or its packets
// are lost.
type silentMount struct {
	*testEnv
	server       *servedDir
	mnt, host    string
	metrics      string // address
	lost         bool
	fileContents []byte // of file
}

// newSilentMount mounts a server that has a file.
func newSilentMount(t *testing.T, options string, lost bool) *silentMount {
	t.Helper()
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	m := &silentMount{testEnv: w, mnt: w.mkdir(t, "silent"), host: "127.0.0.1", lost: lost,
		metrics: kit.FreePort(t).String(), fileContents: kit.RandomBytes(5, 200_000)}
	kit.Must(t, os.WriteFile(filepath.Join(w.dir, "export", "file"), m.fileContents, 0o644))
	m.server = serve(t, "--rdma-listen", "0.0.0.0:0", "--tcp-listen", "0.0.0.0:0", filepath.Join(w.dir, "export"))
	w.startDaemonWith(t, "--metrics-listen", m.metrics, "--shutdown-timeout", "1s")
	if lost {
		m.host = "10.78.0.1"
		runIP(t, "route", "add", "local", m.host, "dev", "lo")
		t.Cleanup(func() { runIP(t, "route", "del", m.host) })
	}
	w.run(t, "mount", m.host+":/", m.mnt, "-o", m.server.ports(t)+","+options).succeeds(t)
	t.Cleanup(func() { // a normal unmount would wait for the server
		m.server.resume()
		r := control.UmountRequest{Dir: m.mnt, Mode: control.UmountForce}
		_ = control.NewClient(w.socket).Umount(context.Background(), r)
	})
	return m
}

// silence makes the server silent.
func (m *silentMount) silence(t *testing.T) {
	t.Helper()
	if !m.lost {
		m.server.pause(t)
		return
	}
	runIP(t, "route", "add", m.host, "dev", "d0") // a network without hosts
	runIP(t, "route", "del", "local", m.host, "dev", "lo", "table", "local")
}

func runIP(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %q: %v: %s", args, err, out)
	}
}

// waitStatus waits for a status of the mount.
func (m *silentMount) waitStatus(t *testing.T, what string, ok func(*control.MountStatus) bool) *control.MountStatus {
	t.Helper()
	var l []control.MountStatus
	kit.Eventually(t, what, func() (done bool) {
		var err error
		l, err = control.NewClient(m.socket).Status(t.Context(), m.mnt)
		return err == nil && len(l) == 1 && ok(&l[0])
	})
	return &l[0]
}

// A blockedProcess makes a call of the mount when the test writes a line to it.
type blockedProcess struct {
	cmd  *exec.Cmd
	wake io.WriteCloser
}

// The scripts of blocked processes. A script gets the mount point as $0, opens its files, prints
// "ready", reads one line, and makes its call.
const (
	directReader = `exec 3<"$0/file"; echo ready; read go
		exec dd iflag=direct bs=64k count=1 status=none <&3`
	// It has a lock and dirty data.
	lockingWriter = `exec perl -MFcntl=:flock -e '
		open(D, ">", "$ARGV[0]/dirty") && flock(D, LOCK_EX) && syswrite(D, "x" x 100000) || die $!;
		sysopen(R, "$ARGV[0]/file", 040000) || die $!; # O_DIRECT
		$| = 1; print "ready\n"; <STDIN>; sysread(R, $b, 65536) || die $!' "$0"`
	// It writes 64 MiB again and again. Many large WRITEs are in progress when it is ready.
	bulkWriter = `exec perl -e '
		open(D, ">", "$ARGV[0]/bulk") || die $!;
		$| = 1; $b = "x" x 1048576;
		for ($n = 0; ; $n++) {
			sysseek(D, ($n % 64) * 1048576, 0) && syswrite(D, $b) == 1048576 || die $!;
			print "ready\n" if $n == 48;
		}' "$0"`
)

// startProcess starts a script and waits until it is ready.
func (m *silentMount) startProcess(t *testing.T, script string) *blockedProcess {
	t.Helper()
	cmd := exec.Command("sh", "-c", script, m.mnt)
	wake, err := cmd.StdinPipe()
	kit.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	kit.Must(t, err)
	kit.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("%s: %q, %v", script, line, err)
	}
	return &blockedProcess{cmd, wake}
}

func (p *blockedProcess) callServer(t *testing.T) {
	t.Helper()
	_, err := io.WriteString(p.wake, "go\n")
	kit.Must(t, err)
}

// TestKillProcessOfStoppedServer kills a process that waits for a stopped server. Its memory is
// fenced: the process ends although the server does not reply. The key of its READ is invalid then,
// so the late RDMA Write of the server fails, and that ends the connection.
func TestKillProcessOfStoppedServer(t *testing.T) {
	m := newSilentMount(t, "keepalive=0,timeo=6000,actimeo=600", false)
	p := m.startProcess(t, directReader)
	m.silence(t)
	p.callServer(t)
	s := m.waitStatus(t, "call of the process", func(s *control.MountStatus) bool {
		return slices.ContainsFunc(s.Calls, func(c control.PendingCall) bool {
			return int(c.PID) == p.cmd.Process.Pid && c.Command == "dd" && c.SinceSent >= 0
		})
	})
	if c := &s.Calls[0]; c.Procedure != "READ" || c.Owner != control.OwnerProcess || c.XID == "" || c.Slot < 0 ||
		c.Age <= 0 || c.SinceSent > c.Age {
		t.Errorf("got call %+v, want the READ of the process", c)
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // returns before the server continues
	m.waitStatus(t, "late reply", func(s *control.MountStatus) bool {
		return len(s.Calls) == 1 && s.Calls[0].Owner == control.OwnerGone
	})
	m.server.resume()
	m.waitStatus(t, "idle second connection", func(s *control.MountStatus) bool {
		return len(s.Calls) == 0 && s.Metrics["slots_in_use"] == 0 && s.Metrics["connects_total"] == 2
	})
	if b, err := os.ReadFile(filepath.Join(m.mnt, "file")); err != nil || !slices.Equal(b, m.fileContents) {
		t.Errorf("read after the loss: got %d bytes, %v; want the content of the server", len(b), err)
	}
}

// TestStalledMountIsAborted checks that stallabort unmounts a mount whose server is stopped: the
// process that uses it gets an error. pkg/mount has tests of what counts as a stall.
func TestStalledMountIsAborted(t *testing.T) {
	m := newSilentMount(t, "stall=1,stallabort=2", false)
	p := m.startProcess(t, directReader)
	m.silence(t)
	p.callServer(t)
	if err := p.cmd.Wait(); err == nil {
		t.Error("the reader ended without error, want one")
	}
	kit.Eventually(t, "unmount", func() bool { return len(m.list(t)) == 0 })
	if n := scrape(t, m.metrics)["nfsrdmad_stall_aborts_total"]; n != 1 {
		t.Errorf("got %v aborts, want 1", n)
	}
	if _, err := os.Stat(filepath.Join(m.mnt, "file")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file of the mount after the abort: got error %v, want %v", err, os.ErrNotExist)
	}
	m.server.resume()
	m.stop(t, m.daemon)
	for _, want := range []string{"the mount does not answer: ", "aborting the mount, because it does not answer: "} {
		if strings.Count(m.log.String(), want) != 1 {
			t.Errorf("got log %s, want %q once", m.log, want)
		}
	}
}

// TestForcedUmountOfSilentServer checks that a forced unmount ends when the server is silent. The
// mount has dirty data, a lock and a process that waits, or it is in the middle of large WRITEs.
// pkg/mount has a test of the bound of its time.
func TestForcedUmountOfSilentServer(t *testing.T) {
	for _, tt := range []struct {
		options, process string
		lost             bool
	}{
		{"dirty_expire=0,local_lock=none", lockingWriter, false},
		{"nconnect=4", bulkWriter, true},
	} {
		t.Run(fmt.Sprint("lost ", tt.lost), func(t *testing.T) {
			m := newSilentMount(t, tt.options, tt.lost)
			p := m.startProcess(t, tt.process)
			m.silence(t)
			p.callServer(t)
			// The bound of the request can end it first on a busy machine.
			if o := m.run(t, "umount", "--force", m.mnt); o.code != 0 && !strings.Contains(o.stderr, "timeout") {
				t.Errorf("umount --force: got exit code %d: %s", o.code, o.stderr)
			}
			kit.Eventually(t, "unmount", func() bool { return len(m.list(t)) == 0 })
			var exit *exec.ExitError
			if err := p.cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signaled() {
				t.Errorf("the process ended with %v, want exit with an error", err)
			}
		})
	}
}
