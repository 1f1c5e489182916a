package mount

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func ended(op kernel.Op, tid, uid uint32, n int) *kernel.Request {
	h := fuse.InHeader{Caller: fuse.Caller{Pid: tid, Owner: fuse.Owner{Uid: uid}}}
	return &kernel.Request{Header: &h, Op: op, Bytes: n}
}

// TestUsageByProcessAndUser counts requests of this process, of a child, of the kernel, and of a
// process that has ended.
func TestUsageByProcessAndUser(t *testing.T) {
	child := exec.Command("sleep", "60")
	kit.Must(t, child.Start())
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	own, other := uint32(os.Getpid()), uint32(child.Process.Pid)
	for _, name := process(other); name != "sleep"; _, name = process(other) { // execve has not ended
		time.Sleep(time.Millisecond)
	}
	const gone = 1 << 30 // no process has this number
	var u usage
	for _, s := range []*kernel.Request{
		ended(kernel.OpRead, own, 1, 100),
		ended(kernel.OpRead, own, 1, 20),
		ended(kernel.OpWrite, own, 1, 3),
		ended(kernel.OpLookup, own, 1, 0),
		ended(kernel.OpWrite, other, 1, 40),
		ended(kernel.OpWrite, 0, 0, 5),
		ended(kernel.OpRead, gone, 2, 6),
	} {
		u.observe(s, time.Second)
	}
	processes, users := u.usages()
	command, err := os.ReadFile("/proc/self/comm")
	kit.Must(t, err)
	for _, want := range []control.Usage{
		{PID: own, Command: string(command[:len(command)-1]), UID: 1, Requests: 4, ReadBytes: 120, WrittenBytes: 3,
			Seconds: 4},
		{PID: other, Command: "sleep", UID: 1, Requests: 1, WrittenBytes: 40, Seconds: 1},
		{PID: 0, UID: 0, Requests: 1, WrittenBytes: 5, Seconds: 1},
		{PID: gone, UID: 2, Requests: 1, ReadBytes: 6, Seconds: 1},
	} {
		if !slices.Contains(processes, want) {
			t.Errorf("processes: got %+v, want %+v among them", processes, want)
		}
	}
	for _, want := range []control.Usage{
		{UID: 1, Requests: 5, ReadBytes: 120, WrittenBytes: 43, Seconds: 5},
		{UID: 0, Requests: 1, WrittenBytes: 5, Seconds: 1},
		{UID: 2, Requests: 1, ReadBytes: 6, Seconds: 1},
	} {
		if !slices.Contains(users, want) {
			t.Errorf("users: got %+v, want %+v among them", users, want)
		}
	}
	if len(processes) != 4 || len(users) != 3 || processes[0].PID != own {
		t.Errorf("got %d processes and %d users, first process %d; want 4 and 3, first %d", len(processes), len(users),
			processes[0].PID, own)
	}
}

// TestUsageNamesProcessOfThread checks that the threads of a process count together.
func TestUsageNamesProcessOfThread(t *testing.T) {
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads of this process: got %v, %v, want at least 2", tasks, err)
	}
	var u usage
	for _, task := range tasks {
		var tid uint32
		for _, c := range filepath.Base(task) {
			tid = tid*10 + uint32(c-'0')
		}
		s := ended(kernel.OpRead, tid, 0, 1)
		u.observe(s, time.Second)
	}
	processes, _ := u.usages()
	i := slices.IndexFunc(processes, func(p control.Usage) bool { return p.PID == uint32(os.Getpid()) })
	if i < 0 || processes[i].Requests < 2 { // a thread may have ended since
		t.Errorf("got %+v, want requests of %d threads of process %d", processes, len(tasks), os.Getpid())
	}
}

// TestUsageIsBounded makes more processes and users than the tables hold. The recent ones stay.
func TestUsageIsBounded(t *testing.T) {
	const gone = 1 << 30
	var u usage
	for n := range uint32(maxThreads + maxConsumers) {
		s := ended(kernel.OpRead, gone+n, n, 1)
		u.observe(s, time.Second)
	}
	last := uint32(maxThreads + maxConsumers - 1)
	processes, users := u.usages()
	if len(u.threads) > maxThreads || len(processes) > maxConsumers || len(users) > maxConsumers {
		t.Errorf("got %d threads, %d processes, %d users, want at most %d, %d, %d", len(u.threads), len(processes),
			len(users), maxThreads, maxConsumers, maxConsumers)
	}
	want := control.Usage{UID: last, Requests: 1, ReadBytes: 1, Seconds: 1}
	if !slices.Contains(users, want) {
		t.Errorf("users: got none with uid %d, want the latest", last)
	}
}

// TestUsageDoesNotAllocate checks requests of a known thread.
func TestUsageDoesNotAllocate(t *testing.T) {
	var u usage
	s := ended(kernel.OpRead, uint32(os.Getpid()), 0, 4096)
	u.observe(s, time.Second)
	if n := testing.AllocsPerRun(1000, func() { u.observe(s, time.Second) }); n != 0 {
		t.Errorf("allocations per request: got %v, want 0", n)
	}
}
