package systemd

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A Manager receives the notifications of a service, and keeps its descriptors if the service may
// store any. Its methods may be called concurrently.
type Manager struct {
	t        testing.TB
	conn     *net.UnixConn
	limit    int
	done     chan struct{}
	messages chan string

	kept []kept // only run uses it before done
}

type kept struct {
	name string
	fd   int
}

// maxMessages bounds the messages that a test has not read.
const maxMessages = 1000

// StartManager starts a manager that keeps limit descriptors.
func StartManager(t testing.TB, limit int) *Manager {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "notify"),
		Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	m := &Manager{t: t, conn: conn, limit: limit, done: make(chan struct{}), messages: make(chan string, maxMessages)}
	go m.run()
	t.Cleanup(func() {
		conn.Close()
		<-m.done
		m.remove(func(kept) bool { return true })
	})
	return m
}

// Env returns the environment of the service.
func (m *Manager) Env() []string { return []string{"NOTIFY_SOCKET=" + m.conn.LocalAddr().String()} }

// Message returns the next notification that is about the state of the service, with a line break
// before and after each assignment.
func (m *Manager) Message(timeout time.Duration) string {
	m.t.Helper()
	select {
	case s := <-m.messages:
		return "\n" + s + "\n"
	case <-time.After(timeout):
		m.t.Fatal("no notification")
		return ""
	}
}

func (m *Manager) run() {
	defer close(m.done)
	b, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*253))
	for {
		n, oobn, _, _, err := m.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return
		}
		m.execute(string(b[:n]), receivedFDs(oob[:oobn]))
	}
}

// execute executes a message and closes the descriptors that it does not keep: sd_notify(3).
func (m *Manager) execute(message string, fds []int) {
	tags := strings.Split(message, "\n")
	name := ""
	for _, tag := range tags {
		if v, ok := strings.CutPrefix(tag, "FDNAME="); ok {
			name = v
		}
	}
	switch {
	case slices.Contains(tags, "BARRIER=1"):
	case slices.Contains(tags, "FDSTOREREMOVE=1"):
		m.remove(func(k kept) bool { return k.name == name })
	case slices.Contains(tags, "FDSTORE=1"):
		for len(fds) > 0 && len(m.kept) < m.limit {
			m.kept = append(m.kept, kept{name, fds[0]})
			fds = fds[1:]
		}
	default:
		select {
		case m.messages <- message:
		default:
			m.t.Error("manager: too many messages")
		}
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (m *Manager) remove(match func(kept) bool) {
	m.kept = slices.DeleteFunc(m.kept, func(k kept) bool {
		if match(k) {
			unix.Close(k.fd)
		}
		return match(k)
	})
}

func receivedFDs(oob []byte) (all []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			all = append(all, fds...)
		}
	}
	for _, fd := range all {
		unix.CloseOnExec(fd)
	}
	return all
}
