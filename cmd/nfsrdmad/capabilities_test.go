package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// keptCapabilities is the table in docs/operator.md, "Access".
const keptCapabilities = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_SYS_PTRACE |
	1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_RESOURCE | 1<<unix.CAP_IPC_LOCK

// checkCapabilities checks the capabilities of all threads of a process of a daemon.
func checkCapabilities(t *testing.T, what string, pid int) {
	t.Helper()
	kept := keptCapabilities & boundingSet(t)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads of the %s: got %v, %v; want some", what, threads, err)
	}
	for _, path := range threads {
		status, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has exited
		}
		sets := make(map[string]uint64)
		for line := range strings.Lines(string(status)) {
			name, value, _ := strings.Cut(line, ":")
			if !strings.HasPrefix(name, "Cap") {
				continue
			}
			if sets[name], err = strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil {
				t.Fatal(err)
			}
		}
		for name, want := range map[string]uint64{"CapBnd": kept, "CapPrm": kept, "CapEff": kept, "CapInh": 0,
			"CapAmb": 0} {
			if got, ok := sets[name]; !ok || got != want {
				t.Errorf("%s of a thread of the %s: got %#x, want %#x", name, what, got, want)
			}
		}
	}
}

// children returns the processes that the process pid has started, by name.
func children(t *testing.T, pid int) map[string]int {
	t.Helper()
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	found := make(map[string]int)
	for _, path := range lists {
		list, _ := os.ReadFile(path)
		for _, child := range strings.Fields(string(list)) {
			comm, _ := os.ReadFile("/proc/" + child + "/comm")
			n, err := strconv.Atoi(child)
			if err != nil {
				t.Fatal(err)
			}
			found[strings.TrimSpace(string(comm))] = n
		}
	}
	return found
}

// boundingSet returns the bounding set of the test, and fails the test if it has no capability that
// the daemon must drop.
func boundingSet(t *testing.T) (mask uint64) {
	t.Helper()
	for c := range uint(unix.CAP_LAST_CAP + 1) {
		if on, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && on == 1 {
			mask |= 1 << c
		}
	}
	if mask&^keptCapabilities == 0 || mask&(1<<unix.CAP_SETPCAP) == 0 {
		t.Fatalf("bounding set of the test: got %#x, want CAP_SETPCAP and capabilities to drop", mask)
	}
	return mask
}

// TestDaemonDropsCapabilities starts a daemon with all capabilities, and uses each feature that
// needs one while the daemon has only the capabilities that it keeps.
func TestDaemonDropsCapabilities(t *testing.T) {
	kit.NeedsFUSE(t)
	w := newTestEnv(t)
	private := w.mkdir(t, "private")
	dir := w.mkdir(t, "private/m") // a mount point that only another user can reach
	if err := errors.Join(os.Chown(private, 1000, 1000), os.Chmod(private, 0o700)); err != nil {
		t.Fatal(err)
	}
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	// Another process has the lock: close-on-exec of a program that the test starts while no daemon
	// runs would wait for the next daemon.
	lock := exec.Command("flock", "--no-fork", filepath.Join(dir, "hello"), "sleep", "600")
	if err := lock.Start(); err != nil {
		t.Fatal(err)
	}
	endLock := sync.OnceFunc(func() {
		_ = lock.Process.Kill()
		_ = lock.Wait()
	})
	defer endLock()
	w.waitLocked(t)
	checkCapabilities(t, "daemon", w.daemon.Process.Pid)
	started := children(t, w.daemon.Process.Pid)
	if len(started) == 0 {
		t.Error("got no children of the daemon, want its notify helper")
	}
	for name, pid := range started {
		checkCapabilities(t, name, pid)
	}

	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	w.startDaemon(t)
	w.checkMount(t, dir)
	w.waitLocked(t)
	checkCapabilities(t, "next daemon", w.daemon.Process.Pid)

	var port atomic.Uint32 // of the client of MOUNT
	at := peer(t, func(c net.Conn) {
		port.Store(uint32(c.RemoteAddr().(*net.TCPAddr).Port))
		c.Close()
	})
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", w.mkdir(t, "n"), "-o",
		fmt.Sprintf("mountport=%d", at.Port())).fails(t, control.ExitMount)
	if p := port.Load(); p == 0 || p >= 1024 {
		t.Errorf("port of the client of MOUNT: got %d, want a reserved port", p)
	}
	endLock()
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	w.stop(t, w.daemon)
	if strings.Contains(w.log.String(), "capabilities that it does not need") {
		t.Errorf("got a warning of unneeded capabilities: %s", w.log)
	}
}

// waitLocked waits until the daemon has one lock.
func (w *testEnv) waitLocked(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		status := nfsrdmad(t, "status", "--control-socket", w.socket).succeeds(t).stdout
		if strings.Contains(status, "1 held") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("status: got %s, want 1 held lock", status)
		}
	}
}

// daemonWithout runs a daemon without a capability, and stops it when its log has a text. It
// returns the log.
func daemonWithout(t *testing.T, capability, until string) string {
	t.Helper()
	kit.NeedsRoot(t)
	inner := program(t, "nfsrdmad")
	cmd := exec.Command("setpriv", "--bounding-set=-"+capability, inner.Path, "daemon", "--control-socket",
		filepath.Join(t.TempDir(), "s"), "--metrics-listen", "", "--state-dir", "")
	cmd.Env = inner.Env
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	var log strings.Builder
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		fmt.Fprintln(&log, lines.Text())
		if strings.Contains(lines.Text(), until) {
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("daemon without %s: %v: %s", capability, err, &log)
	}
	return log.String()
}

// TestDaemonReportsCapabilities starts a daemon that cannot drop capabilities.
func TestDaemonReportsCapabilities(t *testing.T) {
	kit.NeedsRoot(t)
	boundingSet(t)
	if log := daemonWithout(t, "setpcap", "capabilities that it does not need"); !strings.Contains(log, "CAP_SETPCAP") {
		t.Errorf("got log %s, want CAP_SETPCAP", log)
	}
}

// TestServiceWritesNoCoreDump ends a daemon with a signal that dumps core, with a limit that allows
// a dump.
func TestServiceWritesNoCoreDump(t *testing.T) {
	t.Setenv("GOTRACEBACK", "crash") // the runtime then ends with the signal
	w := newTestEnv(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &limit); err != nil || limit.Max == 0 {
		t.Fatalf("hard limit of core dumps: got %d, %v; want more", limit.Max, err)
	}
	limit.Cur = limit.Max
	if err := unix.Prlimit(w.daemon.Process.Pid, unix.RLIMIT_CORE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	_ = w.daemon.Process.Signal(syscall.SIGABRT)
	_ = w.daemon.Wait()
	ws := w.daemon.ProcessState.Sys().(syscall.WaitStatus)
	if !ws.Signaled() || ws.Signal() != syscall.SIGABRT || ws.CoreDump() {
		t.Errorf("end of the daemon: got %v, core dump %v; want SIGABRT without core dump", w.daemon.ProcessState,
			ws.CoreDump())
	}
}
