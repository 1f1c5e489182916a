package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"
	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// Run runs a daemon until ctx ends, a client requests the stop, or a listener fails. It then
// unmounts all mounts, or leaves them to the next daemon: on request, when systemd restarts the
// unit, and when a listener fails. It notifies systemd (sd_notify(3)) when the daemon is ready and
// when it stops. After Run the process must exit.
func Run(ctx context.Context, cfg Config, log hclog.Logger) error {
	d, err := Start(cfg, log)
	if err != nil {
		return err
	}
	d.checkHost()
	notify(log, sdnotify.SdNotifyReady+"\nSTATUS="+d.statusLine())
	stopFeeding := d.feedWatchdog()
	defer stopFeeding()
	leave, err := d.wait(ctx)
	notify(log, fmt.Sprintf("%s\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC=%d", sdnotify.SdNotifyStopping,
		stopTime(cfg).Microseconds()))
	if leave() {
		notify(log, "STATUS=stopping; the mounts stay")
		return errors.Join(err, d.Leave())
	}
	notify(log, "STATUS=unmounting")
	return errors.Join(err, d.Close())
}

// wait returns when the daemon must end. leave decides whether the mounts stay; it may ask systemd.
func (d *Daemon) wait(ctx context.Context) (leave func() bool, err error) {
	tick := time.NewTicker(statusInterval)
	defer tick.Stop()
	shown := d.statusLine()
	for {
		select {
		case <-tick.C:
			if line := d.statusLine(); line != shown {
				shown = line
				notify(d.log, "STATUS="+line)
			}
		case r := <-d.requests:
			return func() bool { return r.KeepMounts }, nil
		case <-ctx.Done():
			if d.ending.CompareAndSwap(false, true) {
				return d.leavesMounts, nil
			}
			r := <-d.requests // the request came first
			return func() bool { return r.KeepMounts }, nil
		case err := <-d.failed:
			return func() bool { return d.store != nil }, err
		}
	}
}

// checkHost logs what this host lacks, and mounts that no daemon serves.
func (d *Daemon) checkHost() {
	if err := mount.CheckPrivilege(); err != nil {
		d.log.Warn("every mount will fail", "reason", err)
	}
	if on, err := isIOFlusher(); err != nil || !on {
		d.log.Warn("when memory is short, the daemon may wait for writes to its own mounts", "error", flusherError(err))
	}
	if mask, err := unneededCapabilities(); err != nil || mask != 0 {
		d.log.Warn("the daemon has capabilities that it does not need; add CAP_SETPCAP or restrict the bounding set",
			"capabilities", capabilityNumbers(mask), "error", err)
	}
	if err := lockMemory(); err != nil {
		d.log.Info("the memory of the daemon is not locked", "reason", err)
	}
	dirs, err := mount.Mounted()
	if err != nil {
		d.log.Warn("read of the mount table failed", "error", err)
	}
	if dirs = foreign(dirs, d.table.List()); len(dirs) > 0 {
		d.log.Warn("other processes own nfsrdma mounts; remove those of a killed daemon with umount(8)", "dirs", dirs)
	}
}

// foreign returns the mount points of dirs that are not in the table of this daemon. The mounts
// that this daemon continues are in the table.
func foreign(dirs []string, own []control.MountInfo) []string {
	return slices.DeleteFunc(dirs, func(dir string) bool {
		return slices.ContainsFunc(own, func(m control.MountInfo) bool { return m.Dir == dir })
	})
}

// statusLine describes the state of the daemon for systemctl(1).
func (d *Daemon) statusLine() string {
	status := "serving " + string(d.cfg.ControlSocket)
	if d.inject != "" {
		status = control.FaultBanner + d.inject
	}
	if problem := d.metrics.problem(); problem != "" {
		status += "; " + problem
	}
	if problem := mountProblems(d.table.List()); problem != "" {
		status += "; " + problem
	}
	if err := d.notKept(); err != nil {
		status += "; " + err.Error()
	}
	return status
}

// mountProblems describes the mounts that do not answer, or returns "".
func mountProblems(l []control.MountInfo) string {
	l = slices.DeleteFunc(l, func(m control.MountInfo) bool {
		switch m.State {
		case control.StateStalled, control.StateFailed, control.StateKept:
			return false
		}
		return m.Stalled == 0 // of a mount in StateRestoring or StateUnmounting
	})
	if len(l) == 0 {
		return ""
	}
	m := &l[0]
	text := fmt.Sprintf("%s is %s: %s", m.Dir, m.State, cmp.Or(m.Failure, m.Reason))
	switch more := len(l) - 1; more {
	case 0:
	case 1:
		text += "; 1 more mount does not answer"
	default:
		text += fmt.Sprintf("; %d more mounts do not answer", more)
	}
	return strings.ToValidUTF8(control.OneLine(text), "?")
}

// stopTime bounds the end of the daemon: the question for the job, and [Daemon.Close].
func stopTime(cfg Config) time.Duration {
	return jobTimeout + cfg.ShutdownTimeout.Std() + mount.CloseGrace + 2*httpGrace
}

func notify(log hclog.Logger, state string) {
	if _, err := sdnotify.SdNotify(false, state); err != nil {
		log.Warn("notification of systemd failed", "error", err)
	}
}

// RunForeground executes r in this process and calls mounted. It serves the mount until ctx ends or
// the mount is unmounted. It returns an error if written data is lost; the log names the files.
func RunForeground(ctx context.Context, cfg Config, log hclog.Logger, r control.MountRequest,
	mounted func(control.MountInfo)) (err error) {
	plan, err := mount.ParseFaults(string(cfg.Inject))
	if err != nil {
		return err
	}
	t := mount.NewTable(mount.TableConfig{Log: log, Base: mount.DefaultOptions(), Timeout: cfg.ConnectTimeout.Std(),
		Faults: plan, Quiet: true, DirtyBytes: int64(cfg.DirtyBytes), ConnectRate: int(cfg.ConnectRate),
		LockListen: string(cfg.NLMListen)})
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.ShutdownTimeout.Std())
		defer cancel()
		err = errors.Join(err, t.Close(ctx))
	}()
	info, err := t.Mount(ctx, r)
	if err != nil {
		return err
	}
	mounted(info)
	t.Wait(ctx, info.Dir)
	return t.LossError(0) // when another process unmounted; Close reports what it discards
}
