package mount

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

// connectError says what to do about a connection that was not made.
func connectError(addr netip.AddrPort, err error) error {
	const advice = "check that the server listens for NFS/RDMA there, or name the port with port="
	var conn *verbs.ConnError
	if errors.As(err, &conn) { // it names the address
		return fmt.Errorf("%w; %s", err, advice)
	}
	return fmt.Errorf("RDMA connection to %s: %w; %s", addr, err, advice)
}

// serverError says what to do about a server that was reached and whose answers make no mount.
func (s *mountStack) serverError(ctx context.Context, addr netip.AddrPort, err error) error {
	text := strings.TrimPrefix(err.Error(), "fusefs: ")
	var accept *sunrpc.AcceptError
	var denied *sunrpc.DeniedError
	var status *nfs3.Error
	var refused *xprt.ServerError
	advice := "what answers there breaks the protocol: check that it is an NFS version 3 server, and port="
	switch {
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return &serverSilence{text: fmt.Sprintf(
			"NFS server %s: it took the RDMA connection and did not answer%s; check that NFS version 3 is served there, or name the port with port=",
			addr, s.transports.errorSummary()), err: err}
	case errors.As(err, &accept):
		advice = "start NFS version 3 on the server, or name its port with port="
	case errors.As(err, &denied) && denied.Stat == sunrpc.AuthError:
		advice = "allow sec=sys for this client in the server's export"
	case errors.As(err, &status):
		advice = "check the export on the server"
	case errors.As(err, &refused):
		advice = "the server speaks another dialect of NFS/RDMA; see its log"
	}
	return fmt.Errorf("NFS server %s: %s; %s", addr, text, advice)
}

// A serverSilence is a mount whose time ran out, or that was interrupted, while it waited for an
// answer.
type serverSilence struct {
	text string
	err  error
}

func (e *serverSilence) Error() string { return e.text }

func (e *serverSilence) Unwrap() error { return e.err }

// errorSummary tells what the transports saw instead of answers, "" if nothing.
func (c *caller) errorSummary() string {
	var bad, strange uint64
	last := ""
	for _, t := range c.all {
		st := t.Stats()
		bad += st.BadReply
		strange += st.BadXIDs
		if st.LastError != "" {
			last = st.LastError
		}
	}
	var l []string
	if bad > 0 {
		l = append(l, fmt.Sprintf("messages not understood: %d", bad))
	}
	if strange > 0 {
		l = append(l, fmt.Sprintf("replies to no call: %d", strange))
	}
	if last != "" {
		l = append(l, "last connection error: "+last)
	}
	if len(l) == 0 {
		return ""
	}
	return " (" + strings.Join(l, ", ") + ")"
}

// flavorNames are the pseudo-flavors that servers ask for most (RFC 2623 §5).
var flavorNames = map[uint32]string{390003: "krb5", 390004: "krb5i", 390005: "krb5p"}

// checkFlavors refuses an export that takes no AUTH_SYS. A list without any entry, or with
// AUTH_NONE, takes everything (nfs(5), sec=).
func checkFlavors(export string, root mountd.Result) error {
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
	return fmt.Errorf("MNT %s: the server takes only %s for it, this client speaks sec=sys; allow that in the server's export", export, strings.Join(names, ", "))
}
