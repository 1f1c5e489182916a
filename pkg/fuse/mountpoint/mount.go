package mountpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// A State is how far a mount has been taken down.
type State uint8

// States of a Mount.
const (
	Mounted   State = iota
	Detached        // not in the directory tree; processes may still have files open
	Unmounted       // not in the directory tree and, in this mount namespace, not in use
	// Disconnected: not in the directory tree, and the connection has ended. The kernel may reuse
	// the device number.
	Disconnected
)

// A Mount is a FUSE file system in the directory tree. It is safe for concurrent use.
type Mount struct {
	dir    string // without symbolic links
	dev    Device
	device *kernel.Device

	mu    sync.Mutex // held during umount(2)
	state State
}

// New mounts a new file system of device on p, which requires CAP_SYS_ADMIN. All users can access the
// mount with their own permissions. maxRead bounds the kernel's READ requests in bytes.
func New(p *Point, device *kernel.Device, opts *Options, maxRead int) (*Mount, error) {
	m := &Mount{dir: p.Path(), device: device}
	var err error
	if closed := device.Use(func(fd int) { m.dev, err = p.mount(fd, opts, maxRead) }); closed != nil {
		err = closed
	}
	if err != nil {
		return nil, err
	}
	switch there, err := MountedAt(m.dir, m.dev); {
	case err != nil:
		_ = p.detach(m.dev)
		return nil, fmt.Errorf("read mount table: %w", err)
	case !there:
		_ = p.detach(m.dev)
		return nil, errors.New("directory was moved during the mount; try again")
	}
	return m, nil
}

// Existing returns the mount of an earlier process.
func Existing(dir string, dev Device, device *kernel.Device) *Mount {
	return &Mount{dir: dir, dev: dev, device: device}
}

// Dir returns the absolute path of the mount point, without symbolic links.
func (m *Mount) Dir() string { return m.dir }

// Device returns the device number of the mounted file system.
func (m *Mount) Device() Device { return m.dev }

// SetReadAhead sets the kernel's read-ahead in bytes. The reply to INIT can only lower it. Where /sys
// is read-only, reads are smaller but correct.
func (m *Mount) SetReadAhead(n int) {
	path := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", m.dev.Major, m.dev.Minor)
	_ = os.WriteFile(path, []byte(strconv.Itoa(n>>10)), 0)
}

// Unmount detaches the mount if it is still in the tree. If the kernel has already ended the
// connection, no data can be lost, and Unmount detaches lazily.
func (m *Mount) Unmount(flags int) (State, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	disconnectedByKernel := m.device.Disconnected()
	if disconnectedByKernel {
		flags = unix.MNT_DETACH
	}
	there, err := m.isTopMount()
	if err == nil && there {
		err = m.detach(flags)
	}
	switch {
	case err != nil:
	case disconnectedByKernel:
		m.state = Disconnected
	case there && flags&unix.MNT_DETACH == 0:
		m.state = Unmounted
	default:
		m.state = max(m.state, Detached)
	}
	return m.state, err
}

// detachTries bounds the retries after umount(2) returned EINVAL.
const detachTries = 16

// detach calls umount(2) until this file system is not at the mount point. The caller holds mu or
// has the only reference to s.
func (m *Mount) detach(flags int) error {
	for try := 0; ; try++ {
		there, err := m.isTopMount()
		if err != nil || !there {
			return err
		}
		if flags&unix.MNT_DETACH != 0 {
			err = m.detachTopMount()
		} else {
			err = m.umountTopMount(flags)
		}
		// EINVAL: another program unmounted this file system first.
		retry := errors.Is(err, unix.EINVAL) && try < detachTries
		if err != nil && !retry {
			return fmt.Errorf("umount %s: %w", m.dir, err)
		}
	}
}

// isTopMount reports whether the visible file system at the mount point is this one. isTopMount
// returns EBUSY when another file system covers this one.
func (m *Mount) isTopMount() (bool, error) {
	if m.state == Disconnected {
		return false, nil
	}
	there, err := MountedAt(m.dir, m.dev)
	if err != nil {
		return false, fmt.Errorf("umount %s: read mount table: %w", m.dir, err)
	}
	if !there {
		return false, nil
	}
	if dev, err := deviceAt(unix.AT_FDCWD, m.dir); err != nil || dev != m.dev {
		return false, fmt.Errorf("umount %s: %w: another file system is mounted over it; unmount that one first", m.dir,
			syscall.EBUSY)
	}
	return true, nil
}

// detachTopMount detaches the file system at the mount point if it is this one. umount(2) gets a
// descriptor of the mount, so that it cannot detach a file system mounted at the same moment. The
// descriptor keeps the mount busy, so only a lazy umount(2) works.
func (m *Mount) detachTopMount() error {
	fd, err := unix.Open(m.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if dev, err := deviceAt(fd, ""); err != nil || dev != m.dev {
		return err
	}
	return unix.Unmount(procFD(fd), unix.MNT_DETACH)
}

// umountTopMount unmounts the file system at the mount point if it is this one. umount(2) gets a
// descriptor of the parent directory: a user who owns a directory in the path could replace it by a
// symbolic link to another mount.
func (m *Mount) umountTopMount(flags int) error {
	parent, err := unix.Open(filepath.Dir(m.dir), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	return umountAt(parent, filepath.Base(m.dir), m.dev, flags)
}

// connectionsDir is the usual mount point of the kernel's FUSE control file system.
const connectionsDir = "/sys/fs/fuse/connections"

// Abort makes the kernel end all requests, so that processes with open files continue.
func (m *Mount) Abort() { m.Control("abort", "1") }

// Control writes a value to a file of the kernel's FUSE control file system.
func (m *Mount) Control(file, value string) {
	if m.device.Disconnected() {
		return // the device number may belong to another mount now
	}
	name := filepath.Join(strconv.FormatUint(uint64(m.dev.Minor), 10), file)
	if os.WriteFile(filepath.Join(connectionsDir, name), []byte(value), 0) == nil {
		return
	}
	// The control file system is not mounted on every host. Mount it temporarily.
	dir, err := os.MkdirTemp("", "nfsrdmad-fusectl")
	if err != nil {
		return
	}
	defer os.Remove(dir)
	if unix.Mount("fusectl", dir, "fusectl", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "") != nil {
		return
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_ = os.WriteFile(filepath.Join(dir, name), []byte(value), 0)
}
