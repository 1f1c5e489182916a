package fdstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockSuffix    = ".lock"
	socketMode    = 0o600
	maxSocketPath = 107 // unix(7): sun_path without its final NUL
	maxStarts     = 3   // of a holder, in one openHolder
	retryInterval = 20 * time.Millisecond
	// backlog is that of the socket. One daemon connects at a time.
	backlog = 16
)

var (
	// errEnding means that the holder was ending when the daemon connected.
	errEnding = errors.New("holder ended while the daemon connected")
	// errLost means that the connection to the holder failed. An entry may be kept or not.
	errLost = errors.New("connection to the holder lost")
)

// A holderConn is a connection to a holder. Only awaitEnd may be called concurrently with the other
// methods.
type holderConn struct {
	kept    // the entries of the holder when the daemon connected
	socket  string
	timeout time.Duration
	conn    *net.UnixConn
	watched *os.File // a duplicate of conn, for awaitEnd
	err     error    // why conn can not be used any more
}

// openHolder connects to the holder, and starts it if none runs.
func openHolder(cfg Config) (*holderConn, error) {
	deadline := time.Now().Add(cfg.timeout())
	for starts := 0; ; {
		h, err := connectHolder(cfg)
		switch {
		case err == nil:
			return h, nil
		case isAbsent(err):
			if starts == maxStarts {
				return nil, fmt.Errorf("holder ends at its start: %w", err)
			}
			started, startErr := startHolder(cfg)
			if startErr != nil {
				return nil, fmt.Errorf("start holder %s: %w", cfg.Socket, startErr)
			}
			if started {
				starts++
				continue
			}
		default:
			return nil, err
		}
		if time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(retryInterval) // the holder is starting or ending
	}
}

// isAbsent reports whether err of connectHolder means that no holder runs.
func isAbsent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, errEnding)
}

// connectHolder connects to a holder that runs, and gets its entries.
func connectHolder(cfg Config) (*holderConn, error) {
	if !filepath.IsAbs(cfg.Socket) || len(cfg.Socket) > maxSocketPath {
		return nil, fmt.Errorf("holder %q: want an absolute path of at most %d bytes", cfg.Socket, maxSocketPath)
	}
	d := net.Dialer{Timeout: cfg.timeout()}
	conn, err := d.Dial("unixpacket", cfg.Socket)
	if err != nil {
		return nil, fmt.Errorf("holder: %w", err)
	}
	c := &holderConn{socket: cfg.Socket, timeout: cfg.timeout(), conn: conn.(*net.UnixConn)}
	if c.watched, err = c.conn.File(); err == nil {
		err = c.greet()
	}
	if err != nil {
		c.closeFiles()
		c.close()
		return nil, fmt.Errorf("holder %s: %w", c.socket, err)
	}
	return c, nil
}

// greet checks the holder and lists its entries.
func (c *holderConn) greet() error {
	cred, err := peer(c.conn)
	if err != nil {
		return err
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("socket belongs to a process of uid %d; remove the socket", cred.Uid)
	}
	err = c.reply(nil)
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("%w: %w", errEnding, err)
	} else if err != nil {
		return err
	}
	return c.call(opList, "", -1, func(name string, fd int) {
		c.adopt(Entry{Name: name, File: os.NewFile(uintptr(fd), name)})
	})
}

// awaitEnd returns when the holder has closed the connection, which its process does at its end,
// or after close.
func (c *holderConn) awaitEnd() {
	if raw, err := c.watched.SyscallConn(); err == nil {
		_ = raw.Read(func(uintptr) bool { return hungUp(c.watched, 0) })
	}
}

// close ends the connection. The holder notices the end at once, also while awaitEnd has a
// duplicate.
func (c *holderConn) close() {
	_ = withFD(c.conn, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_RDWR) })
	c.conn.Close()
	c.watched.Close()
}

// call sends a request and waits until the holder completes it. After errLost the state of the
// holder is unknown, and no further call is possible.
func (c *holderConn) call(op byte, name string, fd int, entry func(string, int)) error {
	if c.err != nil {
		return c.err
	}
	_ = c.conn.SetDeadline(time.Now().Add(c.timeout))
	err := send(c.conn, op, name, fd)
	if err == nil {
		err = c.reply(entry)
	}
	var refused *refusedError
	if err == nil || errors.As(err, &refused) && refused.usable() {
		return err
	}
	c.err = fmt.Errorf("%w: %w", errLost, err)
	return c.err
}

// reply receives the reply to a request, and calls entry for each entry in it.
func (c *holderConn) reply(entry func(string, int)) error {
	for {
		_ = c.conn.SetDeadline(time.Now().Add(c.timeout))
		b, fds, err := receive(c.conn)
		switch {
		case err != nil:
			return err
		case len(b) < headerBytes:
			closeAll(fds)
			return invalid("reply of %d bytes", len(b))
		case b[0] != protocolVersion:
			closeAll(fds)
			return fmt.Errorf("holder uses version %d of the protocol, want %d; end the holder", b[0], protocolVersion)
		case b[1] == statusEntry && entry != nil && len(fds) == 1:
			entry(string(b[headerBytes:]), fds[0])
			continue
		}
		closeAll(fds)
		if b[1] == statusOK {
			return nil
		}
		return &refusedError{status: b[1], text: string(b[headerBytes:])}
	}
}

// A refusedError is an error that the holder returned.
type refusedError struct {
	status byte
	text   string
}

// usable reports whether the connection can be used after the error.
func (e *refusedError) usable() bool { return e.Unwrap() != nil || e.status == statusFailed }

func (e *refusedError) Error() string {
	switch e.status {
	case statusBusy:
		return fmt.Sprintf("%v: pid %s; stop that daemon", ErrBusy, e.text)
	case statusFull, statusDuplicate:
		return fmt.Sprintf("%v: %s", e.Unwrap(), e.text)
	}
	return e.text
}

func (e *refusedError) Unwrap() error {
	switch e.status {
	case statusBusy:
		return ErrBusy
	case statusFull:
		return ErrFull
	case statusDuplicate:
		return ErrDuplicate
	case statusDenied:
		return os.ErrPermission
	}
	return nil
}

// startHolder replaces a socket whose holder has ended, and starts a holder that listens on the new
// socket. It returns false if another process holds the lock: a holder that starts or ends, or a
// daemon in this function.
func startHolder(cfg Config) (bool, error) {
	if len(cfg.Command) == 0 {
		return false, errors.New("no command")
	}
	// The lock file is never removed: a lock on a file without a name would not keep others away.
	lock, err := os.OpenFile(cfg.Socket+lockSuffix, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, socketMode)
	if err != nil {
		return false, err
	}
	defer lock.Close() // the holder keeps the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == unix.EWOULDBLOCK {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	listener, err := listen(cfg.Socket)
	if err != nil {
		return false, err
	}
	defer listener.Close()
	ctx, cancel := context.WithTimeout(context.Background(), cfg.timeout())
	defer cancel()
	cmd := exec.CommandContext(ctx, cfg.Command[0], cfg.Command[1:]...)
	cmd.Dir = "/"
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{listener, lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Run(); err != nil { // it starts the holder and exits
		os.Remove(cfg.Socket)
		return false, err
	}
	return true, nil
}

// listen returns a listening socket. The caller has the lock.
func listen(path string) (*os.File, error) {
	fi, err := os.Lstat(path)
	switch {
	case err == nil && fi.Mode()&os.ModeSocket == 0:
		return nil, fmt.Errorf("%s is not a socket; remove the file", path)
	case err == nil:
		err = os.Remove(path)
	case errors.Is(err, os.ErrNotExist):
		err = nil
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	// On Linux, the mode of the socket before bind is that of its file, so that no other user can
	// connect at any time.
	err = os.NewSyscallError("fchmod", unix.Fchmod(fd, socketMode))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	}
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, backlog))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
