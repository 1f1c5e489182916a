package daemon

import (
	"sync"
	"time"

	sdnotify "github.com/coreos/go-systemd/v22/daemon"
)

const (
	// statusInterval is the time between updates of the status line.
	statusInterval = 2 * time.Second
	// feedsPerTimeout is how often the daemon notifies the watchdog of systemd within its timeout.
	feedsPerTimeout = 4
	// hangRetry is the longest time between two looks at a daemon that hangs.
	hangRetry = time.Second
	// lookLimit is the time since the last look at the mounts that is always accepted.
	lookLimit = 3 * time.Second
)

// feedWatchdog notifies the watchdog of systemd (WatchdogSec= in systemd.service(5)) while the
// daemon works, until stop is called. It does nothing without a watchdog. When the daemon hangs,
// systemd ends it with SIGABRT, which logs all stacks, and starts the next daemon, which continues
// the mounts.
func (d *Daemon) feedWatchdog() (stop func()) {
	timeout, err := sdnotify.SdWatchdogEnabled(false)
	if err != nil {
		d.log.Warn("the watchdog of systemd is not used", "reason", err)
	}
	if timeout <= 0 {
		return func() {}
	}
	stopped := make(chan struct{})
	var feeding sync.WaitGroup
	feeding.Go(func() {
		timer := time.NewTimer(0)
		defer timer.Stop()
		var hanging time.Time // zero while the daemon works
		logged := false
		for {
			select {
			case <-timer.C:
			case <-stopped:
				return
			}
			now := time.Now()
			switch {
			case d.works(timeout):
				notify(d.log, sdnotify.SdNotifyWatchdog)
				hanging, logged = time.Time{}, false
				timer.Reset(timeout / feedsPerTimeout)
				continue
			case hanging.IsZero():
				hanging = now
			case now.Sub(hanging) > timeout/feedsPerTimeout && !logged:
				logged = true
				d.log.Error("the daemon hangs: systemd ends it, and starts the next one", "timeout", timeout)
			}
			// A process that was stopped (SIGSTOP) works again soon.
			timer.Reset(min(hangRetry, timeout/feedsPerTimeout))
		}
	})
	return func() {
		close(stopped)
		feeding.Wait()
	}
}

// works reports whether the table of the mounts works: it looks at each mount about once a second,
// which takes the locks of the mount. Servers do not matter. A daemon that is stopping works: its
// steps have their own timeouts.
func (d *Daemon) works(timeout time.Duration) bool {
	looked := d.table.Looked()
	return looked.IsZero() || time.Since(looked) < max(timeout/2, lookLimit)
}
