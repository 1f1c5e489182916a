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
	"sync"
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

// errEnding means that the holder was ending when the daemon connected.
var errEnding = errors.New("holder ended while the daemon connected")

// A holderStore is the connection of a daemon to a holder.
type holderStore struct {
	kept
	socket  string
	timeout time.Duration

	mu   sync.Mutex // guards the fields below
	conn *net.UnixConn
	err  error // why conn can not be used any more
}

// Holder opens the store of the holder process at cfg.Socket. It starts the holder if none runs.
func Holder(cfg Config) (Store, error) {
	h, err := openHolder(cfg)
	if err != nil {
		return nil, err
	}
	return h, nil
}

func openHolder(cfg Config) (*holderStore, error) {
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
func connectHolder(cfg Config) (*holderStore, error) {
	if !filepath.IsAbs(cfg.Socket) || len(cfg.Socket) > maxSocketPath {
		return nil, fmt.Errorf("holder %q: want an absolute path of at most %d bytes", cfg.Socket, maxSocketPath)
	}
	d := net.Dialer{Timeout: cfg.timeout()}
	c, err := d.Dial("unixpacket", cfg.Socket)
	if err != nil {
		return nil, fmt.Errorf("holder: %w", err)
	}
	h := &holderStore{socket: cfg.Socket, timeout: cfg.timeout(), conn: c.(*net.UnixConn)}
	if err := h.greet(); err != nil {
		return nil, errors.Join(fmt.Errorf("holder %s: %w", h.socket, err), h.discard())
	}
	return h, nil
}

// greet checks the holder and lists its entries.
func (h *holderStore) greet() error {
	cred, err := peer(h.conn)
	if err != nil {
		return err
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("socket belongs to a process of uid %d; remove the socket", cred.Uid)
	}
	err = h.reply(nil)
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("%w: %w", errEnding, err)
	} else if err != nil {
		return err
	}
	return h.call(opList, "", -1, func(name string, fd int) {
		h.adopt(Entry{Name: name, File: os.NewFile(uintptr(fd), name)})
	})
}

func (h *holderStore) Put(name string, f *os.File) error {
	err := checkName(name)
	if err == nil {
		err = withFD(f, func(fd int) error { return h.call(opPut, name, fd, nil) })
	}
	if err != nil {
		return fmt.Errorf("keep descriptor %q in %v: %w", name, h, err)
	}
	return nil
}

func (h *holderStore) Remove(name string) error {
	err := checkName(name)
	if err == nil {
		err = h.call(opRemove, name, -1, nil)
	}
	if err != nil {
		return fmt.Errorf("remove descriptor %q from %v: %w", name, h, err)
	}
	return nil
}

func (h *holderStore) String() string { return "holder " + h.socket }

func (h *holderStore) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if errors.Is(h.err, os.ErrClosed) {
		return nil
	}
	err := h.conn.Close()
	if h.err != nil {
		err = nil // call closed it
	}
	h.err = os.ErrClosed
	return err
}

func (h *holderStore) discard() error {
	h.closeFiles()
	return h.Close()
}

// call sends a request and waits until the holder completes it. After an error of the connection
// the state of the holder is unknown, and no further call is possible.
func (h *holderStore) call(op byte, name string, fd int, entry func(string, int)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err != nil {
		return h.err
	}
	_ = h.conn.SetDeadline(time.Now().Add(h.timeout))
	err := send(h.conn, op, name, fd)
	if err == nil {
		err = h.reply(entry)
	}
	var refused *refusedError
	if err == nil || errors.As(err, &refused) && refused.usable() {
		return err
	}
	h.err = fmt.Errorf("%w: %w", ErrLost, err)
	h.conn.Close()
	return h.err
}

// reply receives the reply to a request, and calls entry for each entry in it.
func (h *holderStore) reply(entry func(string, int)) error {
	for {
		_ = h.conn.SetDeadline(time.Now().Add(h.timeout))
		b, fds, err := receive(h.conn)
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
