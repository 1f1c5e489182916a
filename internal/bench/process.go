package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Processes are process IDs by the name under which a Sample has their Usage.
type Processes map[string]int

// A Usage is what a process used.
type Usage struct {
	Seconds  float64 `json:"cpu_seconds"`                // processor time
	Switches uint64  `json:"voluntary_context_switches"` // of all threads
}

// Usages are by the name of the process.
type Usages map[string]Usage

// Usage returns what the processes have used since they started. Context switches of threads that
// have exited are missing.
func (p Processes) Usage() (Usages, error) {
	all := make(Usages, len(p))
	for name, pid := range p {
		u, err := usage(pid)
		if err != nil {
			return nil, fmt.Errorf("process %d (%s): %w", pid, name, err)
		}
		all[name] = u
	}
	return all, nil
}

// Since returns the differences to before.
func (u Usages) Since(before Usages) Usages {
	if len(u) == 0 {
		return nil
	}
	diff := make(Usages, len(u))
	for name, after := range u {
		b := before[name]
		// A thread that exited takes its switches with it.
		diff[name] = Usage{after.Seconds - b.Seconds, after.Switches - min(after.Switches, b.Switches)}
	}
	return diff
}

func usage(pid int) (u Usage, err error) {
	var t unix.Timespec
	if err := unix.ClockGettime(processClock(pid), &t); err != nil {
		return u, fmt.Errorf("read the processor time: %w", err)
	}
	u.Seconds = time.Duration(t.Nano()).Seconds()
	tasks := fmt.Sprintf("/proc/%d/task", pid)
	threads, err := os.ReadDir(tasks)
	if err != nil {
		return u, err
	}
	for _, thread := range threads {
		n, err := voluntarySwitches(tasks + "/" + thread.Name() + "/status")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) { // the thread has exited
			continue
		}
		if err != nil {
			return u, err
		}
		u.Switches += n
	}
	return u, nil
}

// processClock is the clock of the processor time of a process, clock_getcpuclockid(3). Its
// resolution is a nanosecond, that of /proc/PID/stat is 10 ms.
func processClock(pid int) int32 {
	const sched = 2 // CPUCLOCK_SCHED, include/linux/posix-timers_types.h
	return int32(^pid<<3 | sched)
}

func voluntarySwitches(file string) (uint64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	_, rest, found := bytes.Cut(text, []byte("\nvoluntary_ctxt_switches:"))
	if !found {
		return 0, fmt.Errorf("parse %s: no voluntary_ctxt_switches", file)
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return strconv.ParseUint(string(bytes.TrimSpace(line)), 10, 64)
}
