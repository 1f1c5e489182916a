package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
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

// TestUnitJobTriesNextBus checks that a bus without systemd does not keep the next one from
// answering, and that without any answer the error names all of them.
func TestUnitJobTriesNextBus(t *testing.T) {
	unit := &systemd.Unit{}
	unit.Set(os.Getpid(), "restart")
	silent := filepath.Join(t.TempDir(), "silent")
	l, err := net.Listen("unix", silent) // accepts connections in its backlog only
	kit.Must(t, err)
	defer l.Close()
	none := bus{path: filepath.Join(t.TempDir(), "none"), private: true}
	job, err := unitJob(os.Getpid(), []bus{none, {path: systemd.StartBus(t, unit)}}, kit.Timeout)
	if err != nil || job != "restart" {
		t.Errorf("got job %q and error %v, want restart", job, err)
	}
	_, err = unitJob(os.Getpid(), []bus{none, {path: silent}}, 100*time.Millisecond)
	if !errors.Is(err, errNoAnswer) || !strings.Contains(err.Error(), none.path) ||
		!strings.Contains(err.Error(), silent) {
		t.Errorf("got error %v, want both sockets, and no answer in time", err)
	}
}

// TestServiceLeavesMounts checks when the mounts stay after SIGTERM of a service.
func TestServiceLeavesMounts(t *testing.T) {
	for _, tt := range []struct {
		job  string
		err  error
		want bool
		log  string
	}{
		{"restart", nil, true, "job=restart"},
		{"stop", nil, false, "job=stop"},
		{"", nil, false, "stop of the unit"},
		{"", fmt.Errorf("/run/x: %w", errNoAnswer), true, "systemd does not answer whether it restarts the unit"},
		{"", errors.New("no bus"), false, "does not tell whether it restarts the unit"},
	} {
		var log bytes.Buffer
		d := &Daemon{log: hclog.New(&hclog.LoggerOptions{Output: &log}), cfg: DefaultConfig()}
		if got := d.leavesFor(tt.job, tt.err); got != tt.want || !strings.Contains(log.String(), tt.log) {
			t.Errorf("job %q, error %v: the mounts stay: %v, log %s; want %v and %q", tt.job, tt.err, got, &log,
				tt.want, tt.log)
		}
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
