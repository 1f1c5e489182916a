package fdstore

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/running"
)

const (
	// listenerFD and lockFD are the descriptors that a daemon passes to the holder.
	listenerFD = 3
	lockFD     = 4
	// firstConnect is how long a new holder waits for a daemon.
	firstConnect = 10 * time.Second
	// checkInterval is how often a holder without a daemon checks that a daemon can reach it.
	checkInterval = 5 * time.Second
	// replyTimeout bounds the time in which a daemon reads a reply.
	replyTimeout = 10 * time.Second
	// ownFiles is how many descriptors a holder may use besides the entries.
	ownFiles = 64
	// oomAdjust is added to the OOM score of the daemon: the kernel kills the daemon first, whose
	// mounts the next daemon continues.
	oomAdjust = -100
	// holderComm is the name of the process in ps(1). killall(1) with the name of the daemon must
	// not end the holder.
	holderComm = "nfsrdmad-holder"
)

// A holder is the process that keeps descriptors. run accepts connections; one goroutine serves the
// connected daemon. Only this goroutine uses entries, and run after the goroutine has ended.
type holder struct {
	listener *net.UnixListener
	path     string
	limit    int // of entries
	entries  map[string]descriptor
	stop     atomic.Bool // SIGTERM: end when no daemon is connected
}

// RunHolder runs the holder process: the command of Config.Command calls it, and exits when it
// returns. Only [Holder] and [Open] start this command. RunHolder returns nil when the holder has
// no entries and no daemon is connected, and when nothing can connect any more because the socket
// was removed.
//
// SIGTERM ends the holder and its entries as soon as no daemon is connected. RunHolder ignores
// SIGHUP and SIGINT.
func RunHolder() error {
	signal.Ignore(unix.SIGHUP, unix.SIGINT)
	listener, lock, err := inheritedSocket()
	if err != nil {
		return fmt.Errorf("holder: %w; only the daemon starts the holder", err)
	}
	defer lock.Close()
	defer listener.Close()
	sid, err := unix.Getsid(0)
	if err != nil {
		return fmt.Errorf("holder: %w", os.NewSyscallError("getsid", err))
	}
	if sid == os.Getpid() {
		return startAgain(listener, lock)
	}
	_ = os.WriteFile("/proc/self/comm", []byte(holderComm), 0)
	_ = running.AdjustOOMScore(oomAdjust) // without CAP_SYS_RESOURCE the score stays that of the daemon
	l, err := net.FileListener(listener)
	if err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	listener.Close()
	h := &holder{listener: l.(*net.UnixListener), path: l.Addr().String(), limit: MaxEntries,
		entries: make(map[string]descriptor)}
	h.listener.SetUnlinkOnClose(false)
	var files unix.Rlimit // os has raised the soft limit to the hard limit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("holder: %w", os.NewSyscallError("getrlimit", err))
	}
	if files.Max < MaxEntries+ownFiles {
		h.limit = max(0, int(files.Max)-ownFiles)
	}
	return h.run()
}

// inheritedSocket returns the listening socket and the lock file.
func inheritedSocket() (listener, lock *os.File, err error) {
	accepts, err1 := unix.GetsockoptInt(listenerFD, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	kind, err2 := unix.GetsockoptInt(listenerFD, unix.SOL_SOCKET, unix.SO_TYPE)
	_, err3 := unix.FcntlInt(lockFD, unix.F_GETFD, 0)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, nil, fmt.Errorf("descriptors %d and %d: %w", listenerFD, lockFD, err)
	}
	if accepts == 0 || kind != unix.SOCK_SEQPACKET {
		return nil, nil, fmt.Errorf("descriptor %d is not a listening socket", listenerFD)
	}
	unix.CloseOnExec(listenerFD)
	unix.CloseOnExec(lockFD)
	return os.NewFile(listenerFD, "listener"), os.NewFile(lockFD, "lock"), nil
}

// startAgain starts the same command as a child that is not a session leader, and that init adopts
// when this process ends. The daemon then has no child to wait for, and the holder never gets a
// terminal.
func startAgain(listener, lock *os.File) error {
	// The daemon may have inherited descriptors without FD_CLOEXEC. Linux before 5.11 returns
	// EINVAL.
	_ = unix.CloseRange(lockFD+1, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.ExtraFiles = []*os.File{listener, lock}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	return nil
}

// run accepts daemons until the holder may end.
func (h *holder) run() error {
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM)
	go func() {
		<-terminated
		h.stop.Store(true)
		h.wake()
	}()
	named, err := os.Lstat(h.path)
	if err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	isReachable := func() bool {
		now, err := os.Lstat(h.path)
		return err == nil && os.SameFile(named, now)
	}
	defer func() {
		if isReachable() { // the lock keeps other daemons from replacing the socket
			os.Remove(h.path)
		}
	}()

	var active *session
	waitUntil := time.Now().Add(firstConnect)
	for {
		// wake sets a deadline in the past, and must do that after this deadline or before the
		// checks.
		_ = h.listener.SetDeadline(time.Now().Add(checkInterval))
		if active != nil && active.hasEnded() {
			active = nil
		}
		isEmpty := active == nil && len(h.entries) == 0 && time.Now().After(waitUntil)
		if active == nil && (isEmpty || h.stop.Load() || !isReachable()) {
			return nil
		}
		c, err := h.listener.AcceptUnix()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
			time.Sleep(100 * time.Millisecond) // the entries must survive this
			continue
		case err != nil:
			return fmt.Errorf("holder: %w", err)
		}
		active = h.accept(c, active)
		waitUntil = time.Time{}
	}
}

// wake makes run check whether the holder may end.
func (h *holder) wake() { _ = h.listener.SetDeadline(time.Now()) }

// accept greets the daemon on c and returns the session of the connected daemon.
func (h *holder) accept(c *net.UnixConn, active *session) *session {
	_ = c.SetWriteDeadline(time.Now().Add(replyTimeout))
	cred, err := peer(c)
	if err != nil || int(cred.Uid) != os.Geteuid() {
		_ = send(c, statusDenied, "permission denied; run as the user of the daemon that started the holder", -1)
		c.Close()
		return active
	}
	if active != nil && hungUp(active.conn, 0) {
		<-active.ended // the requests before the end come first
	} else if active != nil && !active.hasEnded() {
		_ = send(c, statusBusy, strconv.Itoa(int(active.pid)), -1)
		c.Close()
		return active
	}
	s := &session{conn: c, pid: cred.Pid, ended: make(chan struct{})}
	go func() {
		h.serve(c)
		c.Close()
		close(s.ended)
		h.wake()
	}()
	return s
}

// A session is the connection of a daemon.
type session struct {
	conn  *net.UnixConn
	pid   int32
	ended chan struct{}
}

func (s *session) hasEnded() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// serve executes the requests of a daemon until the daemon disconnects or violates the protocol.
func (h *holder) serve(c *net.UnixConn) {
	reply := func(status byte, text string, fd int) error {
		_ = c.SetWriteDeadline(time.Now().Add(replyTimeout))
		return send(c, status, text, fd)
	}
	if reply(statusOK, "", -1) != nil {
		return
	}
	for {
		b, fds, err := receive(c)
		var r request
		if err == nil {
			if r, err = parseRequest(b, len(fds)); err != nil {
				closeAll(fds)
			}
		}
		if perr := (*protocolError)(nil); errors.As(err, &perr) {
			_ = reply(perr.status, perr.text, -1)
		}
		if err != nil {
			return
		}
		if status, text := h.execute(r, fds, reply); reply(status, text, -1) != nil {
			return
		}
	}
}

// execute executes r and returns the status and the text of the reply.
func (h *holder) execute(r request, fds []int, reply func(byte, string, int) error) (byte, string) {
	switch r.op {
	case opPut:
		status, err := h.put(r.name, fds[0])
		if err != nil {
			unix.Close(fds[0])
			return status, err.Error()
		}
	case opRemove:
		if d, ok := h.entries[r.name]; ok {
			delete(h.entries, r.name)
			d.close()
		}
	case opList:
		for name, d := range h.entries {
			if err := reply(statusEntry, name, d.fd); err != nil {
				return statusFailed, err.Error()
			}
		}
	}
	return statusOK, ""
}

// put keeps fd under name. It does not close fd when it returns an error.
func (h *holder) put(name string, fd int) (byte, error) {
	d, err := describe(fd)
	if err != nil {
		return statusFailed, err
	}
	for other, kept := range h.entries {
		if same, err := kept.isSame(d); err != nil {
			return statusFailed, err
		} else if same && other != name {
			return statusDuplicate, errors.New(other)
		}
	}
	previous, replace := h.entries[name]
	if !replace && len(h.entries) >= h.limit {
		return statusFull, fmt.Errorf("%d descriptors", len(h.entries))
	}
	h.entries[name] = d
	if replace {
		previous.close()
	}
	return statusOK, nil
}
