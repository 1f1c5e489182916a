package ganeshatest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

const (
	startTimeout = 90 * time.Second // long, because test machines are slow
	stopTimeout  = 30 * time.Second
	startTries   = 3 // another process may take a free port before the server does
)

// A Server is a running NFS-Ganesha.
type Server struct {
	Host      string // "127.0.0.1"
	NFSPort   int
	MountPort int
	Export    string // path of the export: the path of the directory
	LogFile   string
}

// Addr returns "host:port" of NFS.
func (s *Server) Addr() string { return net.JoinHostPort(s.Host, strconv.Itoa(s.NFSPort)) }

// Option changes how Start runs the server.
type Option func(*options)

type options struct {
	sharedPortmap bool
	exportExtra   string
}

// SharedPortmap runs rpcbind in the network namespace of the caller, so that the test can use
// 127.0.0.1:111. The caller must run on a locked thread in a new network namespace, because rpcbind
// listens on every address. Otherwise the test fails.
func SharedPortmap() Option { return func(o *options) { o.sharedPortmap = true } }

// ExportOption adds a line to the EXPORT block of the configuration, for example "Access_Type =
// RO;".
func ExportOption(line string) Option {
	return func(o *options) { o.exportExtra += "  " + line + "\n" }
}

// Start exports dir until the test ends: read-write, without root squash, for AUTH_SYS. The file
// system of dir must have file handles (ext4, xfs, tmpfs). Start returns when the server answers.
func Start(t testing.TB, dir string, opts ...Option) *Server {
	t.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	checkHost(t)
	if o.sharedPortmap && inStartNamespace() {
		t.Fatal("SharedPortmap needs a new network namespace; lock the thread and unshare the network")
	}
	var err error
	for range startTries {
		var s *Server
		if s, err = start(t, dir, &o); err == nil {
			return s
		}
	}
	t.Fatalf("start NFS-Ganesha: %v", err)
	return nil
}

// checkHost fails the test when the host cannot run a server.
func checkHost(t testing.TB) {
	t.Helper()
	testutil.NeedsRoot(t)
	for program, pkg := range map[string]string{"ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs", "rpcbind": "rpcbind",
		"unshare": "util-linux", "ip": "iproute2"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("program %s not found; run apt-get install %s", program, pkg)
		}
	}
	if found, _ := filepath.Glob("/usr/lib/*/ganesha/libfsalvfs.so"); len(found) == 0 {
		t.Fatal("VFS back end of NFS-Ganesha not found; run apt-get install nfs-ganesha-vfs")
	}
}

// startNamespace names the network namespace in which the process started.
var startNamespace, _ = os.Readlink("/proc/self/ns/net")

// inStartNamespace reports whether this thread is in startNamespace.
func inStartNamespace() bool {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	return err != nil || own == startNamespace
}

const configText = `NFS_CORE_PARAM {
  Bind_addr = 127.0.0.1;
  NFS_Port = %d;
  MNT_Port = %d;
  Protocols = 3;
  Enable_NLM = false;
  Enable_RQUOTA = false;
  Enable_UDP = false;
}
# Otherwise writes of version 3 wait for the grace period of version 4.
NFSv4 { Graceless = true; }
# Tests also change the directory behind the server, so the server must not cache attributes.
EXPORT {
  Export_Id = 1;
  Path = "%s";
  Pseudo = /x;
  Protocols = 3;
  Transports = TCP;
  Access_Type = RW;
  Squash = No_root_squash;
  SecType = sys;
  Attr_Expiration_Time = 0;
%s  FSAL { Name = VFS; }
}
LOG { Default_Log_Level = EVENT; }
`

// script is the first process of the namespaces. It ends when the server ends. It stops the server
// when its standard input ends.
const script = `set -e
exec 3<&0
mount -t tmpfs tmpfs /run
mkdir -p /run/ganesha /run/rpcbind
chown _rpc /run/rpcbind
if [ "$3" = shared ]; then
  # Without an address outside 127.0.0.0/8, the resolver returns no address to the server, not even 127.0.0.1.
  ip addr replace 192.0.2.1/32 dev lo
  rpcbind -f 3<&- </dev/null &
else
  unshare -n sh -c 'ip link set lo up && exec rpcbind -f' 3<&- </dev/null &
fi
for i in $(seq 300); do [ -S /run/rpcbind.sock ] && break; sleep 0.1; done
ganesha.nfsd -F -f "$1" -L "$2" -p /run/ganesha.pid 3<&- </dev/null &
server=$!
( read -r _ <&3 || :; kill -TERM $server; sleep 3; kill -KILL $server ) >/dev/null 2>&1 &
wait $server
`

func start(t testing.TB, dir string, o *options) (*Server, error) {
	tmp := t.TempDir()
	s := &Server{Host: "127.0.0.1", Export: dir, LogFile: filepath.Join(tmp, "ganesha.log")}
	var err error
	if s.NFSPort, s.MountPort, err = freePorts(); err != nil {
		return nil, err
	}
	config := filepath.Join(tmp, "ganesha.conf")
	text := fmt.Sprintf(configText, s.NFSPort, s.MountPort, dir, o.exportExtra)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	portmap := "private"
	if o.sharedPortmap {
		portmap = "shared"
	}
	cmd := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "ganesha",
		config, s.LogFile, portmap)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = stopTimeout
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := s.waitReady(o, ended); err != nil {
		stop(cmd, stdin, ended)
		return nil, fmt.Errorf("%w\n%s%s", err, out.String(), logTail(s.LogFile))
	}
	t.Cleanup(func() {
		stop(cmd, stdin, ended)
		if t.Failed() {
			t.Logf("last lines of the log of NFS-Ganesha:\n%s", logTail(s.LogFile))
		}
	})
	return s, nil
}

func freePorts() (a, b int, err error) {
	var ports [2]int
	for i := range ports {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 0, 0, err
		}
		defer ln.Close() // after the loop, so that the ports differ
		ports[i] = ln.Addr().(*net.TCPAddr).Port
	}
	return ports[0], ports[1], nil
}

// waitReady waits until the server answers on both ports. With SharedPortmap it also waits until
// the server is registered with the port mapper.
func (s *Server) waitReady(o *options, ended chan error) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := s.probe(ctx, o)
		if err == nil {
			return nil
		}
		select {
		case waitErr := <-ended:
			ended <- waitErr
			return fmt.Errorf("server exited: %w", waitErr)
		case <-ctx.Done():
			return fmt.Errorf("no answer within %v: %w", startTimeout, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *Server) probe(ctx context.Context, o *options) error {
	if err := null(ctx, s.Addr()); err != nil {
		return err
	}
	args := mountd.Args{Host: s.Host, Port: s.MountPort}
	if err := mountd.Null(ctx, args); err != nil || !o.sharedPortmap {
		return err
	}
	for _, program := range []uint32{nfs3.Program, mountProgram} {
		if _, err := mountd.GetPort(ctx, args, program, nfs3.Version); err != nil {
			return err
		}
	}
	return nil
}

// mountProgram is the program number of MOUNT (RFC 1813 §5.1). MOUNT version 3 belongs to NFS
// version 3.
const mountProgram = 100005

func null(ctx context.Context, addr string) error {
	c, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return err
	}
	defer c.Close()
	return nfs3.NewClient(c, nfs3.Options{}).Null(ctx, sunrpc.AppendAuthNone(nil))
}

// stop asks the server to end, and kills it after stopTimeout.
func stop(cmd *exec.Cmd, stdin io.Closer, ended chan error) {
	stdin.Close()
	select {
	case <-ended:
	case <-time.After(stopTimeout):
		cmd.Process.Kill() // unshare --kill-child then kills the processes of the namespace
		<-ended
	}
}

func logTail(path string) string {
	const lines = 30
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return "(no log)"
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
