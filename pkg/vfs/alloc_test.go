package vfs

import (
	"os"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/server"
)

// TestMountedCallsDoNotAllocate counts the allocations of the whole client, from the connection to the
// transport, for system calls on a mount. The server is another process.
func TestMountedCallsDoNotAllocate(t *testing.T) {
	kit.CountsAllocations(t)
	kit.NeedsRoot(t)
	e := exportOf(t, server.Start(t))
	must(t, os.WriteFile(e.dir+"/data", make([]byte, 4<<20), 0o644))
	opts := DefaultOptions()
	opts.LookupCache = LookupCacheNone // each use of a name is a LOOKUP
	opts.DirtyExpire = 0
	m := e.mount(t, mountConfig{opts: opts})
	open := func(flags int) uintptr {
		fd, err := unix.Open(m.path("data"), unix.O_RDWR|unix.O_CLOEXEC|flags, 0)
		must(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return uintptr(fd)
	}
	direct, buffered := open(unix.O_DIRECT), open(0)
	// The functions of package unix allocate the path.
	pointer := func(s string) uintptr {
		b, err := unix.BytePtrFromString(s)
		must(t, err)
		paths = append(paths, b)
		return uintptr(unsafe.Pointer(b))
	}
	path, empty := pointer(m.path("data")), pointer("")
	reopen := pointer("/proc/self/fd/" + strconv.Itoa(int(buffered))) // an OPEN without a LOOKUP
	call := func(trap, a1, a2, a3, a4, a5 uintptr) uintptr {
		n, _, errno := unix.Syscall6(trap, a1, a2, a3, a4, a5, 0)
		if errno != 0 {
			t.Fatal(errno)
		}
		return n
	}
	cwd := unix.AT_FDCWD
	buf := uintptr(unsafe.Pointer(&accessed[0]))
	const all = unix.STATX_BASIC_STATS
	for _, c := range []struct {
		name string
		op   kernel.Op
		want float64
		do   func()
	}{
		{"LOOKUP", kernel.OpLookup, 0, func() { call(unix.SYS_STATX, uintptr(cwd), path, 0, all, buf) }},
		{"GETATTR", kernel.OpGetAttr, 0, func() {
			call(unix.SYS_STATX, direct, empty, unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, all, buf)
		}},
		{"READ 4 KiB", kernel.OpRead, 0, func() { call(unix.SYS_PREAD64, direct, buf, 4<<10, 4<<10, 0) }},
		{"READ 1 MiB", kernel.OpRead, 0, func() { call(unix.SYS_PREAD64, direct, buf, 1<<20, 0, 0) }},
		{"WRITE 4 KiB", kernel.OpWrite, 0, func() { call(unix.SYS_PWRITE64, buffered, buf, 4<<10, 0, 0) }},
		// The open file is the allocation.
		{"OPEN, FLUSH, RELEASE", kernel.OpFlush, 1, func() {
			call(unix.SYS_CLOSE, call(unix.SYS_OPENAT, uintptr(cwd), reopen, unix.O_RDONLY, 0, 0), 0, 0, 0, 0)
		}},
	} {
		const warmUp, runs = 300, 200 // each slot of the transport has MRs
		for range warmUp {
			c.do()
		}
		before := m.fs.Counters.Ops[c.op].Load()
		n := kit.Allocations(runs, c.do, c.want)
		if n != c.want {
			t.Errorf("%s: got %v allocations, want %v", c.name, n, c.want)
		}
		if got := m.fs.Counters.Ops[c.op].Load() - before; got < runs {
			t.Errorf("%s: got %d requests for %d calls", c.name, got, runs)
		}
	}
}

// Memory for system calls. It is not on a stack, which may move.
var (
	accessed = make([]byte, 1<<20)
	paths    []*byte
)
