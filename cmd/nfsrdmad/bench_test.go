package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/bench"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// shortBench returns arguments for a run of a few seconds at most.
func shortBench(dir string, args ...string) []string {
	return append([]string{"bench", dir, "--size", "2", "--time", "20ms", "--files", "20", "--runs", "2"}, args...)
}

// memoryDir is a directory in memory, which needs root.
func memoryDir(t *testing.T, options string) string {
	t.Helper()
	kit.NeedsRoot(t)
	return mounts.MemoryDir(t, options)
}

// checkEmptyDir checks that a directory is empty.
func checkEmptyDir(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("got %v, %v in %s, want nothing", left, err, dir)
	}
}

// readReport reads the file of --json and checks that every figure is positive.
func readReport(t *testing.T, file string) (r bench.Report) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != len(bench.Workloads()) || len(r.Samples) != 2*len(r.Results) {
		t.Fatalf("got %d results of %d runs", len(r.Results), len(r.Samples))
	}
	for _, w := range r.Results {
		if w.Micros.Min <= 0 || w.MiB != nil && w.MiB.Min <= 0 || w.Runs != 2 {
			t.Errorf("got %+v", w)
		}
	}
	return r
}

func TestBenchOfMemory(t *testing.T) {
	dir, file := memoryDir(t, "size=64m"), filepath.Join(t.TempDir(), "out.json")
	out := nfsrdmad(t, shortBench(dir, "--json", file)...).succeeds(t)
	checkEmptyDir(t, dir)
	if r := readReport(t, file); r.FileSystem != "tmpfs" || r.Daemon != 0 || r.Samples[0].Processes != nil {
		t.Errorf("got file system %s, daemon %d", r.FileSystem, r.Daemon)
	}
	for _, w := range bench.Workloads() {
		if !strings.Contains(out.stdout, "\n"+w.Name+" ") {
			t.Errorf("got no line for %s in\n%s", w.Name, out.stdout)
		}
	}
	if !strings.Contains(out.stdout, "is no nfsrdma mount") || out.stderr != "" {
		t.Errorf("got output\n%s%s", out.stdout, out.stderr)
	}
	nfsrdmad(t, shortBench(dir, "--json", file)...).fails(t, 1, file, "file exists")
	readReport(t, file)
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
	r := readReport(t, file)
	if r.Daemon != w.daemon.Process.Pid || r.FileSystem != "fuse.nfsrdma" || !r.Direct {
		t.Errorf("got daemon %d, file system %s, direct %t", r.Daemon, r.FileSystem, r.Direct)
	}
	for _, l := range r.Results {
		if l.Processes[bench.Daemon].CPU.Min <= 0 {
			t.Errorf("%s: got no processor time of the daemon", l.Workload)
		}
	}
	if !strings.Contains(out, "switches") {
		t.Errorf("got no costs of the daemon in\n%s", out)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("got %v, %v in the mount, want only hello", left, err)
	}
	// Without the daemon the file system can be measured nevertheless.
	none := filepath.Join(w.dir, "none")
	if out := nfsrdmad(t, shortBench(dir, "--control-socket", none)...).succeeds(t).stdout; !strings.Contains(out,
		"not known") || strings.Contains(out, "switches") {
		t.Errorf("without daemon: got output\n%s", out)
	}
}

func TestBenchInterrupted(t *testing.T) {
	dir, file := memoryDir(t, "size=64m"), filepath.Join(t.TempDir(), "out.json")
	cmd := program(t, "nfsrdmad", "bench", dir, "--size", "2", "--runs", "1000", "--time", "1h", "--json", file)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// The random read goes on for an hour.
	for deadline := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		if found, _ := filepath.Glob(dir + "/*/data"); len(found) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no file after a minute")
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 8 || !strings.Contains(stderr.String(), "interrupted; the files") {
		t.Errorf("got exit code %d, want 8: %s", code, stderr.String())
	}
	checkEmptyDir(t, dir)
	if _, err := os.Lstat(file); err == nil {
		t.Error("the file of --json exists after the interrupt")
	}
}

func TestBenchErrors(t *testing.T) {
	small, readOnly, dir := memoryDir(t, "size=1m"), memoryDir(t, "ro"), t.TempDir()
	file := filepath.Join(dir, "out.json")
	for _, tt := range []struct {
		args []string
		code int
		want []string
	}{
		{shortBench(small, "--json", file), 2, []string{small, "no space left on device", "sequential write, 1 MiB"}},
		{shortBench(readOnly), 2, []string{readOnly, "read-only file system"}},
		{shortBench(dir + "/none"), 1, []string{dir + "/none", "no such file or directory"}},
		{shortBench("/dev/null"), 2, []string{"/dev/null", "not a directory"}},
		{[]string{"bench"}, 1, []string{"usage: nfsrdmad bench DIR"}},
		{shortBench(dir, "--size", "0"), 1, []string{"--size=0: must be from 1 to"}},
		{shortBench(dir, "--time", "0"), 1, []string{"--time=0s: must be more than 0"}},
		{shortBench(dir, "--files", "0"), 1, []string{"--files=0: must be from 1 to"}},
		{shortBench(dir, "--runs", "0"), 1, []string{"--runs=0: must be from 1 to"}},
	} {
		nfsrdmad(t, tt.args...).fails(t, tt.code, tt.want...)
	}
	checkEmptyDir(t, small)
	checkEmptyDir(t, dir)
}
