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
	bootTimeout = 4 * time.Minute
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

// startMachine runs QEMU with these arguments, a disk, and the cable of a link if p is not nil. It
// waits for QEMU's control socket, not for the guest.
func startMachine(name string, args []string, disk *os.File, p *port, c *console) (m *machine, err error) {
	m = &machine{name: name, console: c, ended: make(chan struct{})}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	var ours []net.Conn
	closeOurs := func() {
		for _, conn := range ours {
			conn.Close()
		}
	}
	// socket makes a connection to QEMU and returns its descriptor number in QEMU.
	socket := func() (net.Conn, int, error) {
		conn, f, err := socketPair()
		if err != nil {
			return nil, 0, err
		}
		ours, theirs = append(ours, conn), append(theirs, f)
		return conn, firstFD + len(theirs), nil // the disk has firstFD
	}
	// Flushes are disabled: a test cuts the guest's power, not the host's.
	args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=1", firstFD), "-device", "virtio-blk-pci,drive=disk",
		"-blockdev", "driver=raw,node-name=disk,discard=unmap,cache.no-flush=on,file.driver=file,file.filename=/dev/fdset/1,file.locking=off,file.discard=unmap")
	if p != nil {
		f, err := p.plug()
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, f)
		args = append(args, p.arguments(firstFD+len(theirs))...)
	}
	con, fd, err := socket()
	if err != nil {
		return nil, err
	}
	args = append(args, "-chardev", fmt.Sprintf("socket,id=console,fd=%d", fd), "-serial", "chardev:console")
	control, fd, err := socket()
	if err != nil {
		closeOurs()
		return nil, err
	}
	args = append(args, "-chardev", fmt.Sprintf("socket,id=control,fd=%d", fd), "-mon",
		"chardev=control,mode=control", "-device", "virtio-serial-pci")
	for i := range commandPorts {
		conn, fd, err := socket()
		if err != nil {
			closeOurs()
			return nil, err
		}
		m.ports = append(m.ports, &commandPort{conn: conn, r: bufio.NewReader(conn)})
		args = append(args, "-chardev", fmt.Sprintf("socket,id=cmd%d,fd=%d", i, fd), "-device",
			fmt.Sprintf("virtserialport,chardev=cmd%d,name=lab.cmd%[1]d", i))
	}
	cmd := exec.Command(qemu, args...)
	cmd.ExtraFiles = append([]*os.File{disk}, theirs...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	var reading sync.WaitGroup
	go func() {
		// The end of the parent's thread sends the signal, not the end of the parent's process.
		// This thread must therefore outlive QEMU.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		err = cmd.Wait()
		reading.Wait()
		closeOurs()
		m.endErr = fmt.Errorf("QEMU ended (%v): %s", err, strings.TrimSpace(output.String()))
		close(m.ended)
	}()
	if err := <-started; err != nil {
		closeOurs()
		return nil, fmt.Errorf("%s: %w; run \"make lab\"", qemu, err)
	}
	m.pid = cmd.Process.Pid
	reading.Go(func() { c.read(con) })
	for _, f := range theirs { // so that our ends see EOF when QEMU ends
		f.Close()
	}
	theirs = nil
	if m.qmp, err = newQMP(control); err != nil {
		m.kill()
		return nil, errors.Join(err, m.endErr)
	}
	return m, nil
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
	unix.Kill(m.pid, unix.SIGKILL) // the PID is QEMU's until ended is closed
	select {
	case <-m.ended:
	case <-time.After(killTimeout):
		panic("lab: QEMU " + strconv.Itoa(m.pid) + " does not end after SIGKILL")
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
