package main

import (
	"bufio"
	"bytes"
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

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// keptCapabilities is the table in docs/operator.md, "Access".
const keptCapabilities = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_SYS_PTRACE |
	1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_RESOURCE | 1<<unix.CAP_IPC_LOCK

// pfMemallocNoIO is the flag of a thread whose allocations do no I/O (include/linux/sched.h).
const pfMemallocNoIO = 0x00080000

// checkThreads checks all threads of a process of a daemon: their capabilities, and with flusher
// that their allocations do not wait for write-back to a mount of the daemon.
func checkThreads(t *testing.T, what string, pid int, flusher bool) {
	t.Helper()
	kept := keptCapabilities & boundingSet(t)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads of the %s: got %v, %v; want some", what, threads, err)
	}
	for _, path := range threads {
		status, err := os.ReadFile(path + "/status")
		stat, statErr := os.ReadFile(path + "/stat")
		if err != nil || statErr != nil {
			continue // the thread has exited
		}
		for name, want := range map[string]uint64{"CapBnd": kept, "CapPrm": kept, "CapEff": kept, "CapInh": 0,
			"CapAmb": 0} {
			_, rest, _ := bytes.Cut(status, []byte("\n"+name+":\t"))
			if got, err := strconv.ParseUint(string(rest[:16]), 16, 64); err != nil || got != want {
				t.Errorf("%s of a thread of the %s: got %#x, %v; want %#x", name, what, got, err, want)
			}
		}
		// The name in parentheses is the second field, and the flags are the ninth.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		flags, err := strconv.ParseUint(fields[9-3], 10, 64)
		if flusher && (err != nil || flags&pfMemallocNoIO == 0) {
			t.Errorf("%s: got flags %#x, %v; want PF_MEMALLOC_NOIO", path, flags, err)
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
			kit.Must(t, err)
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
	w := newTestEnv(t)
	private := w.mkdir(t, "private")
	dir := w.mkdir(t, "private/m") // a mount point that only another user can reach
	kit.Must(t, errors.Join(os.Chown(private, 1000, 1000), os.Chmod(private, 0o700)))
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	// Another process has the lock: close-on-exec of a program that the test starts while no daemon
	// runs would wait for the next daemon.
	lock := exec.Command("flock", "--no-fork", filepath.Join(dir, "hello"), "sleep", "600")
	kit.Must(t, lock.Start())
	endLock := sync.OnceFunc(func() {
		_ = lock.Process.Kill()
		_ = lock.Wait()
	})
	defer endLock()
	w.waitLocked(t)
	flusher := boundingSet(t)&(1<<unix.CAP_SYS_RESOURCE) != 0 // else the kernel refuses the setting
	checkThreads(t, "daemon", w.daemon.Process.Pid, flusher)
	started := children(t, w.daemon.Process.Pid)
	if len(started) == 0 {
		t.Error("got no children of the daemon, want its notify helper")
	}
	for name, pid := range started {
		checkThreads(t, name, pid, false)
	}

	w.kill()
	w.startDaemon(t)
	w.checkMount(t, dir)
	w.waitLocked(t)
	checkThreads(t, "next daemon", w.daemon.Process.Pid, flusher)

	var port atomic.Uint32 // of the client of MOUNT
	at := peer(t, func(c net.Conn) {
		port.Store(uint32(c.RemoteAddr().(*net.TCPAddr).Port))
		c.Close()
	})
	w.run(t, "mount", "127.0.0.1:/", w.mkdir(t, "n"), "-o", fmt.Sprintf("mountport=%d", at.Port())).
		fails(t, control.ExitMount)
	if p := port.Load(); p == 0 || p >= 1024 {
		t.Errorf("port of the client of MOUNT: got %d, want a reserved port", p)
	}
	endLock()
	w.run(t, "umount", dir).succeeds(t)
	w.stop(t, w.daemon)
	if strings.Contains(w.log.String(), "capabilities that it does not need") {
		t.Errorf("got a warning of unneeded capabilities: %s", w.log)
	}
	if !flusher && !strings.Contains(w.log.String(), "CAP_SYS_RESOURCE") {
		t.Errorf("got log %s, want it to name CAP_SYS_RESOURCE", w.log)
	}
}

// waitLocked waits until the daemon has one lock.
func (w *testEnv) waitLocked(t *testing.T) {
	t.Helper()
	client := control.NewClient(w.socket)
	kit.Eventually(t, "held lock", func() bool {
		l, err := client.Status(t.Context(), "")
		return err == nil && len(l) > 0 && l[0].Metrics["locks_held"] == 1
	})
}

// TestDaemonReportsCapabilities starts daemons that lack a capability: one cannot mount, and one
// cannot drop the capabilities that it does not need. Both log it.
func TestDaemonReportsCapabilities(t *testing.T) {
	kit.NeedsRoot(t)
	boundingSet(t)
	for _, tt := range []struct{ capability, until, want string }{
		{"sys_admin", "every mount will fail", "CAP_SYS_ADMIN is missing"},
		{"setpcap", "capabilities that it does not need", "CAP_SETPCAP"},
	} {
		inner := program(t, "nfsrdmad")
		cmd := exec.Command("setpriv", "--bounding-set=-"+tt.capability, inner.Path, "daemon", "--control-socket",
			filepath.Join(t.TempDir(), "s"), "--metrics-listen", "", "--state-dir", "")
		cmd.Env = inner.Env
		stderr, err := cmd.StderrPipe()
		kit.Must(t, err)
		kit.Must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		var log strings.Builder
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			fmt.Fprintln(&log, lines.Text())
			if strings.Contains(lines.Text(), tt.until) {
				_ = cmd.Process.Signal(syscall.SIGTERM)
			}
		}
		if err := cmd.Wait(); err != nil || !strings.Contains(log.String(), tt.want) {
			t.Errorf("daemon without %s: got %v and log %s, want %q", tt.capability, err, &log, tt.want)
		}
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
	kit.Must(t, unix.Prlimit(w.daemon.Process.Pid, unix.RLIMIT_CORE, &limit, nil))
	_ = w.daemon.Process.Signal(syscall.SIGABRT)
	_ = w.daemon.Wait()
	ws := w.daemon.ProcessState.Sys().(syscall.WaitStatus)
	if !ws.Signaled() || ws.Signal() != syscall.SIGABRT || ws.CoreDump() {
		t.Errorf("end of the daemon: got %v, core dump %v; want SIGABRT without core dump", w.daemon.ProcessState,
			ws.CoreDump())
	}
}
