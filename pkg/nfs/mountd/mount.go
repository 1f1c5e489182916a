package mountd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vmware/go-nfs-client/nfs"
	"github.com/vmware/go-nfs-client/nfs/rpc"
	"github.com/vmware/go-nfs-client/nfs/xdr"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// Ports of the two services.
const (
	PortmapPort = 111   // RFC 1833 §3.1
	MountPort   = 20048 // assigned by IANA; a server with a port mapper may use another port
)

// DefaultTimeout is the default of Args.Timeout.
const DefaultTimeout = 30 * time.Second

// maxRecord is the maximum size of a reply in bytes: an export list with some 10,000 clients.
const maxRecord = 1 << 20

// Args are the arguments of a call.
type Args struct {
	Host   string // name or address of the server, without a port
	Export string // absolute path; for Mount and Unmount

	// Port of the MOUNT service. 0 asks the port mapper of the server, and tries MountPort if the
	// server refuses the connection to the port mapper.
	Port int
	// PortmapPort is the port of the port mapper; 0 means 111.
	PortmapPort int

	// AnySourcePort makes Mount and Unmount connect from a port that the kernel chooses. By default
	// they use a reserved port if the process may bind one, because many servers require it.
	AnySourcePort bool

	// Cred is the AUTH_SYS credential. nil means AUTH_NONE, which does not suffice for MNT and
	// UMNT.
	Cred *sunrpc.AuthSys

	// Timeout limits the complete call, including name resolution; 0 means DefaultTimeout.
	Timeout time.Duration
}

// Result is the result of Mount.
type Result struct {
	FH          nfs3.FH  // root of the export
	AuthFlavors []uint32 // accepted flavors, for example sunrpc.FlavorSys; may be empty
	Port        int      // of the MOUNT service
}

// Mount returns the file handle of a.Export (MNT, RFC 1813 §5.2.1). Errors are [*Error].
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

// Unmount removes the mount from the list of mounts on the server (UMNT, RFC 1813 §5.2.3). The list
// is informational, so a failure has no effect. Errors are [*Error].
func Unmount(ctx context.Context, a Args) error {
	return a.call(ctx, "UMNT", nfs.MountProc3UMNT, nil)
}

// Null makes a round trip without any effect (NULL, RFC 1813 §5.2.0). Errors are [*Error].
func Null(ctx context.Context, a Args) error {
	return a.call(ctx, "NULL", nfs.MountProc3Null, nil)
}

// An Export is one entry of the export list of a server.
type Export struct {
	Dir string // path on the server
	// Groups are the clients that may mount it, in the notation of the server: names, addresses,
	// networks, netgroups. None means every client.
	Groups []string
}

// Exports returns the export list of the server (EXPORT, RFC 1813 §5.2.5). Some servers hide
// entries from clients that may not mount them. Errors are [*Error].
func Exports(ctx context.Context, a Args) (list []Export, err error) {
	err = a.call(ctx, "EXPORT", nfs.MountProc3Export, func(_ int, b []byte) (err error) {
		list, err = decodeExports(b)
		return err
	})
	return list, err
}

// FindPort returns the TCP port at which the other calls find the MOUNT service: a.Port, or what
// the port mapper of the server says, or MountPort. Errors are [*Error].
func FindPort(ctx context.Context, a Args) (int, error) {
	ctx, cancel := a.withTimeout(ctx)
	defer cancel()
	return a.mountPort(ctx, &Error{Op: "GETPORT", Host: a.Host})
}

// GetPort returns the TCP port of a program from the port mapper of a.Host (PMAPPROC_GETPORT, RFC
// 1833 §3.2). Errors are [*Error].
func GetPort(ctx context.Context, a Args, prog, vers uint32) (int, error) {
	ctx, cancel := a.withTimeout(ctx)
	defer cancel()
	return a.getPort(ctx, prog, vers)
}

func (a *Args) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
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

// call makes one call to the MOUNT service and passes the results to decode, if not nil.
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
		e.Kind, e.Err = Usage, errors.New("host is missing, or a port is out of range")
		return e
	}
	ctx, cancel := a.withTimeout(ctx)
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

// roundTrip connects to the port, makes one call and returns its results. It connects from a
// reserved source port when reserved is set.
func (a *Args) roundTrip(ctx context.Context, port int, reserved bool, m sunrpc.Message) ([]byte, error) {
	dial := resvport.DialAny
	if reserved && !a.AnySourcePort {
		dial = resvport.Dial
	}
	conn, err := dial(ctx, a.addr(port))
	if err != nil {
		return nil, err
	}
	return exchange(ctx, conn, m)
}

// addr is the address of a port of the server.
func (a *Args) addr(port int) string { return net.JoinHostPort(a.Host, strconv.Itoa(port)) }

// exchange makes one call on conn, closes conn and returns the results.
func exchange(ctx context.Context, conn net.Conn, m sunrpc.Message) ([]byte, error) {
	c := rpctcp.New(conn, rpctcp.Options{MaxRecord: maxRecord})
	defer c.Close()
	// The connection has only this call, so the end of ctx can close it and interrupt a write.
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
		return fmt.Errorf("path has %d bytes, maximum is %d", len(a.Export), maxPath)
	case !strings.HasPrefix(a.Export, "/"):
		return fmt.Errorf("path %q is not absolute", a.Export)
	case strings.IndexByte(a.Export, 0) >= 0:
		return fmt.Errorf("path %q contains NUL", a.Export)
	}
	return nil
}

// mountPort returns the port of the MOUNT service. Its error is an *Error of the call e.
func (a *Args) mountPort(ctx context.Context, e *Error) (int, error) {
	if a.Port != 0 {
		return a.Port, nil
	}
	port, err := a.getPort(ctx, nfs.MountProg, nfs.MountVers)
	if err == nil {
		return port, nil
	}
	// The server is up but has no port mapper, for example because it is mainly an NFSv4 server.
	// Or the port mapper does not know a MOUNT service that runs without it. MOUNT may still use
	// its assigned port.
	var mapper *Error
	unknown := errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, &mapper) && mapper.Kind == NotRegistered
	if unknown && a.PortmapPort == 0 && a.listens(ctx, MountPort) {
		return MountPort, nil
	}
	if errors.As(err, &mapper) {
		mapper.Op, mapper.Export = e.Op, e.Export
	}
	return 0, err
}

// listens reports whether the server accepts a connection on the port.
func (a *Args) listens(ctx context.Context, port int) bool {
	conn, err := resvport.DialAny(ctx, a.addr(port))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// fill sets the cause and the kind of e and returns e. unreachable is the kind for a timeout and
// for a failed connection.
func (e *Error) fill(err error, unreachable Kind) error {
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
	case errors.As(err, &accept) && accept.Stat == sunrpc.ProgUnavail && unreachable == MountdUnreachable:
		e.Kind = NotRegistered
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		e.Kind, e.Err = unreachable, context.DeadlineExceeded
	case errors.As(err, &opErr):
		e.Kind = unreachable
	default:
		e.Kind = Protocol
	}
	return e
}
