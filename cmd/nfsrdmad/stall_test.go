package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

// TestStalledMountIsReported stops a server. List, status, log, metrics and the status line of
// systemd must show the mount and the reason, until the server continues.
func TestStalledMountIsReported(t *testing.T) {
	m := systemd.StartManager(t, 0)
	for _, v := range m.Env() {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	h := newSilentMount(t, "keepalive=0,timeo=6000,actimeo=600,stall=3", "stopped")
	reader := h.startProcess(t, directReader)
	h.pause(t)
	if _, err := reader.wake.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	s := h.waitStatus(t, "stall", func(s *control.MountStatus) bool { return s.State == control.StateStalled })
	if s.Stalled <= 3 || !strings.Contains(s.Reason, "no reply from 127.0.0.1:") {
		t.Errorf("got reason %q and %v s, want no reply for more than 3 s", s.Reason, s.Stalled)
	}
	text := nfsrdmad(t, "status", "--control-socket", h.socket, h.mnt).succeeds(t).stdout
	if !regexp.MustCompile(`(?s)reason:\s+no\s+reply\s+from.*\s+\(for\s+[1-9]\d*\s+s\)`).MatchString(text) {
		t.Errorf("got status %s, want the reason and the time", text)
	}
	text = nfsrdmad(t, "list", "--control-socket", h.socket).succeeds(t).stdout
	if !strings.Contains(text, "stalled") {
		t.Errorf("got list %s, want state stalled", text)
	}
	metrics := scrape(t, h.metrics)
	if metrics["nfsrdmad_mount_stalled_seconds"] <= 3 || metrics["nfsrdmad_mount_stalls_total"] != 1 ||
		metrics[`nfsrdmad_mounts{state="stalled"}`] != 1 {
		t.Errorf("got metrics %v, want one stalled mount", metrics)
	}
	awaitMessage(t, m, "\nSTATUS=serving ", h.mnt+" is stalled: no reply from ")
	h.resume(t)
	if err := reader.ended(t); err != nil {
		t.Errorf("the reader: %v", err)
	}
	s = h.waitStatus(t, "end of the stall", func(s *control.MountStatus) bool {
		return s.State == control.StateMounted
	})
	if s.Reason != "" || s.Stalled != 0 {
		t.Errorf("got reason %q and %v s after the stall, want none", s.Reason, s.Stalled)
	}
	if s := scrape(t, h.metrics)["nfsrdmad_mount_stalled_seconds"]; s != 0 {
		t.Errorf("got %v stalled seconds after the stall, want 0", s)
	}
	awaitMessage(t, m, "\nSTATUS=serving "+h.socket+"\n")
	h.stop(t, h.daemon)
	for _, want := range []string{"the mount does not answer: ", "the mount answers again: "} {
		if strings.Count(h.log.String(), want) != 1 {
			t.Errorf("got log %s, want %q once", h.log, want)
		}
	}
}

// awaitMessage waits for a notification that contains all parts.
func awaitMessage(t *testing.T, m *systemd.Manager, parts ...string) {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		s := m.Message(limit)
		missing := false
		for _, part := range parts {
			missing = missing || !strings.Contains(s, part)
		}
		if !missing {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("no notification with %q; the last one is %q", parts, s)
		}
	}
}

// TestStalledMountIsAborted checks that stallabort unmounts a mount whose server is stopped: the
// processes that use it get errors.
func TestStalledMountIsAborted(t *testing.T) {
	t.Parallel()
	m := newSilentMount(t, "stall=1,stallabort=2", "stopped")
	reader := m.startProcess(t, directReader)
	m.silence(t)
	if _, err := reader.wake.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	if err := reader.ended(t); err == nil {
		t.Error("the reader ended without error, want one")
	}
	m.waitUnmounted(t)
	if n := scrape(t, m.metrics)["nfsrdmad_stall_aborts_total"]; n != 1 {
		t.Errorf("got %v aborts, want 1", n)
	}
	if _, err := os.Stat(filepath.Join(m.mnt, "direct")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file of the mount after the abort: got error %v, want %v", err, os.ErrNotExist)
	}
	m.stop(t, m.daemon)
	if want := "aborting the mount, because it does not answer: "; !strings.Contains(m.log.String(), want) {
		t.Errorf("got log %s, want %q", m.log, want)
	}
}

// forcedUmount bounds a forced unmount on a loaded machine. An idle one takes less than 5 s.
const forcedUmount = 10 * time.Second

// A lockingWriter has a lock and dirty data, and reads when the test writes a line to it.
var lockingWriter = callKind{`exec perl -MFcntl=:flock -e '
	open(D, ">", "$ARGV[0]/dirty") && flock(D, LOCK_EX) && syswrite(D, "x" x 100000) || die $!;
	sysopen(R, "$ARGV[0]/direct", 040000) || die $!; # O_DIRECT
	$| = 1; print "ready\n"; <STDIN>; sysread(R, $b, 65536) || die $!' "$0"`, "perl", "READ", true}

// A bulkWriter writes 64 MiB again and again. Many large WRITEs are in progress when it is ready.
var bulkWriter = callKind{`exec perl -e '
	open(D, ">", "$ARGV[0]/bulk") || die $!;
	$| = 1; $b = "x" x 1048576;
	for ($n = 0; ; $n++) {
		sysseek(D, ($n % 64) * 1048576, 0) && syswrite(D, $b) == 1048576 || die $!;
		print "ready\n" if $n == 48;
	}' "$0"`, "perl", "WRITE", true}

// TestForcedUmountOfSilentServer checks that a forced unmount ends when the server is silent: a
// process of it is stopped, or its packets are lost. The mount has dirty data, a lock and a process
// that waits, or it is in the middle of large WRITEs.
func TestForcedUmountOfSilentServer(t *testing.T) {
	for _, tt := range []struct {
		name, kind, options string
		process             callKind
	}{
		{"stopped", "stopped", "dirty_expire=0,local_lock=none", lockingWriter},
		{"lost", "lost", "dirty_expire=0,local_lock=none", lockingWriter},
		{"stopped during WRITEs", "stopped", "nconnect=4", bulkWriter},
		{"lost during WRITEs", "lost", "nconnect=4", bulkWriter},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m := newSilentMount(t, tt.options, tt.kind)
			process := m.startProcess(t, tt.process)
			m.silence(t)
			if _, err := process.wake.Write([]byte("go\n")); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			out := nfsrdmad(t, "umount", "--control-socket", m.socket, "--force", m.mnt)
			took := time.Since(begin)
			if out.code != 0 && strings.Contains(out.stderr, "timeout") { // on a loaded machine
				m.waitUnmounted(t)
			} else {
				out.succeeds(t)
			}
			t.Logf("umount --force: %v", took.Round(time.Millisecond))
			if took > forcedUmount {
				t.Errorf("umount --force took %v, want at most %v", took, forcedUmount)
			}
			if err := process.ended(t); err == nil {
				t.Error("the process ended without error, want one")
			}
		})
	}
}

// A silentMount is a mount whose server can become silent for ever.
type silentMount struct {
	*pausableMount
	kind    string // stopped or lost
	host    string
	metrics string // address
}

// lostHosts is the number of hosts whose packets can be lost.
var lostHosts atomic.Int32

// newSilentMount mounts a server that has blockedFiles. The caller or the daemon unmounts it.
func newSilentMount(t *testing.T, options, kind string) *silentMount {
	t.Helper()
	w := newTestEnv(t)
	for name, size := range blockedFiles {
		if err := os.WriteFile(filepath.Join(w.dir, "export", name), noise(name, size), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	p := servePausable(t, "--no-root-squash", "--rdma-listen", "0.0.0.0:0", "--tcp-listen", "0.0.0.0:0",
		filepath.Join(w.dir, "export"))
	m := &silentMount{pausableMount: &pausableMount{testEnv: w, pausableServer: p, mnt: w.mkdir(t, "silent")},
		kind: kind, host: "127.0.0.1", metrics: kit.FreePort(t).String()}
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", m.metrics, "--shutdown-timeout", "1s")
	if kind == "lost" {
		m.host = fmt.Sprintf("10.78.0.%d", lostHosts.Add(1))
		runIP(t, "route", "add", "local", m.host, "dev", "lo")
		t.Cleanup(func() { runIP(t, "route", "del", m.host) })
	}
	nfsrdmad(t, "mount", "--control-socket", w.socket, m.host+":/", m.mnt, "-o", ports(t, p.rdma, p.tcp)+","+options).
		succeeds(t)
	return m
}

// waitUnmounted waits until the daemon has no mount.
func (m *silentMount) waitUnmounted(t *testing.T) {
	t.Helper()
	c := control.NewClient(m.socket)
	for end := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		l, err := c.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(l) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("mounts that did not end: %+v", l)
		}
	}
}

// silence makes the server silent.
func (m *silentMount) silence(t *testing.T) {
	t.Helper()
	if m.kind == "stopped" {
		m.pause(t)
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
