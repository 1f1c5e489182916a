package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	qemu = "qemu-system-x86_64"
	// bootTimeout bounds a boot, which takes ten seconds on an idle machine.
	bootTimeout = 15 * time.Minute
	// killTimeout bounds the end of a killed QEMU, which first frees its memory.
	killTimeout = 2 * time.Minute
	// guestAddr is the guest's default address on QEMU's user network.
	guestAddr = "10.0.2.15"
	// firstFD is the first descriptor that a child gets after the standard ones.
	firstFD = 3
)

// errNotReady reports a boot that makes no progress.
var errNotReady = errors.New("guest did not get ready")

// A session is one boot of a machine, for commands.
type session struct {
	ctx    context.Context // ends with the boot
	cancel context.CancelCauseFunc
	id     string
	free   chan *commandPort
}

// A machine is one run of QEMU.
type machine struct {
	name    string
	qmp     *qmp
	ports   []*commandPort
	console *console
	pid     int
	ended   chan struct{} // closed when QEMU has ended and its console is read
	endErr  error         // QEMU's error and output; set before ended is closed

	mu      sync.Mutex
	current *session // guarded by mu; nil until the first boot is ready
}

// A launch collects the arguments and descriptors of a QEMU process before its start.
type launch struct {
	args   []string
	disk   *os.File
	theirs []*os.File // QEMU's ends, whose descriptors follow the disk's
	ours   []net.Conn
}

// pass passes a descriptor to QEMU and returns its number there.
func (l *launch) pass(f *os.File) int {
	l.theirs = append(l.theirs, f)
	return firstFD + len(l.theirs) // the disk has firstFD
}

// socket makes a connection to QEMU and returns its descriptor number there.
func (l *launch) socket() (net.Conn, int, error) {
	conn, f, err := socketPair()
	if err != nil {
		return nil, 0, err
	}
	l.ours = append(l.ours, conn)
	return conn, l.pass(f), nil
}

func (l *launch) closeTheirs() {
	for _, f := range l.theirs {
		f.Close()
	}
	l.theirs = nil
}

func (l *launch) closeOurs() {
	for _, conn := range l.ours {
		conn.Close()
	}
}

// diskDevice is the -blockdev argument for the disk. Flushes are disabled: a test cuts the guest's
// power, not the host's.
const diskDevice = "driver=raw,node-name=disk,discard=unmap,cache.no-flush=on,file.driver=file," +
	"file.filename=/dev/fdset/1,file.locking=off,file.discard=unmap"

// addDevices adds the disk, the cable of a link if p is not nil, the console, the control socket
// and the command ports.
func (l *launch) addDevices(m *machine, p *port) (console, control net.Conn, err error) {
	l.args = append(l.args, "-add-fd", fmt.Sprintf("fd=%d,set=1", firstFD), "-device", "virtio-blk-pci,drive=disk",
		"-blockdev", diskDevice)
	if p != nil {
		f, err := p.plug()
		if err != nil {
			return nil, nil, err
		}
		l.args = append(l.args, p.arguments(l.pass(f))...)
	}
	console, fd, err := l.socket()
	if err != nil {
		return nil, nil, err
	}
	l.args = append(l.args, "-chardev", fmt.Sprintf("socket,id=console,fd=%d", fd), "-serial", "chardev:console")
	control, fd, err = l.socket()
	if err != nil {
		return nil, nil, err
	}
	l.args = append(l.args, "-chardev", fmt.Sprintf("socket,id=control,fd=%d", fd), "-mon",
		"chardev=control,mode=control", "-device", "virtio-serial-pci")
	for i := range commandPorts {
		conn, fd, err := l.socket()
		if err != nil {
			return nil, nil, err
		}
		m.ports = append(m.ports, &commandPort{conn: conn, r: bufio.NewReader(conn)})
		l.args = append(l.args, "-chardev", fmt.Sprintf("socket,id=cmd%d,fd=%d", i, fd), "-device",
			fmt.Sprintf("virtserialport,chardev=cmd%d,name=lab.cmd%[1]d", i))
	}
	return console, control, nil
}

// startMachine runs QEMU with these arguments, a disk, and the cable of a link if p is not nil. It
// waits for QEMU's control socket, not for the guest.
func startMachine(name string, args []string, disk *os.File, p *port, c *console) (*machine, error) {
	m := &machine{name: name, console: c, ended: make(chan struct{})}
	l := &launch{args: args, disk: disk}
	defer l.closeTheirs() // so that our ends see EOF when QEMU ends
	con, control, err := l.addDevices(m, p)
	if err != nil {
		l.closeOurs()
		return nil, err
	}
	if err := m.start(l, con); err != nil {
		l.closeOurs()
		return nil, fmt.Errorf("start %s: %w; run \"make lab\"", qemu, err)
	}
	l.closeTheirs()
	if m.qmp, err = newQMP(control); err != nil {
		m.kill()
		return nil, errors.Join(err, m.endErr)
	}
	return m, nil
}

// start starts QEMU. A goroutine waits for its end, and another one reads its console.
func (m *machine) start(l *launch, con net.Conn) error {
	cmd := exec.Command(qemu, l.args...)
	cmd.ExtraFiles = append([]*os.File{l.disk}, l.theirs...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The end of the parent's thread sends the signal, not the end of the parent's process.
		// This thread must therefore outlive QEMU.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			m.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		var reading sync.WaitGroup
		reading.Go(func() { m.console.read(con) })
		cmd.Wait() // endErr has the exit status
		reading.Wait()
		l.closeOurs()
		m.endErr = fmt.Errorf("QEMU ended (%v): %s", cmd.ProcessState, strings.TrimSpace(output.String()))
		close(m.ended)
	}()
	return <-started
}

// socketPair returns a connection and its other end, for a child process.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	own := os.NewFile(uintptr(fds[0]), "lab")
	defer own.Close() // FileConn duplicates it
	other := os.NewFile(uintptr(fds[1]), "lab")
	conn, err := net.FileConn(own)
	if err != nil {
		other.Close()
		return nil, nil, err
	}
	return conn, other, nil
}

// kill ends QEMU without notice, like a power failure, and waits for its end.
func (m *machine) kill() {
	m.endSession(ErrPower)
	if m.isRunning() {
		unix.Kill(m.pid, unix.SIGKILL)
	}
	select {
	case <-m.ended:
	case <-time.After(killTimeout):
		panic("lab: QEMU " + strconv.Itoa(m.pid) + " does not end after SIGKILL")
	}
}

// isRunning reports whether QEMU has not ended, so that pid is QEMU's.
func (m *machine) isRunning() bool {
	select {
	case <-m.ended:
		return false
	default:
		return true
	}
}

// endSession ends the current session; its commands return why.
func (m *machine) endSession(why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.current != nil {
		m.current.cancel(why)
		m.current = nil
	}
}

// awaitReady waits until a boot serves, and starts its session.
func (m *machine) awaitReady(b *boot) error {
	timeout := time.NewTimer(bootTimeout)
	defer timeout.Stop()
	select {
	case <-b.settled:
	case <-m.ended:
		return m.endErr
	case <-timeout.C:
		return fmt.Errorf("%w within %v", errNotReady, bootTimeout)
	}
	if b.err != nil {
		return b.err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	s := &session{ctx: ctx, cancel: cancel, id: b.id, free: make(chan *commandPort, commandPorts)}
	for _, p := range m.ports {
		s.free <- p
	}
	panicked := m.console.panicked()
	go func() {
		select {
		case <-ctx.Done():
		case <-panicked:
			cancel(ErrPanic)
		case <-m.ended:
			cancel(m.endErr)
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.current = s
	return nil
}

// run runs a command on the first free port.
func (m *machine) run(command string, limit time.Duration) (string, error) {
	m.mu.Lock()
	s := m.current
	m.mu.Unlock()
	if s == nil {
		return "", fmt.Errorf("command in the guest: guest is not ready: %s", command)
	}
	var p *commandPort
	select {
	case p = <-s.free:
	case <-s.ctx.Done():
		return "", fmt.Errorf("command in the guest: %w: %s", context.Cause(s.ctx), command)
	}
	out, err := p.run(s.ctx, s.id, command, limit)
	// After a deadline the guest could not even kill the command, and its port stays in use.
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		s.free <- p
	}
	return out, err
}
