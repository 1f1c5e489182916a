package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pfMemallocNoIO is the flag of a thread whose allocations do no I/O (include/linux/sched.h).
const pfMemallocNoIO = 0x00080000

// hasCapability reports whether this process has a capability.
func hasCapability(t *testing.T, capability uint) bool {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(status, []byte("\nCapEff:\t"))
	mask, err := strconv.ParseUint(string(rest[:16]), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return mask&(1<<capability) != 0
}

// TestDaemonThreadsDoNotWaitForWriteBack checks the flags of all threads of a daemon that serves a
// mount. Without CAP_SYS_RESOURCE the kernel refuses the setting, and the log must say so.
func TestDaemonThreadsDoNotWaitForWriteBack(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "m")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	if !hasCapability(t, unix.CAP_SYS_RESOURCE) {
		w.stop(t, w.daemon)
		if !strings.Contains(w.log.String(), "CAP_SYS_RESOURCE") {
			t.Errorf("got log %s, want it to name CAP_SYS_RESOURCE", w.log)
		}
		return
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", w.daemon.Process.Pid))
	if err != nil || len(threads) < 2 {
		t.Fatalf("got threads %v, %v; want several", threads, err)
	}
	for _, path := range threads {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has exited
		}
		// The name in parentheses is the second field, and the flags are the ninth.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		flags, err := strconv.ParseUint(fields[9-3], 10, 64)
		if err != nil || flags&pfMemallocNoIO == 0 {
			t.Errorf("%s: got flags %#x, %v; want PF_MEMALLOC_NOIO", path, flags, err)
		}
	}
}
