package front

import (
	"bytes"
	"encoding/binary"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// interruptBit is FUSE_INT_REQ_BIT: the number of an INTERRUPT is that of its request with this
// bit.
const interruptBit = 1

// An INTERRUPT comes through /dev/fuse, and so before its request at times. interruptTries bounds
// the attempts to handle it, whose pauses grow from interruptPause to twice as much each.
const interruptTries, interruptPause = 9, time.Millisecond

// isInterruptRetry reports whether a reply says that the request of an INTERRUPT is not in
// progress.
func isInterruptRetry(reply []byte) bool {
	return reply[8]&interruptBit != 0 && int32(binary.NativeEndian.Uint32(reply[4:])) == -int32(unix.EAGAIN)
}

// earlyInterrupt handles an INTERRUPT whose request is not in progress yet.
func (s *DevFuse) earlyInterrupt(unique uint64) {
	pause := interruptPause
	for range interruptTries {
		time.Sleep(pause)
		if s.interrupt(unique) || s.disconnected.Load() {
			return
		}
		pause *= 2
	}
}

// interrupt interrupts a request. It reports false if the request is not in progress. unique is the
// number of the request with or without the mark resent.
func (s *DevFuse) interrupt(unique uint64) bool {
	return s.Interrupt(unique&^resent) || s.Interrupt(unique|resent)
}

const (
	// signalPause is the pause between two looks at the requests in progress.
	signalPause = 100 * time.Millisecond
	// A request is looked at again after 1, 2, 4 and 8 pauses, and then after each laterLooks.
	laterLooks = 8
)

// watched is what watchSignals knows of an entry.
type watched struct {
	request uint64
	pauses  uint
}

// watchSignals interrupts requests whose callers have a signal pending, while requests are in
// progress. The kernel sends no INTERRUPT for a signal that came before it had copied the request
// to the ring, for example for the FLUSH of a process that was killed. It also does not repeat one
// that an earlier process got.
func (s *DevFuse) watchSignals() {
	if s.rings.watching.Load() || s.rings.watching.Swap(true) {
		return
	}
	s.workers.Go(func() {
		for more := true; more; {
			select {
			case <-time.After(signalPause):
			case <-s.gone:
				return
			}
			if more = s.lookAtRequests(); !more {
				s.rings.watching.Store(false)
				// A request can have begun meanwhile.
				more = s.hasRequests() && !s.rings.watching.Swap(true)
			}
		}
	})
}

func (s *DevFuse) hasRequests() bool {
	for i := range min(s.rings.total.Load(), maxEntries) {
		if e := s.rings.entries[i].Load(); e != nil && e.request.Load() != 0 {
			return true
		}
	}
	return false
}

// lookAtRequests looks once at each request in progress. It reports false when there was none.
func (s *DevFuse) lookAtRequests() (some bool) {
	for i := range min(s.rings.total.Load(), maxEntries) {
		e := s.rings.entries[i].Load()
		if e == nil {
			continue
		}
		request := e.request.Load()
		if request == 0 {
			continue
		}
		some = true
		w := &e.looks
		if w.request != request {
			*w = watched{request: request}
		}
		w.pauses++
		due := w.pauses&(w.pauses-1) == 0
		if w.pauses > laterLooks {
			due = w.pauses%laterLooks == 0
		}
		if caller := e.caller.Load(); due && caller != 0 && signalPending(caller) && e.request.Load() == request {
			s.interrupt(request)
		}
	}
	return some
}

// signalPending reports whether a thread has a pending signal that it does not block, or exits
// because of a signal.
func signalPending(thread uint32) bool {
	proc := "/proc/" + strconv.FormatUint(uint64(thread), 10)
	b, err := os.ReadFile(proc + "/status")
	if err != nil {
		return false
	}
	if (signalSet(b, "SigPnd")|signalSet(b, "ShdPnd"))&^signalSet(b, "SigBlk") != 0 {
		return true
	}
	if bytes.Contains(b, []byte("\nVmSize:")) {
		return false
	}
	// The thread has released its memory: it exits, and closes its files. The read of stat could
	// wait for a thread in execve(2), but not for this one.
	if b, err = os.ReadFile(proc + "/stat"); err != nil {
		return false
	}
	return exitSignal(b) != 0
}

// signalSet returns a set of signals of /proc/PID/status.
func signalSet(status []byte, name string) uint64 {
	_, rest, _ := bytes.Cut(status, []byte("\n"+name+":\t"))
	digits, _, _ := bytes.Cut(rest, []byte("\n"))
	n, _ := strconv.ParseUint(string(digits), 16, 64)
	return n
}

// exitSignal returns the signal that ends a process, from the field exit_code of /proc/PID/stat
// (proc_pid_stat(5)). It returns 0 if no signal ends the process, or without CAP_SYS_PTRACE.
func exitSignal(stat []byte) int {
	const exitCode = 52 - 3 // the fields after the name of the program begin with the third
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= exitCode {
		return 0
	}
	code, _ := strconv.Atoi(string(fields[exitCode]))
	return code & 0x7f
}
