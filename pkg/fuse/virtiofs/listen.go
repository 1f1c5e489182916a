package virtiofs

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	socketMode    = 0o600
	maxSocketPath = 107 // unix(7): sun_path without its final NUL
	probeTimeout  = 2 * time.Second
	backlog       = 4
)

// A listener is a listening Unix socket.
type listener struct {
	*net.UnixListener
	path     string
	dev, ino uint64 // of the socket as it was made
}

// listen makes a socket at path with mode 0600. It replaces a socket that no process listens on,
// and no other file.
func listen(path string) (*listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket %s: path longer than %d bytes; choose another path", path, maxSocketPath)
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	l, err := bind(path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s: %w", path, os.NewSyscallError("lstat", err))
	}
	return &listener{l, path, st.Dev, st.Ino}, nil
}

// listenerOf returns the listener of an earlier process. It takes over fd.
func listenerOf(fd int, path string, dev, ino uint64) (*listener, error) {
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // FileListener duplicates it
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, fmt.Errorf("socket %s: kept descriptor of %s", path, l.Addr().Network())
	}
	u.SetUnlinkOnClose(false)
	return &listener{u, path, dev, ino}, nil
}

// isThere reports whether the path has the socket.
func (l *listener) isThere() bool {
	var st unix.Stat_t
	return unix.Lstat(l.path, &st) == nil && st.Dev == l.dev && st.Ino == l.ino
}

// removeStale removes a socket that no process listens on.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket %s: %w", path, err)
	case fi.Mode()&os.ModeSocket == 0:
		return fmt.Errorf("socket %s: the file exists and is not a socket; remove it, or choose another path", path)
	}
	conn, err := net.DialTimeout("unix", path, probeTimeout)
	if err == nil {
		conn.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("socket %s: in use by another process; end that process, or choose another path", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	return nil
}

// bind makes the socket. fchmod(2) before bind(2) sets the mode of the file that bind(2) makes, so
// that no other user can connect at any time.
func bind(path string) (*net.UnixListener, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // FileListener duplicates it
	if err := unix.Fchmod(fd, socketMode); err != nil {
		return nil, os.NewSyscallError("fchmod", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		_ = os.Remove(path)
		return nil, os.NewSyscallError("listen", err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		_ = os.Remove(path)
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// Close stops listening and removes the socket, unless another process has replaced it. Further
// calls do nothing.
func (l *listener) Close() error {
	err := l.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	if l.isThere() {
		err = errors.Join(err, os.Remove(l.path))
	}
	return err
}
