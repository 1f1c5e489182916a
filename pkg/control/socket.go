package control

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	socketMode    = 0o600
	socketDirMode = 0o755
	freshSuffix   = ".new"
	maxSocketPath = 107 - len(freshSuffix) // unix(7): sun_path without its final NUL
	lockTries     = 10
	probeTimeout  = 2 * time.Second
)

// A Listener is the listener of the control API and the lock beside it, which says that a
// daemon lives. The kernel drops the lock with its holder, so a socket without a lock was left by a
// dead daemon.
type Listener struct {
	net.Listener
	path string
	lock *os.File
	once sync.Once
}

// Listen takes the socket at path. A second daemon is refused with the pid of the first.
func Listen(path string) (*Listener, error) {
	if len(path) > maxSocketPath {
		return nil, Errorf(CodeUsage, "control socket %s: a socket's path has at most %d octets", path, maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), socketDirMode); err != nil {
		return nil, socketError(path, err)
	}
	lock, err := lockFor(path)
	if err != nil {
		return nil, err
	}
	l, err := bindFresh(path)
	if err != nil {
		os.Remove(lock.Name())
		lock.Close()
		return nil, err
	}
	return &Listener{Listener: l, path: path, lock: lock}, nil
}

// lockFor takes the lock file. Its last holder may have removed it meanwhile: then the lock is
// worth nothing, and is taken anew.
func lockFor(path string) (*os.File, error) {
	for range lockTries {
		f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, socketMode)
		if err != nil {
			return nil, socketError(path, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			pid, _ := io.ReadAll(io.LimitReader(f, 32))
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, Errorf(CodeSystem,
					"control socket %s: a daemon runs there already (pid %s); stop it, or choose another --control-socket",
					path, strings.TrimSpace(string(pid)))
			}
			return nil, Errorf(CodeSystem, "control socket %s: locking %s.lock: %w", path, path, err)
		}
		if !isNamed(f) {
			f.Close()
			continue
		}
		if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintln(os.Getpid()))); err != nil {
			f.Close()
			return nil, Errorf(CodeSystem, "control socket %s: writing its lock: %w", path, err)
		}
		return f, nil
	}
	return nil, Errorf(CodeSystem, "control socket %s: other daemons start and stop there; try again", path)
}

// socketError says what to do about a socket that cannot be made at path.
func socketError(path string, err error) error {
	if errors.Is(err, os.ErrPermission) {
		return Errorf(CodePermission, "control socket %s: %w; run as root, or choose another --control-socket", path,
			err)
	}
	return Errorf(CodeSystem, "control socket %s: %w; choose another --control-socket", path, err)
}

// isNamed tells whether f is still the file of its name.
func isNamed(f *os.File) bool {
	open, err1 := f.Stat()
	named, err2 := os.Stat(f.Name())
	return err1 == nil && err2 == nil && os.SameFile(open, named)
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}

// bindFresh listens at path in place of a socket that nobody listens on. The socket gets its mode
// before it gets its name.
func bindFresh(path string) (net.Listener, error) {
	fi, err := os.Lstat(path)
	switch {
	case err == nil && fi.Mode()&os.ModeSocket == 0:
		return nil, Errorf(CodeSystem, "control socket %s: a file that is no socket is in the way; remove it, or choose another --control-socket", path)
	case err == nil:
		conn, err := net.DialTimeout("unix", path, probeTimeout)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
			return nil, Errorf(CodeSystem,
				"control socket %s: another program listens there; choose another --control-socket", path)
		}
	case !errors.Is(err, os.ErrNotExist):
		return nil, Errorf(CodeSystem, "control socket %s: %w", path, err)
	}
	fresh := path + freshSuffix
	_ = os.Remove(fresh)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return nil, socketError(path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(fresh, socketMode), os.Rename(fresh, path)); err != nil {
		l.Close()
		os.Remove(fresh)
		return nil, Errorf(CodeSystem, "control socket %s: %w", path, err)
	}
	return l, nil
}

// Close stops listening and removes the socket. Idempotent.
func (s *Listener) Close() error {
	var err error
	s.once.Do(func() {
		err = s.Listener.Close()
		if rmErr := os.Remove(s.path); rmErr != nil && !errors.Is(rmErr, os.ErrNotExist) {
			err = errors.Join(err, rmErr)
		}
	})
	return err
}

// Release ends the claim on the path. Another daemon may start from here on.
func (s *Listener) Release() {
	os.Remove(s.lock.Name())
	s.lock.Close()
}
