package kernel

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// interruptBit is FUSE_INT_REQ_BIT: the number of an INTERRUPT is that of its request with this
// bit.
const interruptBit = 1

// With KeepRequests, a worker can read an INTERRUPT before another one begins with its request, for
// example a request of another process. interruptTries bounds the attempts to handle the INTERRUPT,
// whose pauses grow from interruptPause to twice as much each.
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
