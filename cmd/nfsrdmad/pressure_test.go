package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A memoryGroup is a cgroup with a memory limit, of version 2 or 1.
type memoryGroup struct {
	dir           string
	limit, events string // files
}

// newMemoryGroup makes a cgroup of at most limit bytes.
func newMemoryGroup(t *testing.T, limit int) *memoryGroup {
	t.Helper()
	name := fmt.Sprintf("nfsrdmad-test-%d", os.Getpid())
	g := &memoryGroup{filepath.Join("/sys/fs/cgroup", name), "memory.max", "memory.events"}
	controllers, _ := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if bytes.Contains(controllers, []byte("memory")) {
		_ = os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+memory"), 0)
	} else {
		g = &memoryGroup{filepath.Join("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes", "memory.oom_control"}
	}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		t.Fatalf("make a memory cgroup: %v", err)
	}
	t.Cleanup(func() {
		var err error
		for range 100 { // the kernel needs some time after the last process has exited
			if err = os.Remove(g.dir); err == nil {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Errorf("remove the memory cgroup: %v", err)
	})
	g.write(t, g.limit, strconv.Itoa(limit))
	return g
}

func (g *memoryGroup) write(t *testing.T, file, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(g.dir, file), []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}

func (g *memoryGroup) add(t *testing.T, pid int) { g.write(t, "cgroup.procs", strconv.Itoa(pid)) }

// oomKills returns the number of processes that the kernel killed for lack of memory.
func (g *memoryGroup) oomKills(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, g.events))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("%s has no oom_kill: %s", g.events, b)
	return 0
}

const (
	// pressureWriter is the name under which the test binary runs writePressure.
	pressureWriter = "pressure-writer"
	pressureChunk  = 1 << 20
)

// pressureData fills b with the content of a file at an offset.
func pressureData(b []byte, off int64) {
	src := rand.NewChaCha8([32]byte{byte(off >> 20), byte(off >> 28), 1})
	_, _ = src.Read(b)
}

// writePressure waits for a line on stdin and writes os.Args[2] bytes to the file os.Args[1],
// through a mapping or with write(2). It returns the exit code.
func writePressure() int {
	_, _ = fmt.Fscanln(os.Stdin)
	size, err := strconv.ParseInt(os.Args[2], 10, 64)
	if err == nil {
		err = writeLarge(os.Args[1], size, os.Args[3] == "mmap")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func writeLarge(path string, size int64, mapped bool) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if !mapped {
		b := make([]byte, pressureChunk)
		for off := int64(0); off < size; off += pressureChunk {
			pressureData(b, off)
			if _, err := f.WriteAt(b, off); err != nil {
				return err
			}
		}
		return f.Sync()
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	for off := int64(0); off < size; off += pressureChunk {
		pressureData(m[off:off+pressureChunk], off)
	}
	return errors.Join(unix.Msync(m, unix.MS_SYNC), unix.Munmap(m))
}

// TestWriteBackUnderMemoryPressure runs the daemon and processes that write much more than the
// memory of their common cgroup. The writers must complete with the right data, and no process may
// be killed.
func TestWriteBackUnderMemoryPressure(t *testing.T) {
	const memory, size = 256 << 20, 384 << 20
	w := newTestEnv(t)
	dir := w.mkdir(t, "m")
	w.mount(t, dir).succeeds(t)
	g := newMemoryGroup(t, memory)
	g.add(t, w.daemon.Process.Pid)
	t.Cleanup(func() { w.stop(t, w.daemon) }) // before the cgroup is removed
	ended := make(chan error, 2)
	for _, how := range []string{"mmap", "write"} {
		cmd := program(t, pressureWriter, filepath.Join(dir, how), strconv.Itoa(size), how)
		cmd.Stderr = os.Stderr
		start, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		g.add(t, cmd.Process.Pid)
		fmt.Fprintln(start)
		go func() { ended <- waitNamed(how, cmd) }()
	}
	deadline := time.After(5 * limit)
	for range 2 {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-deadline:
			t.Fatalf("the writers do not complete; OOM kills: %d", g.oomKills(t))
		}
	}
	if n := g.oomKills(t); n != 0 {
		t.Errorf("OOM kills: got %d, want 0", n)
	}
	for _, how := range []string{"mmap", "write"} {
		checkPressureFile(t, filepath.Join(w.dir, "export", how), size)
	}
}

func waitNamed(name string, cmd *exec.Cmd) error {
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func checkPressureFile(t *testing.T, path string, size int64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() != size {
		t.Fatalf("%s: got size %d, %v, want %d", path, st.Size(), err, size)
	}
	got, want := make([]byte, pressureChunk), make([]byte, pressureChunk)
	for off := int64(0); off < size; off += pressureChunk {
		if _, err := f.ReadAt(got, off); err != nil {
			t.Fatal(err)
		}
		if pressureData(want, off); !bytes.Equal(got, want) {
			t.Fatalf("%s: wrong data at offset %d", path, off)
		}
	}
}
