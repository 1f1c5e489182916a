package csi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// probeTimeout bounds the wait for a server that does not reply.
const probeTimeout = 5 * time.Second

// errNoReply means that a volume did not reply within probeTimeout.
var errNoReply = errors.New("no reply")

// A prober calls statfs(2), which waits for the server of a mount, and gives up after a timeout. At
// most one call is in progress for each mount: callers share it. The goroutine of a call ends when
// the server replies, when the mount is aborted, or with the process.
type prober struct {
	timeout time.Duration
	mu      sync.Mutex
	probes  map[string]*probe // in progress, by directory
}

// A probe is one call of statfs(2). done is closed after the other fields are set.
type probe struct {
	done chan struct{}
	st   unix.Statfs_t
	err  error
}

// statfs returns the statistics of the file system at dir. The error is errNoReply after the
// timeout.
func (p *prober) statfs(ctx context.Context, dir string) (unix.Statfs_t, error) {
	c := p.start(dir)
	timer := time.NewTimer(p.timeout)
	defer timer.Stop()
	select {
	case <-c.done:
		return c.st, c.err
	case <-timer.C:
		return unix.Statfs_t{}, fmt.Errorf("%w in %v", errNoReply, p.timeout)
	case <-ctx.Done():
		return unix.Statfs_t{}, ctx.Err()
	}
}

// start starts a probe of dir, or returns the one in progress.
func (p *prober) start(dir string) *probe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.probes[dir]; c != nil {
		return c
	}
	c := &probe{done: make(chan struct{})}
	if p.probes == nil {
		p.probes = make(map[string]*probe)
	}
	p.probes[dir] = c
	go func() {
		c.err = unix.Statfs(dir, &c.st)
		for errors.Is(c.err, unix.EINTR) {
			c.err = unix.Statfs(dir, &c.st)
		}
		p.mu.Lock()
		delete(p.probes, dir)
		p.mu.Unlock()
		close(c.done)
	}()
	return c
}

// isDead reports whether the daemon of the mount at dir has ended, and its connection to the kernel
// with it. A mount that does not reply is not dead.
func (d *Driver) isDead(ctx context.Context, dir string) bool {
	_, err := d.prober.statfs(ctx, dir)
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
}

// probeDir returns the directory at which the file system dev is probed: the staging path, which is
// mounted first. A probe in progress keeps its mount busy, and must not keep a target path busy.
func probeDir(dev device, dir string) string {
	if dirs, err := mountsOf(dev); err == nil && len(dirs) > 0 {
		return dirs[0]
	}
	return dir
}

// usageOf returns the statistics of a file system in the form of CSI.
func usageOf(st *unix.Statfs_t) []*csi.VolumeUsage {
	size := uint64(st.Bsize)
	if st.Frsize > 0 {
		size = uint64(st.Frsize)
	}
	usage := []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: clamp(st.Blocks, size),
		Available: clamp(st.Bavail, size), Used: clamp(st.Blocks-min(st.Bfree, st.Blocks), size)}}
	if st.Files > 0 {
		usage = append(usage, &csi.VolumeUsage{Unit: csi.VolumeUsage_INODES, Total: clamp(st.Files, 1),
			Available: clamp(st.Ffree, 1), Used: clamp(st.Files-min(st.Ffree, st.Files), 1)})
	}
	return usage
}

// clamp returns n*size, or the largest int64 if that is less. The numbers come from a server.
func clamp(n, size uint64) int64 {
	const most = 1<<63 - 1
	if size != 0 && n > most/size {
		return most
	}
	return int64(n * size)
}

// Reasons of a volume that is not accessible.
const (
	reasonNoReply    = "ServerNotResponding"
	reasonMountEnded = "MountEnded"
	reasonMountError = "MountFailed"
	reasonDaemon     = "DaemonNotRunning"
)

// condition returns the reason why the mount at dir is not accessible, and "" if it is. It takes
// little longer than the timeout of the prober.
func (d *Driver) condition(ctx context.Context, dir string) (reason, message string) {
	_, err := d.prober.statfs(ctx, dir)
	switch {
	case err == nil:
		return "", ""
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ECONNABORTED):
		return reasonMountEnded, "the daemon that served the mount has ended; restart the pods that use the volume"
	case !errors.Is(err, errNoReply):
		return reasonMountError, control.OneLine(err.Error())
	}
	message = "the server does not reply"
	l, err := d.client.Status(ctx, dir)
	if err != nil {
		return reasonDaemon, control.OneLine(err.Error())
	}
	for i := range l {
		message += fmt.Sprintf("; mount %s, connection %s", l[i].State, l[i].Connection)
		for _, cause := range []string{l[i].Failure, l[i].Reason, l[i].LastError} {
			if cause != "" {
				message += ": " + control.OneLine(cause)
				break
			}
		}
	}
	return reasonNoReply, message
}
