package vfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A mountState is how far a mount has been taken down.
type mountState uint8

const (
	mounted   mountState = iota
	detached             // not in the directory tree; processes may still have files open
	unmounted            // not in the directory tree and, in this mount namespace, not in use
	// disconnected: not in the directory tree, and the connection has ended. The kernel may reuse
	// the device number.
	disconnected
)

// disconnectTimeout is how long an unmount waits for the kernel to end the connection. The kernel
// ends it at once unless another mount namespace (of a container or service) has a copy of the
// mount.
const disconnectTimeout = 2 * time.Second

// Unmount unmounts the file system and waits for the last request. Unmount returns EBUSY while
// files are open, even if another program has already detached the mount. Unmount also returns
// EBUSY when another file system is mounted over this one. Copies of the mount in other mount
// namespaces end too. After success this file system is not mounted on Dir. Mounts of other
// programs on Dir stay.
func (s *Server) Unmount() error {
	state, err := s.umount(0)
	if err != nil {
		return err
	}
	select {
	case <-s.done:
		return nil
	case <-time.After(disconnectTimeout):
	}
	if state < unmounted {
		return fmt.Errorf("umount %s: %w: the mount is detached but still has open files", s.dir, syscall.EBUSY)
	}
	s.abortConnection()
	<-s.done
	return nil
}

// UnmountLazy detaches the mount at once. The mount ends when its last file is closed (see Wait).
func (s *Server) UnmountLazy() error {
	_, err := s.umount(unix.MNT_DETACH)
	return err
}

// ForceUnmount unmounts even while calls are in flight. The calls fail, and data that is not
// written is lost. ForceUnmount does not wait for the server. An error means that the mount point
// is still in use; the connection has ended nevertheless.
func (s *Server) ForceUnmount() error {
	s.fs.Abort()
	_, err := s.umount(unix.MNT_DETACH)
	s.abortConnection()
	<-s.done
	return err
}

// umount detaches the mount if it is still in the tree. If the kernel has already ended the
// connection, no data can be lost, and umount detaches lazily.
func (s *Server) umount(flags int) (mountState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	disconnectedByKernel := s.device.Disconnected()
	if disconnectedByKernel {
		flags = unix.MNT_DETACH
	}
	there, err := s.isTopMount()
	if err == nil && there {
		err = s.detach(flags)
	}
	switch {
	case err != nil:
	case disconnectedByKernel:
		s.state = disconnected
	case there && flags&unix.MNT_DETACH == 0:
		s.state = unmounted
	default:
		s.state = max(s.state, detached)
	}
	return s.state, err
}

// detachTries bounds the retries after umount(2) returned EINVAL.
const detachTries = 16

// detach calls umount(2) until this file system is not at the mount point. The caller holds mu or
// has the only reference to s.
func (s *Server) detach(flags int) error {
	for try := 0; ; try++ {
		there, err := s.isTopMount()
		if err != nil || !there {
			return err
		}
		if flags&unix.MNT_DETACH != 0 {
			err = s.detachTopMount()
		} else {
			err = s.umountTopMount(flags)
		}
		// EINVAL: another program unmounted this file system first.
		retry := errors.Is(err, unix.EINVAL) && try < detachTries
		if err != nil && !retry {
			return fmt.Errorf("umount %s: %w", s.dir, err)
		}
	}
}

// isTopMount reports whether the visible file system at the mount point is this one. isTopMount
// returns EBUSY when another file system covers this one.
func (s *Server) isTopMount() (bool, error) {
	if s.state == disconnected {
		return false, nil
	}
	there, err := mountedAt(s.dir, s.dev)
	if err != nil {
		return false, fmt.Errorf("umount %s: read mount table: %w", s.dir, err)
	}
	if !there {
		return false, nil
	}
	if dev, err := deviceAt(unix.AT_FDCWD, s.dir); err != nil || dev != s.dev {
		return false, fmt.Errorf("umount %s: %w: another file system is mounted over it; unmount that one first", s.dir,
			syscall.EBUSY)
	}
	return true, nil
}

// detachTopMount detaches the file system at the mount point if it is this one. umount(2) gets a
// descriptor of the mount, so that it cannot detach a file system mounted at the same moment. The
// descriptor keeps the mount busy, so only a lazy umount(2) works.
func (s *Server) detachTopMount() error {
	fd, err := unix.Open(s.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if dev, err := deviceAt(fd, ""); err != nil || dev != s.dev {
		return err
	}
	return unix.Unmount(procFD(fd), unix.MNT_DETACH)
}

// umountTopMount unmounts the file system at the mount point if it is this one. umount(2) gets a
// descriptor of the parent directory: a user who owns a directory in the path could replace it by a
// symbolic link to another mount.
func (s *Server) umountTopMount(flags int) error {
	parent, err := unix.Open(filepath.Dir(s.dir), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	return umountAt(parent, filepath.Base(s.dir), s.dev, flags)
}

// connectionsDir is the usual mount point of the kernel's FUSE control file system.
const connectionsDir = "/sys/fs/fuse/connections"

// abortConnection makes the kernel end all requests, so that processes with open files continue.
func (s *Server) abortConnection() { s.control("abort", "1") }

// control writes a value to a file of the kernel's FUSE control file system.
func (s *Server) control(file, value string) {
	if s.device.Disconnected() {
		return // the device number may belong to another mount now
	}
	name := filepath.Join(strconv.FormatUint(uint64(s.dev.minor), 10), file)
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

// Wait returns when the mount has ended, however it was unmounted.
func (s *Server) Wait() { <-s.done }
