package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrHelper means that the helper process of a Device ended, or did not react. The kernel may have
// handled the notification or not.
var ErrHelper = errors.New("FUSE notification: the helper process ended or does not react")

// errNoHelper means that there is no helper, and that the notification was not sent.
var errNoHelper = errors.New("no helper")

const (
	// maxPending bounds the notifications of one kind that a helper handles at the same time. Each
	// needs a thread of the helper.
	maxPending = 64
	// restartPause is the shortest time between two starts of a helper.
	restartPause = time.Second
	// closeTimeout bounds the time in which Close waits for the helper to end.
	closeTimeout = time.Second
	// checkInterval is how often a helper with notifications in progress is checked, and maxMissed
	// is the number of checks without reaction after which it is killed.
	checkInterval = time.Second
	maxMissed     = 5
	// startTimeout bounds the time in which UseHelper waits for the first reaction.
	startTimeout = 10 * time.Second
)

// Messages between a Device and its helper, in the byte order of the host. The Device sends:
//
//	offset  bytes  field
//	     0      8  number of the request
//	     8      4  flags
//	    12      4  zero
//	    16         the message to the kernel; without one, the helper only replies
//
// The helper replies:
//
//	offset  bytes  field
//	     0      8  number of the request
//	     8      4  errno of write(2) to the kernel, or 0
//	    12      4  zero
const (
	requestHeader = 16
	replySize     = 16
	// flagUnreadable is set for notification.unreadable.
	flagUnreadable = 1
	// maxNotification is larger than any notification that the kernel accepts, except for
	// FUSE_NOTIFY_STORE with much data.
	maxNotification = 2 * unix.PathMax
)

// A helper sends notifications through a helper process.
//
//	           UseHelper                 ends, or is killed
//	no process ---------> process runs ---------------------> no process
//	                           ^                                  |
//	                           +----------------------------------+
//	                    next notification, after restartPause
//
// Any state leads to closed, which is final.
type helper struct {
	dev     *Device
	command []string
	check   time.Duration // checkInterval, except in tests
	closed  chan struct{}
	slots   [waitKinds]chan struct{} // nil: no bound

	mu      sync.Mutex
	process *helperProcess // the last one; guarded by mu
	started time.Time      // guarded by mu
}

// A helperProcess is one run of the helper.
type helperProcess struct {
	cmd    *exec.Cmd
	conn   *net.UnixConn
	check  time.Duration
	exited chan struct{} // closed when the process has ended and was waited for

	mu      sync.Mutex
	pending map[uint64]chan error // by number of the request; nil after the end
	last    uint64                // number
	checked bool                  // a read deadline is set
	missed  int                   // checks without reaction
	failed  error                 // of the requests after the end
}

// UseHelper starts a process that sends the notifications of d, except for those of Resume. command
// runs this program with arguments that make it call RunHelper.
//
// The kernel handles a notification in write(2), where it may wait for requests that this process
// must answer. No signal ends this wait. A process that is killed meanwhile would not exit, and the
// next process would not start. The helper waits instead, and exits as soon as it can.
//
// When the helper ends, its notifications return ErrHelper. The next notification starts another
// helper, at most once in a second. Without a helper a notification is sent from this process.
// Notifications that wait for pages, and those that wait for names, are each limited to 64 at the
// same time; others wait.
//
// A service manager must end only the main process: the helper ends when this process ends, but may
// need the next process for that (systemd: KillMode=process).
func (d *Device) UseHelper(command []string) error {
	if len(command) == 0 {
		return errors.New("start FUSE notification helper: no command")
	}
	h := &helper{dev: d, command: command, check: checkInterval, closed: make(chan struct{})}
	for _, kind := range []waitKind{waitsForPages, waitsForNames} {
		h.slots[kind] = make(chan struct{}, maxPending)
	}
	p, err := h.start()
	if err == nil {
		err = p.awaitStart()
	}
	if err != nil {
		return fmt.Errorf("start FUSE notification helper %q: %w", command, err)
	}
	h.process, h.started = p, time.Now()
	if !d.helper.CompareAndSwap(nil, h) {
		h.close()
		return fmt.Errorf("start FUSE notification helper: %w", os.ErrExist)
	}
	if closed := d.Use(func(int) {}); closed != nil { // Close may have seen no helper
		h.close()
		return closed
	}
	return nil
}

// start starts a process.
func (h *helper) start() (*helperProcess, error) {
	dev, err := h.dev.File()
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	own, other := os.NewFile(uintptr(fds[0]), "helper"), os.NewFile(uintptr(fds[1]), "helper")
	defer own.Close()
	defer other.Close()
	conn, err := net.FileConn(own)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(h.command[0], h.command[1:]...)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{dev, other}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // no signals of a terminal
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, err
	}
	p := &helperProcess{cmd: cmd, conn: conn.(*net.UnixConn), check: h.check, exited: make(chan struct{}),
		pending: make(map[uint64]chan error)}
	go func() {
		_ = cmd.Wait() // returns late if the kernel does not let the process end
		close(p.exited)
	}()
	go p.receive()
	return p, nil
}

// awaitStart waits until the process handles messages.
func (p *helperProcess) awaitStart() error {
	number, reply, err := p.begin()
	if err == nil {
		p.ping(number)
		select {
		case err = <-reply:
		case <-time.After(startTimeout):
			err = os.ErrDeadlineExceeded
		}
	}
	if err != nil {
		p.end(err)
		_ = p.cmd.Process.Kill()
	}
	return err
}

// notify sends a notification and returns the error of write(2) in the helper. It returns
// errNoHelper when no helper runs.
func (h *helper) notify(n *notification) error {
	if slots := h.slots[n.waits]; slots != nil {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		case <-h.closed:
			return os.ErrClosed
		}
	}
	p, err := h.running()
	if err != nil {
		return err
	}
	return p.call(n)
}

// running returns the process, and starts another one if it has ended.
func (h *helper) running() (*helperProcess, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.closed:
		return nil, os.ErrClosed
	default:
	}
	if h.process.runs() {
		return h.process, nil
	}
	if time.Since(h.started) < restartPause {
		return nil, errNoHelper
	}
	h.started = time.Now()
	p, err := h.start()
	if err != nil {
		return nil, errNoHelper
	}
	h.process = p
	return p, nil
}

// close ends the helper.
func (h *helper) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.closed:
		return
	default:
		close(h.closed)
	}
	p := h.process
	p.end(os.ErrClosed)
	select {
	case <-p.exited:
	case <-time.After(closeTimeout):
		_ = p.cmd.Process.Kill()
	}
}

func (p *helperProcess) runs() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pending != nil
}

// begin makes a request. The result comes on the channel.
func (p *helperProcess) begin() (uint64, <-chan error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending == nil {
		return 0, nil, p.failed
	}
	p.last++
	reply := make(chan error, 1)
	p.pending[p.last] = reply
	if !p.checked {
		p.checked = true
		_ = p.conn.SetReadDeadline(time.Now().Add(p.check))
	}
	return p.last, reply, nil
}

func (p *helperProcess) call(n *notification) error {
	number, reply, err := p.begin()
	if err != nil {
		return err
	}
	var flags uint32
	if n.unreadable {
		flags |= flagUnreadable
	}
	b := make([]byte, requestHeader, requestHeader+len(n.message))
	binary.NativeEndian.PutUint64(b, number)
	binary.NativeEndian.PutUint32(b[8:], flags)
	if _, err := p.conn.Write(append(b, n.message...)); err != nil {
		p.end(ErrHelper)
	}
	return <-reply
}

// ping sends a request without a notification. It does not wait.
func (p *helperProcess) ping(number uint64) {
	conn, err := p.conn.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Control(func(fd uintptr) {
		b := binary.NativeEndian.AppendUint64(nil, number)
		_ = unix.Send(int(fd), append(b, make([]byte, requestHeader-len(b))...), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
}

// receive handles the replies until the process ends.
func (p *helperProcess) receive() {
	b := make([]byte, replySize)
	for {
		n, err := p.conn.Read(b)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if !p.reacts() {
				p.end(ErrHelper)
				_ = p.cmd.Process.Kill()
				return
			}
		case err != nil || n != replySize:
			p.end(ErrHelper)
			return
		default:
			p.finish(binary.NativeEndian.Uint64(b), syscall.Errno(binary.NativeEndian.Uint32(b[8:])))
		}
	}
}

// finish ends a request.
func (p *helperProcess) finish(number uint64, errno syscall.Errno) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.missed = 0
	if reply := p.pending[number]; reply != nil {
		delete(p.pending, number)
		var err error
		if errno != 0 {
			err = errno
		}
		reply <- err
	}
}

// reacts checks the process while requests are in progress. Requests alone say nothing, because the
// kernel may take any time for them. reacts returns false if the process did not reply to a number
// of pings.
func (p *helperProcess) reacts() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.pending) == 0 {
		p.checked, p.missed = false, 0
		_ = p.conn.SetReadDeadline(time.Time{})
		return true
	}
	if p.missed++; p.missed > maxMissed {
		return false
	}
	p.ping(0)
	_ = p.conn.SetReadDeadline(time.Now().Add(p.check))
	return true
}

// end closes the socket, which ends the process, and ends all requests with err. Only the first
// call has an effect.
func (p *helperProcess) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending == nil {
		return
	}
	for _, reply := range p.pending {
		reply <- err
	}
	p.pending, p.failed = nil, err
	p.conn.Close()
}
