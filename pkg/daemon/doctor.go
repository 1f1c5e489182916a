package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/front"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// A Finding is the result of one check of the doctor command.
type Finding struct {
	Subject string `json:"subject"`
	OK      bool   `json:"ok"`
	// Needed means that every mount fails unless OK. Other subjects are optional.
	Needed bool   `json:"needed"`
	Text   string `json:"text"` // the result, and what to do unless OK
}

// CheckHost checks what a mount needs on this host: the privilege, /dev/fuse, FUSE over io_uring,
// the daemon at the control socket, and RDMA devices. For each mount of the daemon, it contacts the
// lock service of the server.
func CheckHost(ctx context.Context, socket string) []Finding {
	c := control.NewClient(socket)
	return append([]Finding{checkFUSE(), checkURing(), checkDaemon(ctx, c, socket),
		{Subject: "softiwarp", OK: true, Text: "built in; needs only TCP"}, checkDevices()}, checkLocks(ctx, c)...)
}

func checkFUSE() Finding {
	f := Finding{Subject: "mounting", OK: true, Needed: true, Text: "CAP_SYS_ADMIN and /dev/fuse are available"}
	if err := mount.CheckPrivilege(); err != nil {
		f.OK, f.Text = false, err.Error()
	}
	return f
}

// checkURing checks what the mount option front=uring needs.
func checkURing() Finding {
	if err := front.URingAvailable(); err != nil {
		return Finding{Subject: "front=uring", Text: err.Error()}
	}
	return Finding{Subject: "front=uring", OK: true, Text: "FUSE over io_uring is available"}
}

func checkDaemon(ctx context.Context, c *control.Client, socket string) Finding {
	l, err := c.List(ctx)
	if err != nil {
		return Finding{Subject: "daemon", Text: err.Error()}
	}
	f := Finding{Subject: "daemon", OK: true, Text: fmt.Sprintf("running at %s, mounts: %d", socket, len(l))}
	if v, err := c.Version(ctx); err == nil && v.MetricsError != "" {
		f.OK, f.Text = false, f.Text+"; "+v.MetricsError
	}
	return f
}

func checkDevices() Finding {
	f := Finding{Subject: "rdma-core"}
	devices, err := rdmacore.Devices()
	var unavailable *rdmacore.UnavailableError
	switch {
	case errors.As(err, &unavailable):
		f.Text = strings.TrimPrefix(unavailable.Error(), rdmacore.Name+": ")
		return f
	case err != nil:
		f.Text = "list RDMA devices: " + err.Error()
		return f
	case len(devices) == 0:
		f.Text = "libraries found, but no RDMA device; load the driver of the card, " +
			"or add a software device with \"rdma link add\""
		return f
	}
	var names []string
	for _, d := range devices {
		names = append(names, fmt.Sprintf("%s (%v)", d.Name, d.Transport))
	}
	f.OK, f.Text = true, "devices: "+strings.Join(names, ", ")
	return f
}

// checkLocks checks the locks of each mount of the daemon.
func checkLocks(ctx context.Context, c *control.Client) (all []Finding) {
	mounts, err := c.Status(ctx, "")
	if err != nil {
		return nil // checkDaemon reports the error
	}
	for i := range mounts {
		m := &mounts[i]
		f := Finding{Subject: "locks", OK: true, Text: m.Dir + ": all local to this host (local_lock=all)"}
		if m.Locks.Local != "all" {
			f.Text = m.Dir + ": the lock service of the server replies; " + m.Locks.Notices
			if err := mount.CheckLocks(ctx, &m.MountInfo); err != nil {
				f.OK, f.Text = false, m.Dir+": "+err.Error()
			}
		}
		all = append(all, f)
	}
	return all
}
