package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
)

const (
	// jobTimeout bounds the question for the job of the unit, over all buses.
	jobTimeout = 10 * time.Second
	// jobRestart is the type of a job that starts the unit again after the stop.
	jobRestart = "restart"

	privateBus = "/run/systemd/private" // of systemd, for root
	systemBus  = "/run/dbus/system_bus_socket"

	systemdName    = "org.freedesktop.systemd1"
	systemdManager = "/org/freedesktop/systemd1"
)

// A bus is a unix socket at which systemd answers D-Bus messages.
type bus struct {
	path    string
	private bool // no message bus: systemd is the peer
}

// systemdBuses returns the sockets at which systemd answers, the preferred first. The environment
// may name another system bus, as for all programs that use D-Bus.
func systemdBuses() []bus {
	system := systemBus
	if path, ok := strings.CutPrefix(os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"), "unix:path="); ok {
		system, _, _ = strings.Cut(path, ",")
	}
	return []bus{{path: privateBus, private: true}, {path: system}}
}

// errNoAnswer means that something listens where systemd should, and does not answer in time.
var errNoAnswer = errors.New("no answer in time")

// unitJob asks systemd for the type of the pending job of the unit whose main process is pid: for
// example "stop" or "restart", "" for none. It asks each bus until one answers, and takes at most
// timeout.
func unitJob(pid int, buses []bus, timeout time.Duration) (string, error) {
	var failed error
	deadline := time.Now().Add(timeout)
	for i, b := range buses {
		share := time.Until(deadline) / time.Duration(len(buses)-i)
		ctx, cancel := context.WithTimeout(context.Background(), share)
		job, err := b.unitJob(ctx, pid)
		if err != nil && ctx.Err() != nil {
			err = errNoAnswer // otherwise: connection closed
		}
		cancel()
		if err == nil {
			return job, nil
		}
		failed = errors.Join(failed, fmt.Errorf("ask systemd at %s: %w", b.path, err))
	}
	return "", failed
}

func (b bus) unitJob(ctx context.Context, pid int) (string, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", b.path)
	if err != nil {
		return "", err
	}
	conn, err := dbus.NewConn(c, dbus.WithContext(ctx)) // the end of ctx closes the connection
	if err != nil {
		c.Close()
		return "", err
	}
	defer conn.Close()
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
		return "", err
	}
	if !b.private {
		if err := conn.Hello(); err != nil {
			return "", err
		}
	}
	return jobOf(ctx, conn, pid)
}

// jobOf asks for the job of the unit of pid: org.freedesktop.systemd1(5).
func jobOf(ctx context.Context, conn *dbus.Conn, pid int) (string, error) {
	var unit dbus.ObjectPath
	err := conn.Object(systemdName, systemdManager).CallWithContext(ctx, systemdName+".Manager.GetUnitByPID", 0,
		uint32(pid)).Store(&unit)
	if err != nil {
		return "", fmt.Errorf("find the unit of pid %d: %w", pid, err)
	}
	var mainPID uint32
	var job struct {
		ID   uint32
		Path dbus.ObjectPath
	}
	get := func(path dbus.ObjectPath, kind, name string, to any) error {
		var v dbus.Variant
		err := conn.Object(systemdName, path).CallWithContext(ctx, "org.freedesktop.DBus.Properties.Get", 0,
			systemdName+"."+kind, name).Store(&v)
		if err == nil {
			err = v.Store(to)
		}
		if err != nil {
			return fmt.Errorf("read %s of %s: %w", name, path, err)
		}
		return nil
	}
	if err := get(unit, "Service", "MainPID", &mainPID); err != nil {
		return "", err
	}
	// A unit around the service, such as the one of a user manager, has other jobs.
	if int(mainPID) != pid {
		return "", fmt.Errorf("main process of %s: got pid %d, want %d", unit, mainPID, pid)
	}
	if err := get(unit, "Unit", "Job", &job); err != nil || job.ID == 0 {
		return "", err
	}
	var kind string
	err = get(job.Path, "Job", "JobType", &kind)
	return kind, err
}
