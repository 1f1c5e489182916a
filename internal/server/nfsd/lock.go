package nfsd

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// lockCall executes a call of NLM or NSM.
func (s *Server) lockCall(ctx context.Context, peer netip.AddrPort, h *sunrpc.CallHeader, args, reply []byte,
	nowait bool) ([]byte, error) {
	if h.Proc != 0 && !s.allows(peer) {
		return sunrpc.AppendDeniedReply(reply, h.XID, sunrpc.AuthTooWeak), nil
	}
	if nowait && h.Proc != 0 {
		return nil, errNotNow // it finds the file, and may write the state file
	}
	if !nowait {
		release, err := s.slot(ctx)
		if err != nil {
			return nil, err
		}
		defer release()
	}
	if h.Prog == nlmwire.Program {
		return s.locks.ServeNLM(peer.Addr(), h, args, reply), nil
	}
	return s.locks.ServeNSM(peer.Addr(), h, args, reply), nil
}

// lockState is the path of the file that tells the next server of this export about held locks.
func (s *Server) lockState() string {
	if s.cfg.StateDir == "" {
		return ""
	}
	return filepath.Join(s.cfg.StateDir, fmt.Sprintf("locks-%x", s.cookies[:]))
}

// checkLock checks that the caller may lock a file: the caller may read or write the file, or owns
// it.
func (s *Server) checkLock(h *sunrpc.CallHeader, fh *nfs3.FH) nlmwire.Stat {
	who, ok := credOf(h, s.cfg.NoRootSquash)
	if !ok {
		return nlmwire.Failed
	}
	if !s.id.switches {
		who = cred{uid: s.id.uid, gid: s.id.gid}
	}
	o, status := s.object(fh)
	switch {
	case status == nfs3.ErrStale || status == nfs3.ErrBadHandle:
		return nlmwire.StaleFH
	case status != nfs3.OK:
		return nlmwire.Failed
	}
	defer s.objects.release(o)
	var st unix.Stat_t
	if o.kind != unix.S_IFREG {
		return nlmwire.Failed
	}
	if o.stat(&st) != nil {
		return nlmwire.StaleFH
	}
	bits, _, err := o.permissions(s.id, &who, &st)
	if err != nil {
		return nlmwire.Failed
	}
	if bits&(permRead|permWrite) == 0 && st.Uid != who.uid {
		return nlmwire.Failed // as a Linux server
	}
	return nlmwire.Granted
}
