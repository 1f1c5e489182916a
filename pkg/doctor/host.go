package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/mount"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/rdmacore"
)

// Program numbers at the port mapper.
const (
	programNFS, versionNFS     = 100003, 3
	programMount, versionMount = 100005, 3
	programNSM, versionNSM     = 100024, 1
)

// A host has the checks of this host.
type host struct {
	cfg     *Config
	client  *control.Client
	devices []verbs.DeviceAttrs
}

// steps returns the checks of this host. For each mount of the daemon there is a step that contacts
// the lock service of its server.
func (h *host) steps(ctx context.Context) []step {
	card := h.cfg.Options.NeedsCard()
	return append([]step{
		{name: "privilege", needed: true, run: h.privilege},
		{name: "kernel", run: h.kernel},
		{name: "softiwarp", run: func(context.Context) finding { return ok("built in; needs only TCP") }},
		{name: "rdma-libraries", needed: card, run: h.libraries},
		{name: "rdma-devices", needs: []string{"rdma-libraries"}, needed: card, run: h.rdmaDevices},
		{name: "locked-memory", run: h.lockedMemory},
		{name: "lock-callbacks", run: h.lockCallbacks},
		{name: "configuration", run: h.configuration},
		{name: "daemon", run: h.daemon},
	}, h.mountLocks(ctx)...)
}

func (h *host) privilege(context.Context) finding {
	if err := mount.CheckPrivilege(); err != nil {
		return fail(err, "")
	}
	return ok("CAP_SYS_ADMIN and /dev/fuse are available")
}

// features are functions of the kernel that the program uses if the kernel has them, by the first
// release with them.
var features = []struct {
	major, minor int
	without      string
}{
	{6, 6, "no option writeback"},
	{6, 9, "requests of a killed daemon are kept in shared memory instead of being sent again by the kernel"},
}

func (h *host) kernel(context.Context) finding {
	release := kernelRelease()
	var missing []string
	for _, f := range features {
		if !atLeast(release, f.major, f.minor) {
			missing = append(missing, fmt.Sprintf("before Linux %d.%d: %s", f.major, f.minor, f.without))
		}
	}
	if len(missing) == 0 {
		return ok("Linux %s has all functions of FUSE that the program uses", release)
	}
	return warn("use a newer kernel if you need these functions", "Linux %s; %s", release, strings.Join(missing, "; "))
}

// kernelRelease returns the release of the running kernel, or "" if it is unknown.
func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return ""
	}
	return unix.ByteSliceToString(name.Release[:])
}

// atLeast reports whether a kernel is of the release major.minor or later. The name begins with two
// numbers, for example 6.12.117+deb12-amd64 or 6.19-amd64. atLeast reports false for other names.
func atLeast(name string, major, minor int) bool {
	var gotMajor, gotMinor int
	if n, err := fmt.Sscanf(name, "%d.%d", &gotMajor, &gotMinor); n != 2 || err != nil {
		return false
	}
	return gotMajor > major || gotMajor == major && gotMinor >= minor
}

func (h *host) libraries(context.Context) finding {
	err := rdmacore.Available()
	if err == nil {
		return ok("libibverbs and librdmacm are loaded, and the connection manager of the kernel answers")
	}
	f := fail(err, "")
	f.text = strings.TrimPrefix(f.text, rdmacore.Name+": ")
	if !h.cfg.Options.NeedsCard() { // a host without cards needs no libraries
		return skip("rdma-core is not used: %s; %s", f.text, f.remedy)
	}
	return f
}

func (h *host) rdmaDevices(context.Context) finding {
	var err error
	if h.devices, err = rdmacore.Devices(); err != nil {
		return fail(fmt.Errorf("list RDMA devices: %w", err), "")
	}
	if len(h.devices) == 0 {
		return fail(errors.New("no RDMA device; load the driver of the card, or add a software device with "+
			"\"rdma link add\""), "")
	}
	var l []string
	for i := range h.devices {
		l = append(l, describeDevice(&h.devices[i]))
	}
	return ok("%s", strings.Join(l, "; "))
}

// describeDevice describes a device and how it registers memory.
func describeDevice(d *verbs.DeviceAttrs) string {
	how := "fast registration"
	switch {
	case d.Caps.Has(verbs.CapMemWindow2B):
		how = "type-2 memory windows"
	case d.Caps.Has(verbs.CapPerIOReg):
		how = "registration for each use"
	}
	return fmt.Sprintf("%s (%v, %s)", d.Name, d.Transport, how)
}

// pinnedEstimate is the memory in bytes that a mount has registered besides dirty data: the buffers
// of messages and of long replies.
const pinnedEstimate = 64 << 20

// lockedMemory checks RLIMIT_MEMLOCK, which bounds the memory that cards can reach. The limit of
// the daemon may differ: that of a unit is LimitMEMLOCK=.
func (h *host) lockedMemory(context.Context) finding {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return fail(fmt.Errorf("read RLIMIT_MEMLOCK: %w", err), "")
	}
	switch want := uint64(h.cfg.Options.DirtyBytes) + pinnedEstimate; {
	case limit.Cur == unix.RLIM_INFINITY:
		return ok("no limit of locked memory for this process")
	case limit.Cur < want && len(h.devices) > 0:
		return warn("set LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
			"at most %d KiB of locked memory for this process; a mount over an RDMA device needs about %d KiB",
			limit.Cur>>10, want>>10)
	}
	return ok("at most %d KiB of locked memory for this process; softiwarp needs none", limit.Cur>>10)
}

// lockCallbacks checks how servers reach this host about locks. The daemon registers at the port
// mapper of this host, and is its own status monitor unless rpc.statd runs.
func (h *host) lockCallbacks(ctx context.Context) finding {
	if h.cfg.Spec != nil && h.cfg.Options.LocksAreLocal() {
		return skip("all locks are local to this host (local_lock=all)")
	}
	port, err := mountd.GetPort(ctx, mountd.Args{Host: "127.0.0.1", Timeout: h.cfg.Timeout}, programNSM, versionNSM)
	var e *mountd.Error
	switch {
	case err == nil:
		return ok("the port mapper of this host answers; a status monitor is registered at port %d", port)
	case errors.As(err, &e) && e.Kind == mountd.NotRegistered:
		return ok("the port mapper of this host answers; without rpc.statd the daemon is the status monitor")
	case errors.Is(err, syscall.ECONNREFUSED):
		return warn("start rpcbind on this host, or mount with nolock",
			"no port mapper on this host: servers cannot call back, and waiting locks are polled")
	}
	return fail(fmt.Errorf("port mapper of this host: %w", err), "restart rpcbind on this host")
}

// configuration checks the configuration file, with which the next daemon starts. The daemon that
// runs may have started with another one.
func (h *host) configuration(context.Context) finding {
	switch err := h.cfg.ConfigError; {
	case errors.Is(err, fs.ErrNotExist):
		return skip("there is no file %s; the steps use the defaults of the daemon", h.cfg.ConfigFile)
	case err != nil:
		f := fail(err, "")
		f.text += "; the daemon does not start with this file"
		if f.remedy == "" {
			f.remedy = "correct the value"
		}
		return f
	}
	return ok("%s is valid", h.cfg.ConfigFile)
}

func (h *host) daemon(ctx context.Context) finding {
	l, err := h.client.List(ctx)
	if err != nil {
		return fail(err, "")
	}
	f := ok("running at %s, mounts: %d", h.cfg.Socket, len(l))
	if n := control.NotKept(l); len(n) > 0 {
		f.add(fail(fmt.Errorf("%d of them would end with the daemon: %s", len(n), n[0].NotKept), ""))
	}
	if v, err := h.client.Version(ctx); err == nil && v.MetricsError != "" {
		f.add(fail(errors.New(v.MetricsError), ""))
	}
	return f
}

// mountLocks returns a step for each mount of the daemon. It contacts the lock service of the
// server.
func (h *host) mountLocks(ctx context.Context) (all []step) {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.Timeout)
	defer cancel()
	mounts, err := h.client.Status(ctx, "")
	if err != nil {
		return nil // the step daemon reports the error
	}
	for i := range mounts {
		all = append(all, step{name: "mount-locks", run: func(ctx context.Context) finding {
			return checkMountLocks(ctx, &mounts[i])
		}})
	}
	return all
}

func checkMountLocks(ctx context.Context, m *control.MountStatus) finding {
	if m.Locks.Local == "all" {
		return ok("%s: all local to this host (local_lock=all)", m.Dir)
	}
	if err := mount.CheckLocks(ctx, &m.MountInfo); err != nil {
		return fail(fmt.Errorf("%s: %w", m.Dir, err), "")
	}
	return ok("%s: the lock service of the server replies; %s", m.Dir, m.Locks.Notices)
}
