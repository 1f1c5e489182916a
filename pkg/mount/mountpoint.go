package mount

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moby/sys/mountinfo"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
)

const (
	fuseDevice = "/dev/fuse"
	// Numbers of the device, from Linux' list of devices.
	fuseMajor, fuseMinor = 10, 229

	ourType    = "fuse." + fusefs.Subtype
	autofsType = "autofs"
	// pathTimeout bounds looking at a mount point, which may lie within a file system that hangs.
	pathTimeout = control.StatusTimeout - time.Second
)

// CheckPrivilege tells whether this process may mount: it needs CAP_SYS_ADMIN and /dev/fuse.
func CheckPrivilege() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return control.Errorf(control.CodeSystem, "asking for this process's capabilities: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return control.Errorf(control.CodePermission, "no privilege to mount (CAP_SYS_ADMIN is missing): run as root, or give the container or unit this capability")
	}
	f, err := os.OpenFile(fuseDevice, os.O_RDWR, 0)
	switch {
	case err == nil:
		defer f.Close()
		return checkFuseDevice(f)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return control.Errorf(control.CodeSystem, "%s: %w: load the module with \"modprobe fuse\", or give the container the device",
			fuseDevice, unwrapPath(err))
	case errors.Is(err, fs.ErrPermission):
		return control.Errorf(control.CodePermission, "%s: %w: run as root, or give the container the device", fuseDevice,
			unwrapPath(err))
	}
	return control.Errorf(control.CodeSystem, "opening %s: %w", fuseDevice, unwrapPath(err))
}

// checkFuseDevice tells the device from what else may have its name, such as the null device of a
// container that was not given it.
func checkFuseDevice(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return control.Errorf(control.CodeSystem, "looking at %s: %w", fuseDevice, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != fuseMajor || unix.Minor(st.Rdev) != fuseMinor {
		return control.Errorf(control.CodeSystem, "%s: it is not the device of FUSE (character device %d:%d): give the container the device, or make it with mknod(1)", fuseDevice, fuseMajor, fuseMinor)
	}
	return nil
}

func unwrapPath(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// CheckMountPoint returns dir as an absolute path without symbolic links if something can be
// mounted there. It touches no mounted file system at dir itself, which might hang.
func CheckMountPoint(ctx context.Context, dir string) (string, error) {
	clean, err := ResolveMountPoint(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", &control.Error{Code: control.CodeMount, Err: err, Text: err.Error() + "; create it with mkdir -p"}
	case err != nil:
		return "", err
	}
	there, err := mountedAt(clean)
	switch {
	case err != nil:
		return "", err
	case there == ourType:
		return "", control.Errorf(control.CodeMount, "mount point %s: an nfsrdma mount is there already; unmount it first, with umount(8) if its daemon was killed", clean)
	// its kernel side lets nobody but the automounter's own process group by
	case there == autofsType:
		return "", control.Errorf(control.CodeMount, "mount point %s: an automounter waits there, and nfsrdma is mounted by its daemon, whom that would not let in; take x-systemd.automount out of fstab(5), or the directory out of the automounter's map", clean)
	case there != "":
		return "", control.Errorf(control.CodeMount, "mount point %s: something is mounted there already; unmount it first", clean)
	}
	fi, err := bounded(ctx, func() (os.FileInfo, error) { return os.Lstat(clean) })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", control.Errorf(control.CodeMount, "mount point %s does not exist; create it with mkdir", clean)
	case err != nil:
		return "", control.Errorf(control.CodeMount, "mount point %s: %w", clean, unwrapPath(err))
	case !fi.IsDir():
		return "", control.Errorf(control.CodeMount, "mount point %s is not a directory; name a directory", clean)
	}
	return clean, nil
}

// ResolveMountPoint returns dir as an absolute path, its parents free of symbolic links. The last
// element is followed only if it is a link, and never looked at when it is a mount point. The error
// of a parent that does not exist wraps [fs.ErrNotExist].
func ResolveMountPoint(ctx context.Context, dir string) (string, error) {
	if dir == "" || strings.ContainsRune(dir, 0) {
		return "", control.Errorf(control.CodeUsage, "mount point %q: not a path; name a directory", dir)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", control.Errorf(control.CodeUsage, "mount point %s: %w", dir, err)
	}
	parent, err := bounded(ctx, func() (string, error) { return filepath.EvalSymlinks(filepath.Dir(abs)) })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", &control.Error{Code: control.CodeMount, Err: fs.ErrNotExist, Text: "mount point " + abs + " does not exist"}
	case err != nil:
		return "", control.Errorf(control.CodeMount, "mount point %s: %w", abs, unwrapPath(err))
	}
	abs = filepath.Join(parent, filepath.Base(abs))
	mounted, err := isMountPoint(abs)
	if err != nil || mounted {
		return abs, err
	}
	fi, err := bounded(ctx, func() (os.FileInfo, error) { return os.Lstat(abs) })
	if err != nil || fi.Mode()&fs.ModeSymlink == 0 {
		return abs, nil
	}
	target, err := bounded(ctx, func() (string, error) { return filepath.EvalSymlinks(abs) })
	if err != nil {
		return "", control.Errorf(control.CodeMount, "mount point %s: %w", abs, unwrapPath(err))
	}
	return target, nil
}

// isMountPoint tells whether anything is mounted at dir. It asks no file system.
func isMountPoint(dir string) (bool, error) {
	there, err := mountedAt(dir)
	return there != "", err
}

// mountedAt returns the type of the topmost file system that is mounted at dir, and "" if nothing is
// mounted there. It reads /proc alone, so no file system can block it.
func mountedAt(dir string) (fsType string, err error) {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != dir, false })
	if err != nil {
		return "", control.Errorf(control.CodeSystem, "read mount table: %w", err)
	}
	if len(mounts) == 0 {
		return "", nil
	}
	return cmp.Or(mounts[len(mounts)-1].FSType, "unknown"), nil
}

// Mounted returns the mount points of all nfsrdma mounts of this mount namespace. It reads /proc
// alone, so no file system can block it.
func Mounted() ([]string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter(ourType))
	if err != nil {
		return nil, control.Errorf(control.CodeSystem, "read mount table: %w", err)
	}
	dirs := make([]string, len(mounts))
	for i, m := range mounts {
		dirs[i] = m.Mountpoint
	}
	return dirs, nil
}

// bounded runs a path lookup that may hang in a dead file system. When it does, its goroutine ends
// once that file system answers.
func bounded[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeout(ctx, pathTimeout)
	defer cancel()
	ch := make(chan result, 1)
	go func() {
		v, err := f()
		ch <- result{v, err}
	}()
	select {
	case r := <-ch:
		return r.v, r.err
	case <-ctx.Done():
		var zero T
		return zero, errors.New("the file system it lies in does not answer")
	}
}
