package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// shortBench returns arguments for a run of a few seconds at most.
func shortBench(dir string, args ...string) []string {
	return append([]string{"bench", dir, "--size", "2", "--time", "20ms", "--files", "20", "--runs", "2"}, args...)
}

func TestBenchOfMount(t *testing.T) {
	w := newTestEnv(t)
	dir, file := w.mkdir(t, "mnt"), filepath.Join(t.TempDir(), "out.json")
	w.mount(t, dir).succeeds(t)
	out := nfsrdmad(t, shortBench(dir, "--control-socket", w.socket, "--json", file)...).succeeds(t).stdout
	for line := range strings.Lines(out) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > columns {
			t.Errorf("got a line of %d columns: %s", n, line)
		}
	}
	for _, l := range bench.Workloads() {
		if !strings.Contains(out, "\n"+l.Name+" ") {
			t.Errorf("got no line for %s in\n%s", l.Name, out)
		}
	}
	var r bench.Report
	text, err := os.ReadFile(file)
	kit.Must(t, err)
	kit.Must(t, json.Unmarshal(text, &r))
	if r.Daemon != w.daemon.Process.Pid || r.FileSystem != "fuse.nfsrdma" || !r.Direct ||
		len(r.Results) != len(bench.Workloads()) || len(r.Samples) != 2*len(r.Results) {
		t.Errorf("got %+v, want two runs of all workloads on the mount", r)
	}
	if !strings.Contains(out, "switches") {
		t.Errorf("got no costs of the daemon in\n%s", out)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("got %v, %v in the mount, want only hello", left, err)
	}
	nfsrdmad(t, shortBench(dir, "--json", file)...).fails(t, 1, file, "file exists")
	// Without the daemon the file system can be measured nevertheless.
	none := filepath.Join(w.dir, "none")
	if out := nfsrdmad(t, shortBench(dir, "--control-socket", none)...).succeeds(t).stdout; !strings.Contains(out,
		"not known") || strings.Contains(out, "switches") {
		t.Errorf("without daemon: got output\n%s", out)
	}
}

// TestBenchEndsEarly interrupts a measurement, and measures file systems that cannot be written.
func TestBenchEndsEarly(t *testing.T) {
	kit.NeedsRoot(t)
	dir, file := mounts.MemoryDir(t, "size=64m"), filepath.Join(t.TempDir(), "out.json")
	cmd := program(t, "nfsrdmad", "bench", dir, "--size", "2", "--runs", "1000", "--time", "1h", "--json", file)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	kit.Must(t, cmd.Start())
	kit.Eventually(t, "file to read", func() bool { // the random read goes on for an hour
		found, _ := filepath.Glob(dir + "/*/data")
		return len(found) == 1
	})
	_ = cmd.Process.Signal(syscall.SIGINT)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 8 || !strings.Contains(stderr.String(), "interrupted; the files") {
		t.Errorf("got exit code %d, want 8: %s", code, stderr.String())
	}
	if _, err := os.Lstat(file); err == nil {
		t.Error("the file of --json exists after the interrupt")
	}
	small, readOnly := mounts.MemoryDir(t, "size=512k"), mounts.MemoryDir(t, "ro")
	nfsrdmad(t, shortBench(small, "--json", file)...).fails(t, 2, small, "no space left on device",
		"sequential write, 1 MiB")
	nfsrdmad(t, shortBench(readOnly)...).fails(t, 2, readOnly, "read-only file system")
	for _, dir := range []string{dir, small} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("got %v, %v in %s, want nothing", left, err, dir)
		}
	}
}
