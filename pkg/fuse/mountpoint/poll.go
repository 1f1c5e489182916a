package mountpoint

import (
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// disablePollTimeout bounds DisablePoll. Only programs that use their own mounts need DisablePoll,
// so a mount does not fail without it.
const disablePollTimeout = 5 * time.Second

// DisablePoll informs the kernel that files on the mount at dir do not support poll(2). A
// process that serves a mount and also opens files on it must call DisablePoll first. DisablePoll
// returns after 5 seconds at most, even if the server does not answer.
func DisablePoll(dir string) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		disablePoll(dir)
	}()
	select {
	case <-done:
	case <-time.After(disablePollTimeout):
		// The kernel first requests the root's attributes, and the server does not answer.
	}
}

// disablePoll informs the kernel that files on the mount do not support poll(2). Otherwise the
// kernel sends POLL when this process first opens a file on the mount. The runtime then blocks the
// processor that has to answer.
func disablePoll(dir string) {
	fd, err := unix.Open(filepath.Join(dir, kernel.PollFile), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}, 0)
}
