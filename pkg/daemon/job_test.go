package daemon

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit/systemd"
)

// TestUnitJob asks for the job on a real message bus and on a private socket.
func TestUnitJob(t *testing.T) {
	unit := &systemd.Unit{}
	for name, b := range map[string]bus{
		"system bus":     {path: systemd.StartBus(t, unit)},
		"private socket": {path: systemd.StartPrivate(t, unit), private: true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, job := range []string{"restart", "stop", "", "start"} {
				unit.Set(os.Getpid(), job)
				got, err := unitJob(os.Getpid(), []bus{b}, time.Minute)
				if err != nil || got != job {
					t.Errorf("got job %q and error %v, want %q", got, err, job)
				}
			}
			unit.Set(1, "restart")
			if got, err := unitJob(os.Getpid(), []bus{b}, time.Minute); err == nil ||
				!strings.Contains(err.Error(), "main process") || got != "" {
				t.Errorf("unit of another process: got job %q and error %v, want an error", got, err)
			}
		})
	}
}

// TestUnitJobTriesNextBus checks that a bus without systemd, and one that does not answer, do not
// keep the next one from answering, and that without any answer the error names all of them.
func TestUnitJobTriesNextBus(t *testing.T) {
	unit := &systemd.Unit{}
	unit.Set(os.Getpid(), "restart")
	silent := filepath.Join(t.TempDir(), "silent")
	l, err := net.Listen("unix", silent) // accepts connections in its backlog only
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	without := []bus{{path: filepath.Join(t.TempDir(), "none"), private: true}, {path: silent}}
	begin := time.Now()
	job, err := unitJob(os.Getpid(), append(without, bus{path: systemd.StartBus(t, unit)}), 3*time.Second)
	if err != nil || job != "restart" {
		t.Errorf("got job %q and error %v, want restart", job, err)
	}
	_, err = unitJob(os.Getpid(), without, 500*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), without[0].path) || !strings.Contains(err.Error(), silent) ||
		!strings.Contains(err.Error(), "no answer in time") {
		t.Errorf("got error %v, want both sockets", err)
	}
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("took %v, want the timeouts", d)
	}
}

func TestSystemBusOfEnvironment(t *testing.T) {
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/x/bus,guid=0123")
	if b := systemdBuses(); len(b) != 2 || b[0] != (bus{privateBus, true}) || b[1] != (bus{path: "/x/bus"}) {
		t.Errorf("got %+v, want the private socket and /x/bus", b)
	}
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "")
	if b := systemdBuses(); b[1].path != systemBus {
		t.Errorf("got %+v, want %s", b, systemBus)
	}
}
