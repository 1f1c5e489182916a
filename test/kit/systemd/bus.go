package systemd

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/godbus/dbus/v5"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	name        = "org.freedesktop.systemd1"
	managerPath = dbus.ObjectPath("/org/freedesktop/systemd1")
	unitPath    = managerPath + "/unit/nfsrdmad_2eservice"
	jobPath     = managerPath + "/job/1"
	properties  = "org.freedesktop.DBus.Properties"
)

// A Unit is the unit of every process. Its methods may be called concurrently.
type Unit struct {
	mu      sync.Mutex // guards the fields below
	mainPID int
	job     string
	asked   int
}

// Set sets the main process and the type of the job of the unit, "" for no job.
func (u *Unit) Set(mainPID int, job string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.mainPID, u.job = mainPID, job
}

// Asked returns how often a process asked for its unit.
func (u *Unit) Asked() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.asked
}

// GetUnitByPID implements org.freedesktop.systemd1.Manager.
func (u *Unit) GetUnitByPID(uint32) (dbus.ObjectPath, *dbus.Error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.asked++
	return unitPath, nil
}

// Get implements org.freedesktop.DBus.Properties for the unit and its job.
func (u *Unit) Get(kind, property string) (dbus.Variant, *dbus.Error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	type job struct {
		ID   uint32
		Path dbus.ObjectPath
	}
	switch kind + "." + property {
	case name + ".Service.MainPID":
		return dbus.MakeVariant(uint32(u.mainPID)), nil
	case name + ".Unit.Job":
		if u.job == "" {
			return dbus.MakeVariant(job{Path: "/"}), nil
		}
		return dbus.MakeVariant(job{ID: 1, Path: jobPath}), nil
	case name + ".Job.JobType":
		return dbus.MakeVariant(u.job), nil
	}
	return dbus.Variant{}, dbus.MakeFailedError(fmt.Errorf("unknown property %s.%s", kind, property))
}

func (u *Unit) export(conn *dbus.Conn) error {
	return errors.Join(conn.Export(u, managerPath, name+".Manager"), conn.Export(u, unitPath, properties),
		conn.Export(u, jobPath, properties))
}

const busConfig = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path=%s</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/></policy>
</busconfig>
`

// StartBus runs a dbus-daemon with the name of systemd until the test ends, and returns the path of
// its socket.
func StartBus(t testing.TB, u *Unit) string {
	t.Helper()
	kit.NeedsPrograms(t, "dbus-daemon")
	dir := t.TempDir()
	socket, config := filepath.Join(dir, "bus"), filepath.Join(dir, "bus.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, busConfig, socket), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("dbus-daemon", "--config-file="+config, "--nofork", "--nopidfile", "--print-address")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil { // the bus listens
		t.Fatal(err)
	}
	conn, err := dbus.Connect("unix:path=" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := u.export(conn); err != nil {
		t.Fatal(err)
	}
	if r, err := conn.RequestName(name, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("request of the name %s: got %v, %v", name, r, err)
	}
	return socket
}

// StartPrivate serves a socket like /run/systemd/private until the test ends, and returns its path.
// There is no message bus: a message that only a bus knows fails.
func StartPrivate(t testing.TB, u *Unit) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "private")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if err := servePrivate(c, u); err != nil {
				t.Errorf("private socket: %v", err)
			}
		}
	})
	t.Cleanup(func() { l.Close(); serving.Wait() })
	return socket
}

// servePrivate authenticates a client. Another goroutine then serves it until it disconnects.
func servePrivate(c net.Conn, u *Unit) error {
	for _, step := range [][2]string{{"\x00AUTH\r\n", "REJECTED EXTERNAL\r\n"},
		{"AUTH EXTERNAL\r\n", "DATA\r\n"}, {"DATA\r\n", "OK 0123456789abcdef\r\n"}, {"BEGIN\r\n", ""}} {
		got := make([]byte, len(step[0]))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != step[0] {
			c.Close()
			return fmt.Errorf("authentication: got %q, %w; want %q", got, err, step[0])
		}
		if _, err := io.WriteString(c, step[1]); err != nil {
			c.Close()
			return err
		}
	}
	// The library has only clients: it authenticates with a script.
	s := &scripted{Conn: c, script: strings.NewReader("REJECTED EXTERNAL\r\nOK 0123456789abcdef\r\n")}
	conn, err := dbus.NewConn(s)
	if err != nil {
		c.Close()
		return err
	}
	// The end of the connection of the client ends conn.
	return errors.Join(u.export(conn), conn.Auth([]dbus.Auth{dbus.AuthExternal("0")}))
}

// A scripted is a connection whose authentication is a script.
type scripted struct {
	net.Conn
	script *strings.Reader
	begun  bool
}

func (s *scripted) Read(b []byte) (int, error) {
	if n, err := s.script.Read(b); err == nil {
		return n, nil
	}
	return s.Conn.Read(b)
}

func (s *scripted) Write(b []byte) (int, error) {
	if s.begun {
		return s.Conn.Write(b)
	}
	s.begun = bytes.Contains(b, []byte("BEGIN"))
	return len(b), nil
}
