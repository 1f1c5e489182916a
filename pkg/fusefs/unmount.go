package fusefs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// An ending says how far we have taken a mount down.
type ending uint8

const (
	standing  ending = iota
	detached         // out of the tree; processes may still have files of it open
	unmounted        // out of the tree and, in this mount namespace, out of use
	// out of the tree with its connection ended: the kernel may give its device number to another
	// file system
	gone
)

// copyGrace is how long an unmount waits for the kernel to end the connection, which it does at
// once unless another mount namespace (a container's, a service's) holds a copy of the mount.
const copyGrace = 2 * time.Second

// Unmount unmounts and waits for the last request. It returns EBUSY while files are open, also when
// someone else has taken the mount out of the tree, and when another file system is mounted over
// it. Copies of the mount in other mount namespaces end with it. After success nothing of ours is
// mounted on Dir; what others mounted there stays.
func (s *Server) Unmount() error {
	how, err := s.umount(0)
	if err != nil {
		return err
	}
	select {
	case <-s.done:
		return nil
	case <-time.After(copyGrace):
	}
	if how < unmounted {
		return fmt.Errorf("umount %s: the mount is out of the tree, and processes still have files of it open: %w",
			s.dir, syscall.EBUSY)
	}
	s.abortConnection()
	<-s.done
	return nil
}

// UnmountLazy takes the mount out of the tree at once; it ends when its last file is closed (see
// Wait).
func (s *Server) UnmountLazy() error {
	_, err := s.umount(unix.MNT_DETACH)
	return err
}

// ForceUnmount unmounts whatever is going on: calls under way end with an error, and data that is
// not written is lost. It asks the server nothing and does not wait for it. An error says that the
// mount point could not be freed; the connection is ended then, too.
func (s *Server) ForceUnmount() error {
	s.fs.Abort()
	_, err := s.umount(unix.MNT_DETACH)
	s.abortConnection()
	<-s.done
	return err
}

// umount takes the mount out of the tree, if it is there. A connection that is dead already leaves
// nothing to be lost or waited for.
func (s *Server) umount(flags int) (ending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dead := s.device.dead()
	if dead {
		flags = unix.MNT_DETACH
	}
	there, err := s.topmost()
	if err == nil && there {
		err = s.detach(flags)
	}
	switch {
	case err != nil:
	case dead:
		s.ended = gone
	case there && flags&unix.MNT_DETACH == 0:
		s.ended = unmounted
	default:
		s.ended = max(s.ended, detached)
	}
	return s.ended, err
}

// detachTries bounds how often umount(2) may answer that nothing is mounted where something is.
const detachTries = 16

// detach makes umount(2) calls until nothing of ours is at the mount point. Called with mu held, or
// before anybody has s.
func (s *Server) detach(flags int) error {
	for try := 0; ; try++ {
		there, err := s.topmost()
		if err != nil || !there {
			return err
		}
		if flags&unix.MNT_DETACH != 0 {
			err = s.detachTop()
		} else {
			err = unix.Unmount(s.dir, flags|unix.UMOUNT_NOFOLLOW)
		}
		faster := errors.Is(err, unix.EINVAL) && try < detachTries // someone else was
		if err != nil && !faster {
			return fmt.Errorf("umount %s: %w", s.dir, err)
		}
	}
}

// topmost tells whether what is seen at the mount point is ours. That ours is there below something
// else is an error.
func (s *Server) topmost() (bool, error) {
	if s.ended == gone {
		return false, nil
	}
	there, err := mountedAt(s.dir, s.dev)
	if err != nil {
		return false, fmt.Errorf("umount %s: see what is mounted there: %w", s.dir, err)
	}
	if !there {
		return false, nil
	}
	if dev, err := deviceAt(unix.AT_FDCWD, s.dir); err != nil || dev != s.dev {
		return false, fmt.Errorf("umount %s: another file system is mounted over it; unmount that first: %w", s.dir,
			syscall.EBUSY)
	}
	return true, nil
}

// detachTop detaches what is at the mount point if it is ours, and nothing that comes there at the
// same time: a descriptor stays with what it was opened on. It would keep a mount busy, so that
// only a lazy umount(2) can be made through it.
func (s *Server) detachTop() error {
	fd, err := unix.Open(s.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if dev, err := deviceAt(fd, ""); err != nil || dev != s.dev {
		return err
	}
	return unix.Unmount("/proc/self/fd/"+strconv.Itoa(fd), unix.MNT_DETACH)
}

// connectionsDir is where the kernel's control file system usually is.
const connectionsDir = "/sys/fs/fuse/connections"

// abortConnection has the kernel drop the requests it has, so that processes which hold files of
// the mount open get on.
func (s *Server) abortConnection() {
	if s.device.dead() {
		return // its number may be another's by now
	}
	name := filepath.Join(strconv.FormatUint(uint64(s.dev.minor), 10), "abort")
	if os.WriteFile(filepath.Join(connectionsDir, name), []byte("1"), 0) == nil {
		return
	}
	// The control file system is not mounted everywhere: look at it for a moment.
	dir, err := os.MkdirTemp("", "nfsrdmad-fusectl")
	if err != nil {
		return
	}
	defer os.Remove(dir)
	if unix.Mount("fusectl", dir, "fusectl", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "") != nil {
		return
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_ = os.WriteFile(filepath.Join(dir, name), []byte("1"), 0)
}

// Wait returns when the mount is gone, by whatever hand.
func (s *Server) Wait() { <-s.done }

// WaitContext is Wait bounded by ctx.
func (s *Server) WaitContext(ctx context.Context) error {
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
