package mountpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// A Point is an open directory to mount on. New checks and uses the directory through one
// descriptor, so that no user can replace its path by a symbolic link to another directory in
// between. A Point keeps the file system of the directory busy until Close.
type Point struct {
	fd   int
	path string // without symbolic links, as in the kernel's mount table
}

// Open opens a directory. Open follows symbolic links, as mount(8) does. It
// sends no request to a file system that is mounted there.
func Open(dir string) (*Point, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(abs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: abs, Err: err}
	}
	p := &Point{fd: fd}
	if p.path, err = os.Readlink(procFD(fd)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Path returns the absolute path of the directory without symbolic links, at the time of
// Open.
func (p *Point) Path() string { return p.path }

// Close releases the directory. It does not unmount.
func (p *Point) Close() {
	_ = unix.Close(p.fd)
}

// checkPath returns an error if the directory has another path than it had when it was opened. The
// mount would then be listed under a path that the caller did not name.
func (p *Point) checkPath() error {
	switch now, err := os.Readlink(procFD(p.fd)); {
	case err != nil:
		return err
	case now != p.path:
		return fmt.Errorf("directory was moved to %s; try again", now)
	}
	return nil
}

// procFD returns the path of an open descriptor. The path leads to the open object itself, whatever
// its name stands for now (proc_pid_fd(5)).
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Options are options of a mount.
type Options struct {
	// Source is the source shown in /proc/mounts: "host:/export".
	Source string
	// ReadOnly makes the mount read-only.
	ReadOnly bool
	// Suid allows set-user-ID and set-group-ID programs on the mount, and Dev allows device files.
	// NoExec forbids running programs from the mount.
	Suid, Dev, NoExec bool
	// NoAtime, NoDirAtime and StrictAtime are the flags of mount(8) with these names. The server
	// updates access times, so they only change what mount tables show.
	NoAtime, NoDirAtime, StrictAtime bool
}

// A mountFlag is a mount flag in both of the kernel's interfaces.
type mountFlag struct {
	on   bool
	bit  uintptr // mount(2)
	attr int     // fsmount(2)
}

func (o *Options) flags() (bits uintptr, attrs int) {
	for _, f := range []mountFlag{
		{!o.Suid, unix.MS_NOSUID, unix.MOUNT_ATTR_NOSUID},
		{!o.Dev, unix.MS_NODEV, unix.MOUNT_ATTR_NODEV},
		{o.NoExec, unix.MS_NOEXEC, unix.MOUNT_ATTR_NOEXEC},
		{o.ReadOnly, unix.MS_RDONLY, unix.MOUNT_ATTR_RDONLY},
		{o.NoAtime, unix.MS_NOATIME, unix.MOUNT_ATTR_NOATIME},
		{o.NoDirAtime, unix.MS_NODIRATIME, unix.MOUNT_ATTR_NODIRATIME},
		{o.StrictAtime, unix.MS_STRICTATIME, unix.MOUNT_ATTR_STRICTATIME},
	} {
		if f.on {
			bits, attrs = bits|f.bit, attrs|f.attr
		}
	}
	return bits, attrs
}

// mountSettings returns the options of the FUSE file system in the order of mount(2). fd is a
// descriptor of /dev/fuse.
func mountSettings(fd, maxRead int) [][2]string {
	// Without default_permissions nothing would protect FIFOs, sockets and device files: opening
	// one sends no request.
	return [][2]string{{"fd", strconv.Itoa(fd)}, {"rootmode", strconv.FormatUint(unix.S_IFDIR, 8)},
		{"user_id", strconv.Itoa(os.Geteuid())}, {"group_id", strconv.Itoa(os.Getegid())},
		{"max_read", strconv.Itoa(maxRead)}, {"default_permissions", ""}, {"allow_other", ""}}
}

// mount mounts the file system of fd, a descriptor of /dev/fuse, on p and returns its device
// number. Kernels and containers without fsopen(2) get mount(2) on the descriptor of p.
func (p *Point) mount(fd int, opts *Options, maxRead int) (Device, error) {
	if err := p.checkPath(); err != nil {
		return Device{}, err
	}
	source := opts.Source
	if source == "" {
		source = Subtype
	}
	dev, err := p.mountNew(fd, opts, source, maxRead)
	if errors.Is(err, errNoFsopen) {
		return p.mountOld(fd, opts, source, maxRead)
	}
	return dev, err
}

// errNoFsopen is the error of a kernel without fsopen(2).
var errNoFsopen = errors.New("fsopen not supported")

// mountNew is mount with fsopen(2).
func (p *Point) mountNew(fd int, opts *Options, source string, maxRead int) (Device, error) {
	fsfd, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM): // EPERM: a system call filter, or no privilege
		return Device{}, errNoFsopen
	case err != nil:
		return Device{}, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fsfd)
	for _, s := range append(mountSettings(fd, maxRead), [2]string{"source", source}, [2]string{"subtype", Subtype}) {
		if s[1] == "" {
			err = unix.FsconfigSetFlag(fsfd, s[0])
		} else {
			err = unix.FsconfigSetString(fsfd, s[0], s[1])
		}
		if err != nil {
			return Device{}, fmt.Errorf("fsconfig %s: %w", s[0], err)
		}
	}
	if opts.ReadOnly {
		if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
			return Device{}, fmt.Errorf("fsconfig ro: %w", err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return Device{}, os.NewSyscallError("fsconfig", err)
	}
	_, attrs := opts.flags()
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return Device{}, os.NewSyscallError("fsmount", err)
	}
	defer unix.Close(mfd)
	dev, err := deviceAt(mfd, "")
	if err != nil {
		return Device{}, err
	}
	const both = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	return dev, os.NewSyscallError("move_mount", unix.MoveMount(mfd, "", p.fd, "", both))
}

// mountOld is mount with mount(2).
func (p *Point) mountOld(fd int, opts *Options, source string, maxRead int) (Device, error) {
	data := ""
	for i, s := range mountSettings(fd, maxRead) {
		if i > 0 {
			data += ","
		}
		data += s[0]
		if s[1] != "" {
			data += "=" + s[1]
		}
	}
	bits, _ := opts.flags()
	if err := unix.Mount(source, procFD(p.fd), FSType, bits, data); err != nil {
		return Device{}, os.NewSyscallError("mount", err)
	}
	parent, name, err := p.parent()
	if err != nil {
		return Device{}, err
	}
	defer unix.Close(parent)
	return deviceAt(parent, name)
}

// parent opens the parent directory of a directory on which something is mounted. The name in the
// parent leads to the mount; the descriptor of p leads to the directory below the mount. The
// directory cannot be renamed while something is mounted on it.
func (p *Point) parent() (fd int, name string, err error) {
	path, err := os.Readlink(procFD(p.fd))
	if err != nil {
		return 0, "", err
	}
	fd, err = unix.Openat(p.fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	return fd, filepath.Base(path), os.NewSyscallError("openat", err)
}

// detach unmounts the file system dev from p lazily.
func (p *Point) detach(dev Device) error {
	parent, name, err := p.parent()
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	return umountAt(parent, name, dev, unix.MNT_DETACH)
}

// umountAt unmounts the file system dev from the directory name of an open directory. A symbolic
// link in the path of the open directory cannot lead umountAt to another mount.
func umountAt(parent int, name string, dev Device, flags int) error {
	if there, err := deviceAt(parent, name); err != nil || there != dev {
		return errors.Join(unix.EINVAL, err)
	}
	return unix.Unmount(filepath.Join(procFD(parent), name), flags|unix.UMOUNT_NOFOLLOW)
}
