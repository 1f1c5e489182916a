package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
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

// A Listener listens on the control socket and holds the lock file beside it. The kernel releases
// the lock when its daemon ends. So a socket without a locked file belongs to a daemon that was
// killed, and the next daemon replaces it.
type Listener struct {
	net.Listener
	path  string
	lock  *os.File
	once  sync.Once
	conns connCounts
}

// Listen creates the socket at path. Root, the user of this process and the members of readers can
// connect. If a daemon listens there, the error has its pid.
func Listen(path string, readers Group) (*Listener, error) {
	if len(path) > maxSocketPath {
		return nil, Errorf(CodeUsage, "control socket %s: path longer than %d bytes; "+
			"choose another --control-socket", path, maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), socketDirMode); err != nil {
		return nil, socketError(path, err)
	}
	if err := checkDirectory(filepath.Dir(path)); err != nil {
		return nil, Errorf(CodeUsage, "control socket %s: %w; choose another --control-socket", path, err)
	}
	lock, err := lockFor(path)
	if err != nil {
		return nil, err
	}
	l, err := bindFresh(path, readers)
	if err != nil {
		os.Remove(lock.Name())
		lock.Close()
		return nil, err
	}
	return &Listener{Listener: l, path: path, lock: lock}, nil
}

// checkDirectory returns an error if other users can create or replace files in dir. Such a user
// could take the names of the daemon before it starts, or answer its clients.
func checkDirectory(dir string) error {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	for parent := false; ; parent = true {
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return fmt.Errorf("directory %s: %w", dir, err)
		}
		// In a sticky directory, other users cannot replace the next directory of the path.
		shared := st.Mode&unix.S_IWOTH != 0 || st.Mode&unix.S_IWGRP != 0 && st.Gid != 0 && int(st.Gid) != os.Getegid()
		switch {
		case st.Uid != 0 && int(st.Uid) != os.Geteuid():
			return fmt.Errorf("directory %s belongs to uid %d", dir, st.Uid)
		case shared && !(parent && st.Mode&unix.S_ISVTX != 0):
			return fmt.Errorf("directory %s is writable by other users", dir)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// lockFor locks the lock file of path. The last holder may remove the file between open and flock.
// lockFor then locks a new file.
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
					"control socket %s: in use by the daemon with pid %s; stop it, or choose another --control-socket",
					path, strings.TrimSpace(string(pid)))
			}
			return nil, Errorf(CodeSystem, "control socket %s: lock %s.lock: %w", path, path, err)
		}
		if !isNamed(f) {
			f.Close()
			continue
		}
		if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintln(os.Getpid()))); err != nil {
			f.Close()
			return nil, Errorf(CodeSystem, "control socket %s: write lock file: %w", path, err)
		}
		return f, nil
	}
	return nil, Errorf(CodeSystem, "control socket %s: lock file changed %d times; try again", path, lockTries)
}

// socketError adds advice to an error that creates the socket at path.
func socketError(path string, err error) error {
	if errors.Is(err, os.ErrPermission) {
		return Errorf(CodePermission, "control socket %s: %w; run as root, or choose another --control-socket", path,
			err)
	}
	return Errorf(CodeSystem, "control socket %s: %w; choose another --control-socket", path, err)
}

// isNamed reports whether the name of f still refers to f.
func isNamed(f *os.File) bool {
	open, err1 := f.Stat()
	named, err2 := os.Stat(f.Name())
	return err1 == nil && err2 == nil && os.SameFile(open, named)
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}

// bindFresh listens at path and replaces a socket that has no listener. The mode and the ACL of the
// socket are complete before bindFresh renames it to path.
func bindFresh(path string, readers Group) (net.Listener, error) {
	fi, err := os.Lstat(path)
	switch {
	case err == nil && fi.Mode()&os.ModeSocket == 0:
		return nil, Errorf(CodeSystem, "control socket %s: not a socket; remove the file, "+
			"or choose another --control-socket", path)
	case err == nil:
		conn, err := net.DialTimeout("unix", path, probeTimeout)
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
			return nil, Errorf(CodeSystem,
				"control socket %s: in use by another program; choose another --control-socket", path)
		}
	case !errors.Is(err, os.ErrNotExist):
		return nil, Errorf(CodeSystem, "control socket %s: %w", path, err)
	}
	fresh := path + freshSuffix
	_ = os.Remove(fresh)
	l, err := ListenPrivate(fresh)
	if err != nil {
		return nil, socketError(path, err)
	}
	l.SetUnlinkOnClose(false)
	err = readers.admit(fresh)
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		l.Close()
		os.Remove(fresh)
		if CodeOf(err) == "" {
			err = Errorf(CodeSystem, "control socket %s: %w", path, err)
		}
		return nil, err
	}
	return l, nil
}

// ListenPrivate listens at path, where no file may exist. Only root and the user of this process
// can connect. The socket never has another mode than socketMode: bind(2) makes the file with the
// mode that fchmod(2) gave the unbound socket.
func ListenPrivate(path string) (*net.UnixListener, error) {
	private := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		ctlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), socketMode) })
		return errors.Join(ctlErr, err)
	}}
	l, err := private.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// Close stops listening and removes the socket. Further calls do nothing.
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

// Release releases the lock. Then another daemon may listen on the path.
func (s *Listener) Release() {
	os.Remove(s.lock.Name())
	s.lock.Close()
}
