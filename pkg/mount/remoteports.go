package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// rootTimeout bounds the question for the root handle at one address of the option remoteports.
const rootTimeout = 5 * time.Second

// addresses returns the RDMA addresses of the server. Connection i prefers address i, modulo their
// number.
func (s *mountStack) addresses() []netip.AddrPort { return s.opts.Addresses(s.address) }

// Addresses returns the RDMA addresses of the server: those of the option remoteports, or source,
// that of the mount source.
func (o *Options) Addresses(source netip.AddrPort) []netip.AddrPort {
	if len(o.RemotePorts) == 0 {
		return []netip.AddrPort{source}
	}
	all := make([]netip.AddrPort, len(o.RemotePorts))
	for i, a := range o.RemotePorts {
		all[i] = netip.AddrPortFrom(a, o.Port)
	}
	return all
}

// checkAddresses asks MOUNT at each address of the option remoteports for the handle of the export.
// An address that gives another handle than root, or refuses, belongs to another server: calls that
// are sent there would fail or change wrong files. An address without an answer is only logged.
func (s *mountStack) checkAddresses(ctx context.Context, root nfs3.FH, log hclog.Logger) error {
	errs := make([]error, len(s.opts.RemotePorts))
	var questions sync.WaitGroup
	for i, a := range s.opts.RemotePorts {
		if a.String() != s.mountArgs.Host {
			questions.Go(func() { errs[i] = s.checkAddress(ctx, a, root) })
		}
	}
	questions.Wait()
	for i, err := range errs {
		var other *otherServerError
		if errors.As(err, &other) {
			return err
		}
		if err != nil {
			log.Warn("the server does not answer MOUNT at an address of remoteports", "mount", s.dir,
				"address", s.opts.RemotePorts[i], "error", err)
		}
	}
	return ctx.Err()
}

// checkAddress returns an *otherServerError if a belongs to another server, and another error if a
// does not answer.
func (s *mountStack) checkAddress(ctx context.Context, a netip.Addr, root nfs3.FH) error {
	args := s.mountArgs
	args.Host, args.Timeout = a.String(), min(args.Timeout, rootTimeout)
	got, err := mountd.Mount(ctx, args)
	switch {
	case err == nil && got.FH == root:
		return nil
	case err == nil:
		return &otherServerError{fmt.Errorf("mount option \"remoteports\": %s has another file handle for %s than %s; "+
			"list addresses of one server", a, s.spec.Export, s.mountArgs.Host)}
	}
	var answer *mountd.Error
	if errors.As(err, &answer) {
		switch answer.Kind {
		case mountd.NoExport, mountd.Refused, mountd.OtherStatus:
			return &otherServerError{fmt.Errorf("mount option \"remoteports\": %w", err)}
		}
	}
	return err
}

// An otherServerError means that an address of the option remoteports belongs to another server.
type otherServerError struct{ error }

func (e *otherServerError) Unwrap() error { return e.error }

// connections describes the connections of the mount.
func (s *mountStack) connections() []control.Connection {
	l := make([]control.Connection, len(s.transports.all))
	for i, t := range s.transports.all {
		st := t.Stats()
		l[i] = control.Connection{State: st.State, Address: st.Address.String(), Preferred: st.Preferred.String()}
	}
	return l
}
