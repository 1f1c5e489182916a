package mountd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/vmware/go-nfs-client/nfs"
	"github.com/vmware/go-nfs-client/nfs/rpc"
	"github.com/vmware/go-nfs-client/nfs/xdr"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// Ports of the two services.
const (
	PortmapPort = 111   // RFC 1833 §3.1
	MountPort   = 20048 // assigned to mountd by IANA; servers with a port mapper may use any
)

// DefaultTimeout bounds a call whose Args do not.
const DefaultTimeout = 30 * time.Second

// maxRecord is the maximum size of a reply in bytes. It is far above every MNT reply and has room for
// some hundred exports.
const maxRecord = 64 << 10

// Procedures of MOUNT that go-nfs-client has no name for (RFC 1813 §5.2).
const procDump = 2

// Args say whom to ask, what, and as whom.
type Args struct {
	Host   string // name or address of the server, without a port
	Export string // absolute path; for Mount and Unmount

	// Port of the MOUNT service. 0 asks the server's port mapper; when the server has none (it
	// refuses the connection), the port that IANA assigned is tried.
	Port int
	// PortmapPort is the port of the port mapper; 0 means 111.
	PortmapPort int

	// Cred is the AUTH_SYS credential; nil is AUTH_NONE, which is enough for everything but MNT and
	// UMNT.
	Cred *sunrpc.AuthSys

	// Timeout bounds the whole call, names included; 0 means DefaultTimeout.
	Timeout time.Duration
}

// Result of Mount.
type Result struct {
	FH          nfs3.FH  // of the export's root
	AuthFlavors []uint32 // that the server takes for it (sunrpc.FlavorSys, …); may be empty
	Port        int      // of the MOUNT service that answered
}

// Export is an exported directory and the clients that may mount it; no Groups means everyone.
type Export struct {
	Dir    string
	Groups []string
}

// Entry is a mount that the server remembers.
type Entry struct {
	Host, Dir string
}

// Mount asks for the file handle of a.Export (MNT, RFC 1813 §5.2.1). Errors are [*Error].
func Mount(ctx context.Context, a Args) (Result, error) {
	var res Result
	err := a.call(ctx, "MNT", nfs.MountProc3MNT, func(port int, b []byte) error {
		reply, err := decodeMount(b)
		if err == nil && reply.stat != MNT3OK {
			return &Error{Kind: reply.stat.kind(), Status: reply.stat}
		}
		res = Result{FH: reply.fh, AuthFlavors: reply.flavors, Port: port}
		return err
	})
	if err != nil {
		return Result{}, err
	}
	return res, nil
}

// Unmount lets the server forget the mount (UMNT, RFC 1813 §5.2.3). It is a courtesy: nothing
// depends on it.
func Unmount(ctx context.Context, a Args) error {
	return a.call(ctx, "UMNT", nfs.MountProc3UMNT, nil)
}

// Null makes the round trip and nothing else (RFC 1813 §5.2.0).
func Null(ctx context.Context, a Args) error {
	return a.call(ctx, "NULL", nfs.MountProc3Null, nil)
}

// Exports lists what the server exports (EXPORT, RFC 1813 §5.2.5). A list of more than 64 KiB is an
// error.
func Exports(ctx context.Context, a Args) (list []Export, err error) {
	err = a.call(ctx, "EXPORT", nfs.MountProc3Export, func(_ int, b []byte) error {
		list, err = decodeExports(b)
		return err
	})
	return list, err
}

// Dump lists the mounts that the server remembers, of all clients (DUMP, RFC 1813 §5.2.2). A list
// of more than 64 KiB is an error.
func Dump(ctx context.Context, a Args) (list []Entry, err error) {
	err = a.call(ctx, "DUMP", procDump, func(_ int, b []byte) error {
		list, err = decodeDump(b)
		return err
	})
	return list, err
}

// GetPort asks the port mapper of a.Host for the TCP port of a program (PMAPPROC_GETPORT, RFC 1833
// §3.2). Errors are [*Error].
func GetPort(ctx context.Context, a Args, prog, vers uint32) (int, error) {
	ctx, cancel := a.bound(ctx)
	defer cancel()
	return a.getPort(ctx, prog, vers)
}

func (a *Args) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	timeout := a.Timeout
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	return context.WithTimeout(ctx, timeout)
}

func (a *Args) getPort(ctx context.Context, prog, vers uint32) (int, error) {
	mapper := a.PortmapPort
	if mapper == 0 {
		mapper = PortmapPort
	}
	e := &Error{Op: "GETPORT", Host: a.Host, Port: mapper}
	var args bytes.Buffer
	if err := xdr.Write(&args, rpc.Mapping{Prog: prog, Vers: vers, Prot: rpc.IPProtoTCP}); err != nil {
		return 0, e.fill(err, PortmapUnreachable)
	}
	results, err := a.roundTrip(ctx, mapper, false, sunrpc.Message{Prog: rpc.PmapProg, Vers: rpc.PmapVers,
		Proc: rpc.PmapProcGetPort, Cred: sunrpc.AppendAuthNone(nil), Args: args.Bytes()})
	if err != nil {
		return 0, e.fill(err, PortmapUnreachable)
	}
	port, err := decodePort(results)
	switch {
	case err != nil:
		return 0, e.fill(err, PortmapUnreachable)
	case port == 0:
		e.Kind, e.Err = NotRegistered, fmt.Errorf("program %d version %d over TCP", prog, vers)
		return 0, e
	case port > maxPort:
		e.Kind, e.Err = Protocol, fmt.Errorf("port %d for program %d", port, prog)
		return 0, e
	}
	return int(port), nil
}

const maxPort = 1<<16 - 1

// call makes one call to the MOUNT service and gives its results to decode.
func (a *Args) call(ctx context.Context, op string, proc uint32, decode func(port int, results []byte) error) error {
	e := &Error{Op: op, Host: a.Host}
	m := sunrpc.Message{Prog: nfs.MountProg, Vers: nfs.MountVers, Proc: proc, Cred: sunrpc.AppendAuthNone(nil)}
	if a.Cred != nil {
		m.Cred = sunrpc.AppendAuthSys(nil, a.Cred)
	}
	if proc == nfs.MountProc3MNT || proc == nfs.MountProc3UMNT {
		e.Export = a.Export
		err := a.checkExport()
		if err == nil {
			var args bytes.Buffer
			err = xdr.Write(&args, a.Export)
			m.Args = args.Bytes()
		}
		if err != nil {
			e.Kind, e.Err = Usage, err
			return e
		}
	}
	if a.Host == "" || a.Port < 0 || a.Port > maxPort || a.PortmapPort < 0 || a.PortmapPort > maxPort {
		e.Kind, e.Err = Usage, errors.New("no host, or a port out of range")
		return e
	}
	ctx, cancel := a.bound(ctx)
	defer cancel()
	port, err := a.mountPort(ctx, e)
	if err != nil {
		return err
	}
	e.Port = port
	results, err := a.roundTrip(ctx, port, true, m)
	if err == nil && decode != nil {
		err = decode(port, results)
	}
	if err != nil {
		return e.fill(err, MountdUnreachable)
	}
	return nil
}

// roundTrip connects to the port, makes one call and returns its results. It connects from a reserved
// source port when reserved is set.
func (a *Args) roundTrip(ctx context.Context, port int, reserved bool, m sunrpc.Message) ([]byte, error) {
	conn, err := dial(ctx, a.Host, port, reserved)
	if err != nil {
		return nil, err
	}
	return exchange(ctx, conn, m)
}

// exchange makes one call on conn, closes conn and returns the results.
func exchange(ctx context.Context, conn net.Conn, m sunrpc.Message) ([]byte, error) {
	c := rpctcp.New(conn, rpctcp.Options{MaxRecord: maxRecord})
	defer c.Close()
	// The connection serves only this call, so the end of ctx may interrupt a write.
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := c.Call(ctx, &m); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, err
	}
	return m.Result, nil
}

func (a *Args) checkExport() error {
	switch {
	case len(a.Export) > maxPath:
		return fmt.Errorf("the path has %d octets, MOUNT takes at most %d", len(a.Export), maxPath)
	case !strings.HasPrefix(a.Export, "/"):
		return fmt.Errorf("the path %q is not absolute", a.Export)
	case strings.IndexByte(a.Export, 0) >= 0:
		return fmt.Errorf("the path %q holds a NUL", a.Export)
	}
	return nil
}

// mountPort finds the port of the MOUNT service. The error is complete, and tells of the call e.
func (a *Args) mountPort(ctx context.Context, e *Error) (int, error) {
	if a.Port != 0 {
		return a.Port, nil
	}
	port, err := a.getPort(ctx, nfs.MountProg, nfs.MountVers)
	if err == nil {
		return port, nil
	}
	// Alive, but without a port mapper, as servers of NFSv4 with one foot in version 3 are: the
	// assigned port is worth one try.
	if errors.Is(err, syscall.ECONNREFUSED) && a.PortmapPort == 0 && a.listens(ctx, MountPort) {
		return MountPort, nil
	}
	var mapper *Error
	if errors.As(err, &mapper) {
		mapper.Op, mapper.Export = e.Op, e.Export
	}
	return 0, err
}

// listens tells whether somebody takes connections on the port.
func (a *Args) listens(ctx context.Context, port int) bool {
	conn, err := dial(ctx, a.Host, port, false)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// fill completes e with its cause and the kind that the cause is; unanswered is the kind of silence
// and of a refused connection.
func (e *Error) fill(err error, unanswered Kind) error {
	var own *Error
	if errors.As(err, &own) {
		e.Kind, e.Status, e.Err = own.Kind, own.Status, own.Err
		return e
	}
	var dns *net.DNSError
	var denied *sunrpc.DeniedError
	var accept *sunrpc.AcceptError
	var opErr *net.OpError
	e.Err = err
	switch {
	case errors.Is(err, context.Canceled):
		e.Kind = Canceled
	case errors.As(err, &dns):
		e.Kind = UnknownHost
	case errors.As(err, &denied) && denied.Stat == sunrpc.AuthError:
		e.Kind = Refused
	case errors.As(err, &accept) && accept.Stat == sunrpc.ProgUnavail && unanswered == MountdUnreachable:
		e.Kind = NotRegistered
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		// The connections have the context's deadline, and may notice it first.
		e.Kind, e.Err = unanswered, context.DeadlineExceeded
	case errors.As(err, &opErr):
		e.Kind = unanswered
	default:
		e.Kind = Protocol
	}
	return e
}
