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
	startTimeout = 90 * time.Second // generous: test machines are shared
	stopTimeout  = 30 * time.Second
	startTries   = 3 // a free port may be taken by another before the server binds it
)

// A Server is a running NFS-Ganesha.
type Server struct {
	Host      string // "127.0.0.1"
	NFSPort   int
	MountPort int
	Export    string // path of the export, which is the directory's own
	LogFile   string
}

// Addr is the host and port of NFS.
func (s *Server) Addr() string { return net.JoinHostPort(s.Host, strconv.Itoa(s.NFSPort)) }

// Option changes how Start runs the server.
type Option func(*options)

type options struct {
	sharedPortmap bool
	exportExtra   string
}

// SharedPortmap runs rpcbind in the network namespace of the caller, so that the test can ask it at
// 127.0.0.1:111. The caller must be a locked goroutine in a namespace of its own, because rpcbind
// listens on every address; the test fails otherwise.
func SharedPortmap() Option { return func(o *options) { o.sharedPortmap = true } }

// ExportOption adds a line to the EXPORT block of the configuration, for example "Access_Type =
// RO;".
func ExportOption(line string) Option {
	return func(o *options) { o.exportExtra += "  " + line + "\n" }
}

// Start exports dir, which must be on a file system with file handles (ext4, xfs, tmpfs),
// read-write, without squashing, for AUTH_SYS, until the test ends. It returns when the server
// answers.
func Start(t testing.TB, dir string, opts ...Option) *Server {
	t.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	need(t)
	if o.sharedPortmap && inStartNamespace() {
		t.Fatal("ganeshatest.SharedPortmap on the host: lock the goroutine to its thread and unshare the network first")
	}
	var err error
	for range startTries {
		var s *Server
		if s, err = start(t, dir, &o); err == nil {
			return s
		}
	}
	t.Fatalf("NFS-Ganesha did not start: %v", err)
	return nil
}

// need fails the test where a server cannot run.
func need(t testing.TB) {
	t.Helper()
	testutil.NeedsRoot(t)
	for program, pkg := range map[string]string{"ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs", "rpcbind": "rpcbind",
		"unshare": "util-linux", "ip": "iproute2"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Fatalf("%s is missing: apt-get install %s", program, pkg)
		}
	}
	if found, _ := filepath.Glob("/usr/lib/*/ganesha/libfsalvfs.so"); len(found) == 0 {
		t.Fatal("NFS-Ganesha's VFS back end is missing: apt-get install nfs-ganesha-vfs")
	}
}

// startNamespace is the network namespace that the process started in.
var startNamespace, _ = os.Readlink("/proc/self/ns/net")

// inStartNamespace tells whether this thread is still in it.
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
# Version 3 writes would wait for the grace period of version 4.
NFSv4 { Graceless = true; }
# Tests look at the directory from both sides: nothing may be remembered.
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

// script is the first process of the namespaces. It ends with the server, and ends the server when
// its standard input does.
const script = `set -e
exec 3<&0
mount -t tmpfs tmpfs /run
mkdir -p /run/ganesha /run/rpcbind
chown _rpc /run/rpcbind
if [ "$3" = shared ]; then
  # Without an address outside of 127/8 the resolver gives the server no address at all, not even 127.0.0.1.
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
	life, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	if err := s.waitReady(o, ended); err != nil {
		stop(cmd, life, ended)
		return nil, fmt.Errorf("%w\n%s%s", err, out.String(), logTail(s.LogFile))
	}
	t.Cleanup(func() {
		stop(cmd, life, ended)
		if t.Failed() {
			t.Logf("end of NFS-Ganesha's log:\n%s", logTail(s.LogFile))
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
		defer ln.Close() // both stay open until both are known, so that they differ
		ports[i] = ln.Addr().(*net.TCPAddr).Port
	}
	return ports[0], ports[1], nil
}

// waitReady waits until the server answers on both ports, and, where it is asked, is registered
// with the port mapper; that comes later.
func (s *Server) waitReady(o *options, ended chan error) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := s.answers(ctx, o)
		if err == nil {
			return nil
		}
		select {
		case waitErr := <-ended:
			ended <- waitErr
			return fmt.Errorf("the server ended: %v", waitErr)
		case <-ctx.Done():
			return fmt.Errorf("no answer in %v: %w", startTimeout, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *Server) answers(ctx context.Context, o *options) error {
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

// mountProgram is the program number of MOUNT, whose version 3 goes with NFS version 3 (RFC 1813
// §5.1).
const mountProgram = 100005

func null(ctx context.Context, addr string) error {
	c, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return err
	}
	defer c.Close()
	return nfs3.NewClient(c, nfs3.Options{}).Null(ctx, sunrpc.AppendAuthNone(nil))
}

// stop ends the server in good order, or by force when it does not follow.
func stop(cmd *exec.Cmd, life io.Closer, ended chan error) {
	life.Close()
	select {
	case <-ended:
	case <-time.After(stopTimeout):
		cmd.Process.Kill() // unshare's --kill-child takes the namespace along
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
