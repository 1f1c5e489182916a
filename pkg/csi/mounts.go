package csi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// A device is the number of a file system. All bind mounts of one mount have the same.
type device struct{ major, minor int }

// A mountPoint is a line of the mount table of this mount namespace.
type mountPoint struct {
	dir      string
	fsType   string
	device   device
	readOnly bool
}

// isOurs reports whether a daemon of this program made the file system.
func (m *mountPoint) isOurs() bool { return m.fsType == mount.FSType }

// mountTable returns the mount table. It reads /proc alone, so no file system can block it.
func mountTable() ([]mountPoint, error) {
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	all := make([]mountPoint, len(infos))
	for i, m := range infos {
		all[i] = mountPoint{dir: m.Mountpoint, fsType: m.FSType, device: device{m.Major, m.Minor},
			readOnly: slices.Contains(strings.Split(m.Options, ","), "ro")}
	}
	return all, nil
}

// topMount returns the topmost mount at dir, or nil if nothing is mounted there.
func topMount(dir string) (*mountPoint, error) {
	all, err := mountTable()
	if err != nil {
		return nil, err
	}
	for _, m := range slices.Backward(all) {
		if m.dir == dir {
			return &m, nil
		}
	}
	return nil, nil
}

// mountsOf returns the mount points of the file system dev, except those named.
func mountsOf(dev device, except ...string) (dirs []string, err error) {
	all, err := mountTable()
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		if m.device == dev && !slices.Contains(except, m.dir) {
			dirs = append(dirs, m.dir)
		}
	}
	return dirs, nil
}

// bind bind mounts the file system at source on the directory target. A read-only mount is never
// writable, not even for a moment. It needs Linux 5.12. No step waits for the server.
func bind(source, target string, readOnly bool) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, source,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("bind mount %s: open_tree: %w", source, err)
	}
	defer unix.Close(fd)
	if readOnly {
		attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
			return fmt.Errorf("bind mount %s: mount_setattr: %w", source, err)
		}
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("bind mount %s on %s: move_mount: %w", source, target, err)
	}
	return nil
}

// maxStacked bounds the mounts that unmountAll removes from one directory.
const maxStacked = 16

// unmountAll unmounts all mounts of a daemon at dir. It fails if a process uses one, unless flags
// has MNT_DETACH. Mounts of other types are an error.
func unmountAll(dir string, flags int) error {
	for range maxStacked {
		m, err := topMount(dir)
		switch {
		case err != nil:
			return err
		case m == nil:
			return nil
		case !m.isOurs():
			return fmt.Errorf("unmount %s: a file system of type %s is mounted there; unmount it first", dir, m.fsType)
		}
		if err := unix.Unmount(dir, flags|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return fmt.Errorf("unmount %s: more than %d mounts", dir, maxStacked)
}

// makeTarget creates the directory dir, on which nothing is mounted, if it does not exist.
func makeTarget(dir string) error {
	err := os.Mkdir(dir, 0o750)
	if errors.Is(err, fs.ErrExist) {
		fi, statErr := os.Lstat(dir)
		switch {
		case statErr != nil:
			return statErr
		case !fi.IsDir():
			return fmt.Errorf("%s: not a directory", dir)
		}
		return nil
	}
	return err
}
