package fusefs

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	fuseDevicePath = "/dev/fuse"
	fsType         = "fuse." + Subtype
)

// A fuseDevice is our own descriptor of an open /dev/fuse, beside the one that go-fuse reads
// requests from: it tells whether the kernel has ended the connection, also while every request
// waits for a server.
type fuseDevice struct {
	mu sync.Mutex
	fd int // guarded by mu; -1 when closed
}

func openFuse() (*fuseDevice, error) {
	fd, err := unix.Open(fuseDevicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: fuseDevicePath, Err: err}
	}
	return &fuseDevice{fd: fd}, nil
}

// mount makes the mount(2) call.
func (d *fuseDevice) mount(dir string, opts *MountOptions, maxRead int) error {
	// Without default_permissions names in the kernel's cache would let users through directories
	// that are closed to them.
	data := fmt.Sprintf("fd=%d,rootmode=%o,user_id=%d,group_id=%d,max_read=%d,default_permissions", d.fd,
		unix.S_IFDIR, os.Geteuid(), os.Getegid(), maxRead)
	if !opts.OnlyOwner {
		data += ",allow_other"
	}
	source := opts.FsName
	if source == "" {
		source = Subtype
	}
	return os.NewSyscallError("mount", unix.Mount(source, dir, fsType, opts.flags(), data))
}

// pathForServer is a path by which go-fuse takes over a descriptor of its own, which it closes.
func (d *fuseDevice) pathForServer() (string, error) {
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return "", os.NewSyscallError("fcntl", err)
	}
	return fmt.Sprintf("/dev/fd/%d", fd), nil
}

// dead tells whether the kernel has ended the connection.
func (d *fuseDevice) dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd < 0 {
		return true
	}
	fds := []unix.PollFd{{Fd: int32(d.fd)}}
	n, err := unix.Poll(fds, 0) // POLLERR needs no asking for
	return err == nil && n == 1 && fds[0].Revents&unix.POLLERR != 0
}

func (d *fuseDevice) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fd >= 0 {
		_ = unix.Close(d.fd)
		d.fd = -1
	}
}

// epollFile is a file that go-fuse itself answers for, below the root of every file system it
// serves.
const epollFile = ".go-fuse-epoll-hack"

// settlePoll makes the kernel ask once whether files can be polled, and hear that they cannot.
// Otherwise it would ask when this process opens a file on the mount, while the runtime holds the
// processor that the answer needs.
func settlePoll(dir string) {
	fd, err := unix.Open(filepath.Join(dir, epollFile), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}, 0)
}

// A device is the number of a file system.
type device struct{ major, minor uint32 }

// deviceAt is that of the file system at a path. It makes no request of a file system that is
// mounted there: AT_STATX_DONT_SYNC has the kernel answer.
func deviceAt(dirfd int, path string) (device, error) {
	flags := unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT | unix.AT_SYMLINK_NOFOLLOW
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	if err := unix.Statx(dirfd, path, flags, unix.STATX_TYPE, &st); err != nil {
		return device{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return device{st.Dev_major, st.Dev_minor}, nil
}

// mountedAt reports whether the kernel's mount table has the file system dev of this package at dir,
// also where another file system covers it. It reads /proc alone, so no file system can block it.
func mountedAt(dir string, dev device) (bool, error) {
	mounts, err := mountinfo.GetMounts(isMount(dir, dev))
	return len(mounts) > 0, err
}

// isMount keeps the mounts of the file system dev at dir.
func isMount(dir string, dev device) mountinfo.FilterFunc {
	return func(m *mountinfo.Info) (skip, stop bool) {
		found := m.Mountpoint == dir && m.FSType == fsType && device{uint32(m.Major), uint32(m.Minor)} == dev
		return !found, found
	}
}
