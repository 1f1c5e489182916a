package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"
	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
)

// Run runs a daemon until ctx ends or a listener fails, and then unmounts all mounts. It notifies
// systemd (sd_notify(3)) when the daemon is ready and when it stops.
func Run(ctx context.Context, cfg Config, log hclog.Logger) error {
	d, err := Start(cfg, log)
	if err != nil {
		return err
	}
	if err := mount.CheckPrivilege(); err != nil {
		log.Warn("every mount will fail", "reason", err)
	}
	if on, err := isIOFlusher(); err != nil || !on {
		log.Warn("when memory is short, the daemon may wait for writes to its own mounts", "error", flusherError(err))
	}
	if err := lockMemory(); err != nil {
		log.Info("the memory of the daemon is not locked", "reason", err)
	}
	switch dirs, err := mount.Mounted(); {
	case err != nil:
		log.Warn("read of the mount table failed", "error", err)
	case len(dirs) > 0:
		log.Warn("other processes own nfsrdma mounts; remove those of a killed daemon with umount(8)", "dirs", dirs)
	}
	notify(log, sdnotify.SdNotifyReady+"\nSTATUS="+d.statusLine())
	for running := true; running; {
		select {
		case <-d.metrics.changed:
			notify(log, "STATUS="+d.statusLine())
		case <-ctx.Done():
			running, err = false, nil
		case err = <-d.failed:
			running = false
		}
	}
	notify(log, fmt.Sprintf("%s\nSTATUS=unmounting\nEXTEND_TIMEOUT_USEC=%d", sdnotify.SdNotifyStopping,
		stopTime(cfg).Microseconds()))
	return errors.Join(err, d.Close())
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
	return status
}

// stopTime returns the bound of [Daemon.Close].
func stopTime(cfg Config) time.Duration {
	return cfg.ShutdownTimeout.Std() + mount.CloseGrace + 2*httpGrace
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
		Faults: plan, Quiet: true, DirtyBytes: int64(cfg.DirtyBytes), LockListen: string(cfg.NLMListen)})
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
