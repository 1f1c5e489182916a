package nlm

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/resvport"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
)

// The port mapper of this host (RFC 1833 §3).
const (
	portmapProgram = 100000
	portmapVersion = 2
	portmapSet     = 1
	portmapUnset   = 2
	portmapGetPort = 3

	protoTCP = 6
	protoUDP = 17

	loopback     = "127.0.0.1"
	localTimeout = 3 * time.Second // for calls to services of this host
	// for a question to the status monitor of a server; a firewall may drop it
	remoteTimeout = 5 * time.Second
)

// localCall makes one call to a service of this host, from a reserved port if possible: the port
// mapper and the status monitor require one.
func localCall(ctx context.Context, port int, prog, vers, proc uint32, args []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	return callOnce(ctx, resvport.Dial, loopback, port, &sunrpc.Message{Prog: prog, Vers: vers, Proc: proc, Args: args})
}

// callOnce makes one call over a new connection.
func callOnce(ctx context.Context, dial func(context.Context, string) (net.Conn, error), host string, port int,
	m *sunrpc.Message) ([]byte, error) {
	tcp, err := dial(ctx, net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	conn := rpctcp.New(tcp, rpctcp.Options{MaxRecord: nlmwire.MaxMessage, WriteTimeout: remoteTimeout})
	defer conn.Close()
	m.Cred = sunrpc.AppendAuthNone(nil)
	err = conn.Call(ctx, m)
	return m.Result, err
}

// A mapping is one registration at the port mapper.
type mapping struct{ prog, vers, proto, port uint32 }

// portmap makes one call to the port mapper of this host and returns its result, a number.
func portmap(ctx context.Context, mapper int, proc uint32, m mapping) (uint32, error) {
	var args []byte
	for _, v := range [...]uint32{m.prog, m.vers, m.proto, m.port} {
		args = sunrpc.AppendUint32(args, v)
	}
	results, err := localCall(ctx, mapper, portmapProgram, portmapVersion, proc, args)
	if err != nil {
		return 0, fmt.Errorf("port mapper of this host: %w; start rpcbind", err)
	}
	d := sunrpc.NewDecoder(results)
	n := d.Uint32()
	return n, d.Err()
}
