package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// A Finding is the answer to one of the doctor's questions.
type Finding struct {
	Subject string `json:"subject"`
	OK      bool   `json:"ok"`
	// Needed: without it nothing can be mounted. What is not needed only limits the choice.
	Needed bool   `json:"needed"`
	Text   string `json:"text"` // what was found, and what to do where it is not good
}

// CheckHost checks what mounting needs on this host: the privilege, /dev/fuse, the daemon at the
// control socket, RDMA devices. It asks no server.
func CheckHost(ctx context.Context, socket string) []Finding {
	return []Finding{examineFuse(), examineDaemon(ctx, socket),
		{Subject: "softiwarp", OK: true, Text: "built in; needs nothing of this host but TCP"}, examineDevices()}
}

func examineFuse() Finding {
	f := Finding{Subject: "mounting", OK: true, Needed: true, Text: "CAP_SYS_ADMIN and /dev/fuse are there"}
	if err := mount.CheckPrivilege(); err != nil {
		f.OK, f.Text = false, err.Error()
	}
	return f
}

func examineDaemon(ctx context.Context, socket string) Finding {
	l, err := control.NewClient(socket).List(ctx)
	if err != nil {
		return Finding{Subject: "daemon", Text: err.Error()}
	}
	return Finding{Subject: "daemon", OK: true, Text: fmt.Sprintf("answers at %s, mounts: %d", socket, len(l))}
}

func examineDevices() Finding {
	f := Finding{Subject: "rdma-core"}
	devices, err := rdmacore.Devices()
	var missing *rdmacore.UnavailableError
	switch {
	case errors.As(err, &missing):
		f.Text = strings.TrimPrefix(missing.Error(), rdmacore.Name+": ")
		return f
	case err != nil:
		f.Text = "listing RDMA devices: " + err.Error()
		return f
	case len(devices) == 0:
		f.Text = "the libraries are there, but no RDMA device: load the driver of the card, or \"rdma link add\" a soft one"
		return f
	}
	var names []string
	for _, d := range devices {
		names = append(names, fmt.Sprintf("%s (%v)", d.Name, d.Transport))
	}
	f.OK, f.Text = true, "devices: "+strings.Join(names, ", ")
	return f
}
