package mount

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moby/sys/mountinfo"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/mountpoint"
)

const (
	fuseDevice = "/dev/fuse"
	// Device numbers, from Documentation/admin-guide/devices.txt of Linux.
	fuseMajor, fuseMinor = 10, 229

	autofsType = "autofs"
	// pathTimeout bounds the access to a mount point, which may be in a file system that hangs.
	pathTimeout = control.StatusTimeout - time.Second
)

// FSType is the type of the mounts of a daemon in the mount table.
const FSType = mountpoint.FSType

// CheckPrivilege returns an error if this process cannot mount: if it lacks CAP_SYS_ADMIN or
// /dev/fuse.
func CheckPrivilege() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return control.Errorf(control.CodeSystem, "read capabilities of this process: %w", err)
	}
	if data[0].Effective&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return control.Errorf(control.CodePermission,
			"no privilege to mount: CAP_SYS_ADMIN is missing; run as root, "+
				"or add the capability to the container or unit")
	}
	f, err := os.OpenFile(fuseDevice, os.O_RDWR, 0)
	switch {
	case err == nil:
		defer f.Close()
		return checkFuseDevice(f)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return control.Errorf(control.CodeSystem,
			"open %s: %w; load the module with \"modprobe fuse\", or add the device to the container",
			fuseDevice, unwrapPath(err))
	case errors.Is(err, fs.ErrPermission):
		return control.Errorf(control.CodePermission, "open %s: %w; run as root, or add the device to the container",
			fuseDevice,
			unwrapPath(err))
	}
	return control.Errorf(control.CodeSystem, "open %s: %w", fuseDevice, unwrapPath(err))
}

// checkFuseDevice returns an error if f is not the FUSE device. Some containers have another
// device, such as the null device, under its name.
func checkFuseDevice(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return control.Errorf(control.CodeSystem, "stat %s: %w", fuseDevice, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != fuseMajor || unix.Minor(st.Rdev) != fuseMinor {
		return control.Errorf(control.CodeSystem,
			"%s: not the FUSE device (character device %d:%d); add the device to the container, "+
				"or create it with mknod(1)", fuseDevice, fuseMajor, fuseMinor)
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

// mountedError returns an error if a file system is mounted at dir. Its type is fsType, or "" for
// none.
func mountedError(dir, fsType string) error {
	switch fsType {
	case "":
		return nil
	case FSType:
		return control.Errorf(control.CodeMount, "mount point %s: already an nfsrdma mount; unmount it first, "+
			"with umount(8) if its daemon was killed", dir)
	case autofsType: // while it is mounted, only the process group of the automounter can open it
		return control.Errorf(control.CodeMount, "mount point %s: managed by autofs, and the client did not open it; "+
			"use a client and a daemon of one version", dir)
	}
	return control.Errorf(control.CodeMount, "mount point %s: already a mount of type %s; unmount it first", dir,
		fsType)
}

// OpenAutomount opens dir for [control.MountRequest] if autofs is mounted there, and returns nil
// otherwise. autofs lets the process group of the automounter pass; systemd starts mount(8) in this
// group. Other processes wait at dir until the automounter has mounted it. The caller closes the
// file.
func OpenAutomount(ctx context.Context, dir string) (*os.File, error) {
	clean, err := ResolveMountPoint(ctx, dir)
	if err != nil {
		return nil, nil // CheckMountPoint returns the error
	}
	if fsType, err := mountedAt(clean); err != nil || fsType != autofsType {
		return nil, err
	}
	// Without O_DIRECTORY, because that would start a mount.
	f, err := bounded(ctx, func() (*os.File, error) { return os.OpenFile(clean, unix.O_PATH|unix.O_CLOEXEC, 0) },
		func(f *os.File) { f.Close() })
	if err != nil {
		return nil, control.Errorf(control.CodeMount, "mount point %s: managed by autofs: %w", clean, unwrapPath(err))
	}
	return f, nil
}

// CheckMountPoint opens r.Dir as a mount point, and returns an error if nothing can be mounted
// there. The caller closes the result. CheckMountPoint does not access a file system that is
// mounted at the directory, which may hang. If autofs is mounted there, CheckMountPoint uses
// r.DirFD.
func CheckMountPoint(ctx context.Context, r control.MountRequest) (*mountpoint.Point, error) {
	clean, err := ResolveMountPoint(ctx, r.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &control.Error{Code: control.CodeMount, Err: err, Text: err.Error() + "; create it with mkdir -p"}
	case err != nil:
		return nil, err
	}
	fsType, err := mountedAt(clean)
	if err != nil {
		return nil, err
	}
	path := clean
	if fsType == autofsType && r.DirFD > 0 && r.Process > 0 {
		// The path of the descriptor leads to the directory and does not pass autofs.
		path = fmt.Sprintf("/proc/%d/fd/%d", r.Process, r.DirFD)
	} else if err := mountedError(clean, fsType); err != nil {
		return nil, err
	}
	p, err := bounded(ctx, func() (*mountpoint.Point, error) { return mountpoint.Open(path) },
		(*mountpoint.Point).Close)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, control.Errorf(control.CodeMount, "mount point %s does not exist; create it with mkdir", clean)
	case errors.Is(err, unix.ENOTDIR):
		return nil, control.Errorf(control.CodeMount, "mount point %s is not a directory; name a directory", clean)
	case err != nil:
		return nil, control.Errorf(control.CodeMount, "mount point %s: %w", clean, unwrapPath(err))
	case p.Path() != clean:
		p.Close()
		return nil, control.Errorf(control.CodeMount, "mount point %s: its path changed during the check; try again",
			clean)
	}
	return p, nil
}

// ResolveMountPoint returns dir as an absolute path without symbolic links. It does not access dir
// if dir is a mount point. If a parent of dir does not exist, the error wraps [fs.ErrNotExist].
func ResolveMountPoint(ctx context.Context, dir string) (string, error) {
	if dir == "" || strings.ContainsRune(dir, 0) {
		return "", control.Errorf(control.CodeUsage, "mount point %q: invalid path; name a directory", dir)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", control.Errorf(control.CodeUsage, "mount point %s: %w", dir, err)
	}
	parent, err := bounded(ctx, func() (string, error) { return filepath.EvalSymlinks(filepath.Dir(abs)) }, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", &control.Error{Code: control.CodeMount, Err: fs.ErrNotExist, Text: "mount point " + abs +
			" does not exist"}
	case err != nil:
		return "", control.Errorf(control.CodeMount, "mount point %s: %w", abs, unwrapPath(err))
	}
	abs = filepath.Join(parent, filepath.Base(abs))
	mounted, err := isMountPoint(abs)
	if err != nil || mounted {
		return abs, err
	}
	fi, err := bounded(ctx, func() (os.FileInfo, error) { return os.Lstat(abs) }, nil)
	if err != nil || fi.Mode()&fs.ModeSymlink == 0 {
		return abs, nil
	}
	target, err := bounded(ctx, func() (string, error) { return filepath.EvalSymlinks(abs) }, nil)
	if err != nil {
		return "", control.Errorf(control.CodeMount, "mount point %s: %w", abs, unwrapPath(err))
	}
	return target, nil
}

// isMountPoint reports whether a file system is mounted at dir. It accesses no file system but
// /proc.
func isMountPoint(dir string) (bool, error) {
	fsType, err := mountedAt(dir)
	return fsType != "", err
}

// mountedAt returns the type of the topmost file system that is mounted at dir, and "" if nothing
// is mounted there. It reads /proc alone, so no file system can block it.
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
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter(FSType))
	if err != nil {
		return nil, control.Errorf(control.CodeSystem, "read mount table: %w", err)
	}
	dirs := make([]string, len(mounts))
	for i, m := range mounts {
		dirs[i] = m.Mountpoint
	}
	return dirs, nil
}

// bounded runs f, which may hang in a file system, for at most pathTimeout. After that time the
// goroutine of f ends when the file system responds; discard, if not nil, then gets the result of
// f.
func bounded[T any](ctx context.Context, f func() (T, error), discard func(T)) (T, error) {
	type result struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeout(ctx, pathTimeout)
	defer cancel()
	ch := make(chan result)
	go func() {
		v, err := f()
		select {
		case ch <- result{v, err}:
		case <-ctx.Done():
			if err == nil && discard != nil {
				discard(v)
			}
		}
	}()
	select {
	case r := <-ch:
		return r.v, r.err
	case <-ctx.Done():
		var zero T
		return zero, errors.New("its file system does not respond")
	}
}
