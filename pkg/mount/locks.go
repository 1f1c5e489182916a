package mount

import (
	"cmp"
	"context"
	"net/netip"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm"
)

// newLocks returns the lock client of the mount, or nil if all locks are local. mountPort is the
// port of MOUNT.
func (s *mountStack) newLocks(host string, mountPort int, log hclog.Logger) *nlm.Client {
	if s.opts.LocksAreLocal() {
		return nil
	}
	c := nlm.Config{Host: s.mountArgs.Host, Caller: host, Port: int(s.opts.LockPort), MountPort: mountPort,
		MountPortFirst: s.opts.MountPort != 0, AnySourcePort: s.opts.NoResvPort, Service: s.shared.locks,
		Logger: log.Named("locks").With("mount", s.dir),
		Lost: func(fh nfs3.FH, _ nlm.Owner) {
			if fs := s.lockedFS.Load(); fs != nil {
				fs.LockLost(fh)
			}
		}}
	if s.opts.Recovery != RecoveryHard {
		c.GiveUp = s.opts.Timeout * time.Duration(s.opts.Retrans+1)
		c.GiveUpErr = syscall.EIO
		if s.opts.Recovery == RecoverySoftErr {
			c.GiveUpErr = syscall.ETIMEDOUT
		}
	}
	if s.keeper != nil {
		c.State = s.keeper.state.NewLocks()
	}
	return nlm.New(c)
}

// lockStatus describes the locks of the mount.
func (s *mountStack) lockStatus() control.LockStatus {
	st := control.LockStatus{Local: s.opts.LocalLock}
	if s.locks == nil {
		return st
	}
	st.Notices, st.LastError = s.shared.locks.Status(), s.locks.Reason()
	return st
}

// CheckLocks checks that the lock service of the server of a mount replies. A [nlm.NoServiceError]
// says why locks fail with ENOLCK. It contacts no server if all locks of the mount are local.
func CheckLocks(ctx context.Context, m *control.MountInfo) error {
	o, err := ParseOptions(DefaultOptions(), m.Options)
	if err != nil || o.LocksAreLocal() {
		return err
	}
	server, err := netip.ParseAddrPort(m.Server)
	if err != nil {
		return err
	}
	// The daemon found MOUNT at this port if the port mapper of the server does not know it.
	mountPort := cmp.Or(int(o.MountPort), mountd.MountPort)
	return nlm.CheckServer(ctx, nlm.Config{Host: server.Addr().String(), Port: int(o.LockPort), MountPort: mountPort,
		MountPortFirst: o.MountPort != 0, AnySourcePort: o.NoResvPort})
}
