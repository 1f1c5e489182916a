package fdstore

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// A manager receives notifications and keeps descriptors as systemd does for a service with
// NotifyAccess=main (sd_notify(3), and service_add_fd_store of systemd 252):
//
//   - It ignores messages of other processes than the main process, except barriers.
//   - It drops a descriptor when it has max descriptors, and one whose open file it has.
//   - It adds descriptors and never replaces by name. FDSTOREREMOVE=1 removes all of a name.
//   - Without FDPOLL=0, it removes a descriptor with EPOLLERR or EPOLLHUP.
type manager struct {
	t    testing.TB
	conn *net.UnixConn
	done chan struct{}

	mu      sync.Mutex // guards the fields below, and is held while a message is executed
	max     int
	mainPID int
	discard bool // of messages; as systemd does when it can not find the service of a sender
	kept    []managed
}

type managed struct {
	name string
	fd   int
	poll bool
}

// startManager starts a manager for this process, and sets the environment of a service.
func startManager(t testing.TB, limit int) *manager {
	t.Helper()
	return startManagerAt(t, filepath.Join(t.TempDir(), "notify"), limit)
}

func startManagerAt(t testing.TB, socket string, limit int) *manager {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	kit.Must(t, err)
	err = withFD(conn, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	kit.Must(t, err)
	m := &manager{t: t, conn: conn, done: make(chan struct{}), max: limit, mainPID: os.Getpid()}
	go m.run()
	t.Cleanup(func() {
		conn.Close()
		<-m.done
		for _, k := range m.kept {
			unix.Close(k.fd)
		}
	})
	for name, value := range map[string]string{"NOTIFY_SOCKET": socket, "FDSTORE": "", "LISTEN_PID": "",
		"LISTEN_FDS": "", "LISTEN_FDNAMES": ""} {
		setenv(t, name, value)
	}
	return m
}

func setenv(t testing.TB, name, value string) {
	t.Helper()
	t.(interface{ Setenv(string, string) }).Setenv(name, value)
	if value == "" {
		os.Unsetenv(name)
	}
}

func (m *manager) run() {
	defer close(m.done)
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*253)+unix.CmsgSpace(unix.SizeofUcred))
	for {
		n, oobn, flags, _, err := m.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			m.t.Error("manager: truncated message")
		}
		m.mu.Lock()
		m.execute(strings.Split(string(b[:n]), "\n"), oob[:oobn])
		m.mu.Unlock()
	}
}

func (m *manager) execute(tags []string, oob []byte) {
	fds, err := receivedFDs(oob)
	if err != nil {
		m.t.Error(err)
	}
	defer func() { closeAll(fds) }()
	m.poll()
	if slices.Contains(tags, "BARRIER=1") {
		if len(tags) != 1 || len(fds) != 1 {
			m.t.Errorf("manager: barrier %q with %d descriptors", tags, len(fds))
		}
		return
	}
	if senderPID(oob) != m.mainPID || m.discard {
		return
	}
	name := ""
	for _, tag := range tags {
		if v, ok := strings.CutPrefix(tag, "FDNAME="); ok {
			name = v
		}
	}
	if len(name) == 0 || len(name) > 255 || strings.ContainsFunc(name, func(c rune) bool {
		return c < ' ' || c >= 127 || c == ':'
	}) {
		m.t.Errorf("manager: name %q is not valid", name)
	}
	switch {
	case slices.Contains(tags, "FDSTOREREMOVE=1"):
		m.kept = slices.DeleteFunc(m.kept, func(k managed) bool {
			if k.name == name {
				unix.Close(k.fd)
			}
			return k.name == name
		})
	case slices.Contains(tags, "FDSTORE=1"):
		for len(fds) > 0 && len(m.kept) < m.max {
			if !m.has(fds[0]) {
				m.kept = append(m.kept, managed{name: name, fd: fds[0], poll: !slices.Contains(tags, "FDPOLL=0")})
				fds = fds[1:]
				continue
			}
			break
		}
	default:
		m.t.Errorf("manager: unknown message %q", tags)
	}
}

func (m *manager) has(fd int) bool {
	return slices.ContainsFunc(m.kept, func(k managed) bool {
		same, err := isSame(k.fd, fd)
		if err != nil {
			m.t.Error(err)
		}
		return same
	})
}

func isSame(a, b int) (bool, error) {
	da, err1 := describe(a)
	db, err2 := describe(b)
	same, err3 := da.isSame(db)
	return same, errors.Join(err1, err2, err3)
}

// poll removes descriptors with EPOLLERR or EPOLLHUP. epoll does not support memfds.
func (m *manager) poll() {
	m.kept = slices.DeleteFunc(m.kept, func(k managed) bool {
		p := []unix.PollFd{{Fd: int32(k.fd)}}
		if !k.poll {
			return false
		}
		if _, err := unix.Poll(p, 0); err != nil || p[0].Revents&(unix.POLLERR|unix.POLLHUP) == 0 {
			return false
		}
		unix.Close(k.fd)
		return true
	})
}

func senderPID(oob []byte) int {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0
	}
	for i := range messages {
		if cred, err := unix.ParseUnixCredentials(&messages[i]); err == nil {
			return int(cred.Pid)
		}
	}
	return 0
}

// sync waits until the manager has executed all messages, or has discarded them.
func (m *manager) sync(discard bool) {
	m.t.Helper()
	m.mu.Lock()
	m.discard = discard
	m.mu.Unlock()
	n, err := dialNotify(m.conn.LocalAddr().String(), kit.Timeout)
	if err != nil {
		m.t.Fatal(err)
	}
	defer n.close()
	if err := n.barrier(); err != nil {
		m.t.Fatal(err)
	}
	m.mu.Lock()
	m.discard = false
	m.mu.Unlock()
}

// labels returns the names of the descriptors.
func (m *manager) labels() []string {
	m.t.Helper()
	m.sync(false)
	m.mu.Lock()
	defer m.mu.Unlock()
	labels := []string{}
	for _, k := range m.kept {
		labels = append(labels, k.name)
	}
	slices.Sort(labels)
	return labels
}

// keep adds a descriptor, as a previous daemon.
func (m *manager) keep(name string, f *os.File) {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	err := withFD(f, func(fd int) error {
		own, err := duplicate(fd)
		m.kept = append(m.kept, managed{name: name, fd: own})
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
}

// start starts a daemon as the main process of the service.
func (m *manager) start(socket string) *daemon {
	m.t.Helper()
	m.sync(false)
	m.mu.Lock()
	var files []*os.File
	var names []string
	for _, k := range m.kept {
		fd, err := duplicate(k.fd)
		if err != nil {
			m.t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(fd), k.name))
		names = append(names, k.name)
	}
	m.mu.Unlock()
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	return startDaemon(m.t, socket, func(cmd *exec.Cmd) {
		cmd.ExtraFiles = files
		cmd.Env = append(os.Environ(), fmt.Sprintf("LISTEN_FDS=%d", len(files)),
			"LISTEN_FDNAMES="+strings.Join(names, ":"))
		if len(files) == 0 {
			cmd.Env = os.Environ()
		}
		m.mu.Lock()
	}, func(pid int) {
		m.mainPID = pid
		m.mu.Unlock()
	})
}
