package mount

import (
	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/virtiofs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs"
)

// A guestServer serves a file system to a virtual machine.
type guestServer struct {
	*virtiofs.Server
	fs *vfs.FS
}

// serveGuest makes the socket of the share, or continues the share of an earlier process.
func (s *mountStack) serveGuest(log hclog.Logger) (frontServer, error) {
	debug := log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug})
	c := virtiofs.Config{Socket: s.dir, FS: s.fs, Options: s.fs.GuestOptions(debug),
		Log: log.Named("virtiofs").With("socket", s.dir)}
	c.Options.ReadOnly = s.opts.ReadOnly
	if s.keeper != nil {
		if s.left == nil {
			if s.keepError = s.keeper.putGuest(); s.keepError != nil {
				log.Warn("the share ends with the daemon: its connection cannot be kept", "socket", s.dir, "reason",
					s.keepError)
			}
		}
		c.State = s.keeper.guest
	}
	v, err := virtiofs.Listen(c)
	if err != nil {
		if c.State != nil {
			_ = c.State.Close()
			s.keeper.guest = nil
		}
		return nil, err
	}
	return &guestServer{v, s.fs}, nil
}

// Unmount removes the socket and ends the connection of the virtual machine. It returns EBUSY while
// a guest has the file system mounted.
func (g *guestServer) Unmount() error {
	if g.InUse() {
		return unix.EBUSY
	}
	return g.Close()
}

// UnmountLazy removes the socket. The mount ends with the virtual machine that is connected.
func (g *guestServer) UnmountLazy() error { return g.StopListening() }

// ForceUnmount ends all requests and the connection of the virtual machine. Data that is not
// written is lost.
func (g *guestServer) ForceUnmount() error {
	g.fs.Abort()
	return g.Close()
}
