package vfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

const fsType = "fuse." + Subtype

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

// A device is the device number of a file system.
type device struct{ major, minor uint32 }

// deviceAt returns the device number of the file system at path. deviceAt sends no request to that
// file system: with AT_STATX_DONT_SYNC the kernel answers.
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

// mountedAt reports whether the kernel's mount table has the file system dev of this package at
// dir, also where another file system covers it. mountedAt reads /proc alone, so no file system can
// block it.
func mountedAt(dir string, dev device) (bool, error) {
	mounts, err := mountinfo.GetMounts(isMount(dir, dev))
	return len(mounts) > 0, err
}

// MountPointOf returns the mount point of the connection of f, a descriptor of /dev/fuse. It
// returns "" if the mount is detached, or if the kernel does not report the number of the
// connection. MountPointOf reads /proc alone, so no file system can block it.
func MountPointOf(f *os.File) string {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return ""
	}
	_, text, _ := strings.Cut(string(info), "\nfuse_connection:")
	var minor int // the number of a connection is that of its device
	if _, err := fmt.Sscan(text, &minor); err != nil {
		return ""
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		found := m.FSType == fsType && m.Major == 0 && m.Minor == minor
		return !found, found
	})
	if err != nil || len(mounts) == 0 {
		return ""
	}
	return mounts[0].Mountpoint
}

// isMount returns a filter that accepts only mounts of the device dev at the directory dir.
func isMount(dir string, dev device) mountinfo.FilterFunc {
	return func(m *mountinfo.Info) (skip, stop bool) {
		found := m.Mountpoint == dir && m.FSType == fsType && device{uint32(m.Major), uint32(m.Minor)} == dev
		return !found, found
	}
}

// hasMountsBelow reports whether other file systems are mounted below the mount point, in this
// mount namespace. When a lookup fails, the kernel's FUSE client detaches what is mounted on the
// name. A user without rights could so detach mounts of the administrator. The kernel keeps the
// mounts when the error is ENOMEM.
func (fs *FS) hasMountsBelow() bool {
	dir := fs.mountDir.Load()
	if dir == nil {
		return false
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		below := strings.HasPrefix(m.Mountpoint, *dir+"/")
		return !below, below
	})
	return err != nil || len(mounts) > 0
}
