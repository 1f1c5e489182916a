package mountpoint

import (
	"fmt"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Subtype and FSType are the types of the mounts in /proc/mounts.
const (
	Subtype = "nfsrdma"
	FSType  = "fuse." + Subtype
)

// A Device is the device number of a file system.
type Device struct{ Major, Minor uint32 }

// deviceAt returns the device number of the file system at path. deviceAt sends no request to that
// file system: with AT_STATX_DONT_SYNC the kernel answers.
func deviceAt(dirfd int, path string) (Device, error) {
	flags := unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT | unix.AT_SYMLINK_NOFOLLOW
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	if err := unix.Statx(dirfd, path, flags, unix.STATX_TYPE, &st); err != nil {
		return Device{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return Device{st.Dev_major, st.Dev_minor}, nil
}

// MountedAt reports whether the kernel's mount table has the file system dev of this package at
// dir, also where another file system covers it. MountedAt reads /proc alone, so no file system can
// block it.
func MountedAt(dir string, dev Device) (bool, error) {
	mounts, err := mountinfo.GetMounts(isMount(dir, dev))
	return len(mounts) > 0, err
}

// Of returns the mount point of the connection of f, a descriptor of /dev/fuse. It
// returns "" if the mount is detached, or if the kernel does not report the number of the
// connection. Of reads /proc alone, so no file system can block it.
func Of(f *os.File) string {
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
		found := m.FSType == FSType && m.Major == 0 && m.Minor == minor
		return !found, found
	})
	if err != nil || len(mounts) == 0 {
		return ""
	}
	return mounts[0].Mountpoint
}

// isMount returns a filter that accepts only mounts of the device dev at the directory dir.
func isMount(dir string, dev Device) mountinfo.FilterFunc {
	return func(m *mountinfo.Info) (skip, stop bool) {
		found := m.Mountpoint == dir && m.FSType == FSType && Device{uint32(m.Major), uint32(m.Minor)} == dev
		return !found, found
	}
}

// HasMountsBelow reports whether other file systems are mounted below a directory, in this mount
// namespace. It also does so when the mount table cannot be read.
func HasMountsBelow(dir string) bool {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		below := strings.HasPrefix(m.Mountpoint, dir+"/")
		return !below, below
	})
	return err != nil || len(mounts) > 0
}
