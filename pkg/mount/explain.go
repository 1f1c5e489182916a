package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// connectError adds advice to the error of a connection attempt to addr.
func connectError(addr netip.AddrPort, err error) error {
	const advice = "check that the server listens for NFS/RDMA there, or set port="
	var conn *verbs.ConnError
	var limit *xprt.ConnectLimitError
	if errors.As(err, &limit) { // no fault of the server
		return err
	}
	if errors.As(err, &conn) { // its text has the address
		return fmt.Errorf("%w; %s", err, advice)
	}
	return fmt.Errorf("RDMA connection to %s: %w; %s", addr, err, advice)
}

// serverError adds advice to the error of a server that accepted the connection and did not reply
// as a mount needs.
func (s *mountStack) serverError(ctx context.Context, addr netip.AddrPort, err error) error {
	text := strings.TrimPrefix(err.Error(), "vfs: ")
	var accept *sunrpc.AcceptError
	var denied *sunrpc.DeniedError
	var status *nfs3.Error
	var refused *xprt.ServerError
	advice := "check that an NFS version 3 server listens there, and check port="
	switch {
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return &noReplyError{err: err, text: fmt.Sprintf("NFS server %s: server accepted the RDMA connection "+
			"but did not answer NFS%s; check that it serves NFS version 3 there, or set port=", addr,
			s.transports.errorSummary())}
	case errors.As(err, &accept):
		advice = "start NFS version 3 on the server, or set port="
	case errors.As(err, &denied) && denied.Stat == sunrpc.AuthError:
		advice = "allow sec=sys for this client in the export"
	case errors.As(err, &status):
		advice = "check the export on the server"
	case errors.As(err, &refused):
		advice = "the server rejected the RPC-over-RDMA message; see its log"
	}
	return fmt.Errorf("NFS server %s: %s; %s", addr, text, advice)
}

// A noReplyError is the error of a mount that timed out, or was interrupted, before the server
// replied. It wraps the error of the context but has its own text.
type noReplyError struct {
	text string
	err  error
}

func (e *noReplyError) Error() string { return e.text }

func (e *noReplyError) Unwrap() error { return e.err }

// errorSummary returns the errors that the transports counted, in parentheses; "" for none.
func (c *caller) errorSummary() string {
	var badReplies, badXIDs uint64
	last := ""
	for _, t := range c.all {
		st := t.Stats()
		badReplies += st.BadReply
		badXIDs += st.BadXIDs
		if st.LastError != "" {
			last = st.LastError
		}
	}
	var l []string
	if badReplies > 0 {
		l = append(l, fmt.Sprintf("invalid replies: %d", badReplies))
	}
	if badXIDs > 0 {
		l = append(l, fmt.Sprintf("replies to no call: %d", badXIDs))
	}
	if last != "" {
		l = append(l, "last connection error: "+last)
	}
	if len(l) == 0 {
		return ""
	}
	return " (" + strings.Join(l, ", ") + ")"
}

// flavorNames are the pseudo-flavors of RPCSEC_GSS that servers require most (RFC 2623 §5).
var flavorNames = map[uint32]string{390003: "krb5", 390004: "krb5i", 390005: "krb5p"}

// CheckFlavors returns an error if the export does not allow AUTH_SYS. An empty list, or AUTH_NONE
// in the list, allows every flavor (nfs(5), sec=).
func CheckFlavors(export string, root mountd.Result) error {
	f := root.AuthFlavors
	if len(f) == 0 || slices.Contains(f, sunrpc.FlavorSys) || slices.Contains(f, sunrpc.FlavorNone) {
		return nil
	}
	names := make([]string, 0, len(f))
	for _, flavor := range f {
		name := flavorNames[flavor]
		if name == "" {
			name = fmt.Sprintf("flavor %d", flavor)
		}
		names = append(names, name)
	}
	return fmt.Errorf("MNT %s: the export requires %s, which is not supported; allow sec=sys in the export", export,
		strings.Join(names, ", "))
}
