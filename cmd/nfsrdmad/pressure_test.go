package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
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
		// The kernel needs some time after the last process has exited.
		kit.Eventually(t, "removal of the cgroup", func() bool { return os.Remove(g.dir) == nil })
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
	pressureMemory = 192 << 20
	pressureSize   = 256 << 20
	pressurePage   = 4096
)

// writePressure waits for a line on stdin and writes the file os.Args[1] through a mapping. Each
// page begins with its number. It returns the exit code.
func writePressure() int {
	_, _ = fmt.Fscanln(os.Stdin)
	f, err := os.OpenFile(os.Args[1], os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil {
		err = f.Truncate(pressureSize)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	m, err := unix.Mmap(int(f.Fd()), 0, pressureSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err == nil {
		for at := 0; at < pressureSize; at += pressurePage {
			binary.NativeEndian.PutUint64(m[at:], uint64(at/pressurePage)+1)
		}
		err = errors.Join(unix.Msync(m, unix.MS_SYNC), unix.Munmap(m), f.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// TestWriteBackUnderMemoryPressure runs the daemon and a process that changes more mapped pages
// than the memory of their common cgroup. The writer must complete with the right data, and no
// process may be killed. checkThreads is the test of the setting that prevents the deadlock.
func TestWriteBackUnderMemoryPressure(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "m")
	w.mount(t, dir).succeeds(t)
	g := newMemoryGroup(t, pressureMemory)
	g.add(t, w.daemon.Process.Pid)
	t.Cleanup(func() { w.stop(t, w.daemon) }) // before the cgroup is removed
	cmd := program(t, pressureWriter, filepath.Join(dir, "file"))
	cmd.Stderr = os.Stderr
	start, err := cmd.StdinPipe()
	kit.Must(t, err)
	kit.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	g.add(t, cmd.Process.Pid)
	fmt.Fprintln(start)
	if err := cmd.Wait(); err != nil {
		t.Errorf("writer: %v; OOM kills: %d", err, g.oomKills(t))
	}
	if n := g.oomKills(t); n != 0 {
		t.Errorf("OOM kills: got %d, want 0", n)
	}
	b, err := os.ReadFile(filepath.Join(w.dir, "export", "file"))
	if err != nil || len(b) != pressureSize {
		t.Fatalf("got %d bytes on the server, %v; want %d", len(b), err, pressureSize)
	}
	for at := 0; at < pressureSize; at += pressurePage {
		if n := binary.NativeEndian.Uint64(b[at:]); n != uint64(at/pressurePage)+1 {
			t.Fatalf("page at offset %d: got number %d, want %d", at, n, at/pressurePage+1)
		}
	}
}
