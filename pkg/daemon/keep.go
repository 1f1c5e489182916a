package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
)

const (
	// holderSuffix is that of the socket of the holder, beside the control socket. It is as short
	// as the bound of the path of a control socket requires.
	holderSuffix = ".fds"
	// HolderCommand is the command of this program that runs the holder.
	HolderCommand = "fd-holder"
	// NotifyHelperCommand is the command of this program that runs the notify helper.
	NotifyHelperCommand = "notify-helper"
	// selfExe names the running program also after an upgrade has replaced its file.
	selfExe = "/proc/self/exe"
	// leaveTimeout is the usual Daemon.writeTime.
	leaveTimeout = 2 * time.Second
	// busyTimeout is how long the daemon waits for a killed daemon whose exit is not complete. No
	// other daemon has the lock of the control socket.
	busyTimeout, busyInterval = 5 * time.Second, 100 * time.Millisecond
)

// errKeepOff is why a daemon with keep_mounts=false keeps no mounts.
var errKeepOff = errors.New("keep_mounts is false")

// openStore opens the store that keeps the mounts of this daemon. The caller has the lock of the
// control socket and has started no program. Without a store, mounts end with the daemon.
func (d *Daemon) openStore() error {
	socket := string(d.cfg.ControlSocket) + holderSuffix
	keep := bool(d.cfg.KeepMounts)
	if !keep && !mayHaveKept(socket) {
		d.noStore = errKeepOff
		return nil
	}
	cfg := fdstore.Config{Socket: socket, Command: []string{selfExe, HolderCommand}, Log: d.log}
	s, err := fdstore.Open(cfg)
	for end := time.Now().Add(busyTimeout); errors.Is(err, fdstore.ErrBusy) && time.Now().Before(end); {
		time.Sleep(busyInterval)
		s, err = fdstore.Open(cfg)
	}
	switch {
	case errors.Is(err, fdstore.ErrBusy):
		return control.Errorf(control.CodeSystem, "keep mounts: %w", err)
	case err != nil:
		d.noStore = err
		d.log.Warn("mounts end with the daemon: a restart or a crash is not possible without unmount", "reason", err)
		return nil
	case !keep && len(s.Kept()) == 0:
		d.noStore = errKeepOff
		return s.Close()
	case !keep:
		d.log.Warn("an earlier daemon kept mounts; keep_mounts=false applies after all mounts are unmounted " +
			"and the daemon is restarted")
	}
	d.store = s
	d.log.Info("mounts are kept for the next daemon", "store", s)
	return nil
}

// mayHaveKept reports whether an earlier daemon may have kept mounts in systemd or in the holder at
// socket.
func mayHaveKept(socket string) bool {
	_, err := os.Lstat(socket)
	return err == nil || os.Getenv("LISTEN_PID") == strconv.Itoa(os.Getpid())
}

// logRestored logs the mounts that the table continues.
func (d *Daemon) logRestored() {
	for _, m := range d.table.List() {
		d.log.Info("found a mount of an earlier daemon", "spec", m.Spec, "dir", m.Dir, "state", m.State)
	}
}

// keepFailure returns why the daemon has no store although keep_mounts is true.
func (d *Daemon) keepFailure() error {
	if errors.Is(d.noStore, errKeepOff) {
		return nil
	}
	return d.noStore
}

// notKept returns an error if mounts would end with the daemon although keep_mounts is true.
func (d *Daemon) notKept() error {
	l := control.NotKept(d.table.List())
	if len(l) == 0 {
		return nil
	}
	more := ""
	if len(l) > 1 {
		more = fmt.Sprintf(" and %d more", len(l)-1)
	}
	return fmt.Errorf("%s%s would end with the daemon: %s", l[0].Dir, more, l[0].NotKept)
}

// stop starts the end of the daemon on request of a client. The daemon refuses to keep mounts that
// would end with it.
func (d *Daemon) stop(r control.StopRequest) (control.StopInfo, error) {
	if r.KeepMounts {
		switch {
		case d.store == nil:
			return control.StopInfo{}, control.Errorf(control.CodeSystem,
				"stop: this daemon cannot keep its mounts: %w; stop without --keep-mounts", d.noStore)
		case fdstore.IsSystemd(d.store):
			return control.StopInfo{}, control.Errorf(control.CodeUsage, "stop: systemd ends the mounts of a stopped "+
				"service; use \"systemctl restart\", or stop without --keep-mounts")
		}
		err := d.store.Verify()
		if err == nil {
			err = d.notKept()
		}
		if err != nil {
			return control.StopInfo{}, control.Errorf(control.CodeSystem, "stop: the daemon cannot keep its mounts "+
				"and serves them further: %w; correct the cause and try again, or stop without --keep-mounts", err)
		}
	}
	if !d.ending.CompareAndSwap(false, true) {
		return control.StopInfo{}, control.Errorf(control.CodeSystem,
			"stop: the daemon is already stopping; see its log")
	}
	d.requests <- r
	return control.StopInfo{Timeout: stopTime(d.cfg).Seconds()}, nil
}

// leavesMounts reports whether the mounts stay after a signal to stop, because systemd restarts the
// unit. Only systemd knows: the signal of a stop is the same. systemd keeps the mounts until the
// next daemon starts; after a stop it ends them. When systemd does not answer in time, the mounts
// stay, and the daemon has the same time to write dirty data as before an unmount.
func (d *Daemon) leavesMounts() bool {
	if d.store == nil || !fdstore.IsSystemd(d.store) || len(d.table.List()) == 0 {
		return false
	}
	return d.leavesFor(unitJob(os.Getpid(), systemdBuses(), jobTimeout))
}

// leavesFor decides by the answer of systemd, or by the error of the question.
func (d *Daemon) leavesFor(job string, err error) bool {
	if errors.Is(err, errNoAnswer) {
		d.writeTime = d.cfg.ShutdownTimeout.Std()
		d.log.Warn("the mounts stay: systemd does not answer whether it restarts the unit; if it stops the unit, "+
			"remove the mounts with umount(8)", "error", control.OneLine(err.Error()))
		return true
	}
	if err != nil {
		d.log.Warn("unmounting: systemd does not tell whether it restarts the unit", "error",
			control.OneLine(err.Error()))
		return false
	}
	d.log.Info("stop of the unit", "job", job)
	return job == jobRestart
}

// Leave stops the daemon without unmounting: the mounts stay for the next daemon. It takes
// d.writeTime and a few seconds at most. The process must exit afterwards: the store and the mounts
// stay in use until then. If the store has lost the mounts and cannot get them again, Leave unmounts
// them as [Daemon.Close] does, and its error has the same meaning.
func (d *Daemon) Leave() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), d.writeTime)
	defer cancel()
	d.serving.Go(func() { shutdown(d.control) }) // ends requests that wait for a mount
	d.serving.Go(d.metrics.close)
	d.serving.Go(func() { d.closeTraces(traceLeaveGrace) })
	d.table.Leave(ctx)
	d.serving.Wait()
	lost := d.store.Verify()
	if lost != nil {
		d.log.Error("unmounting: the mounts cannot be kept", "reason", control.OneLine(lost.Error()))
		err = d.closeTable()
	}
	d.socket.Close()
	d.socket.Release()
	if lost == nil {
		d.log.Info("stopped; the mounts stay for the next daemon")
	}
	return err
}
