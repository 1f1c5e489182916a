package ganesha

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

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

const (
	startTimeout = 90 * time.Second // long, because test machines are slow
	stopTimeout  = 30 * time.Second
	startTries   = 3 // another process may take a free port before the server does
)

// A Server is a running NFS-Ganesha.
type Server struct {
	Host      string // "127.0.0.1", or ServerAddr
	NFSPort   int
	MountPort int
	Export    string // path of the export: the path of the directory
	LogFile   string

	options *options
	config  string // path of the configuration
	running *running
	epoch   int64 // the server's write verifier; by default the second in which the server starts
}

// A running is one run of the server's program.
type running struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}    // closed when the program has exited
	err   error            // of the program; read after ended
	out   *strings.Builder // read after ended
}

// startProgram starts cmd, which must end when its standard input ends.
func startProgram(cmd *exec.Cmd) (*running, error) {
	r := &running{cmd: cmd, ended: make(chan struct{}), out: new(strings.Builder)}
	cmd.Stdout, cmd.Stderr = r.out, r.out
	cmd.WaitDelay = stopTimeout
	var err error
	if r.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(r.ended)
		r.err = cmd.Wait()
	}()
	return r, nil
}

// Addr returns "host:port" of NFS.
func (s *Server) Addr() string { return net.JoinHostPort(s.Host, strconv.Itoa(s.NFSPort)) }

// OnHost returns a command that runs a program on the host of the server: in its network namespace
// with OwnHost. Otherwise it returns nil.
func (s *Server) OnHost(t testing.TB) []string {
	t.Helper()
	if !s.options.ownHost {
		return nil
	}
	return []string{"nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", s.PID(t))}
}

// PID returns the process ID of the server.
func (s *Server) PID(t testing.TB) int {
	t.Helper()
	pid := descendant(s.running.cmd.Process.Pid, "ganesha.nfsd")
	if pid == 0 {
		t.Fatal("process of NFS-Ganesha not found")
	}
	return pid
}

// descendant returns the ID of the descendant of a process that has the given name, or 0.
func descendant(pid int, name string) int {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0
	}
	for _, child := range strings.Fields(string(children)) {
		id, err := strconv.Atoi(child)
		if err != nil {
			continue
		}
		if comm, err := os.ReadFile("/proc/" + child + "/comm"); err == nil && strings.TrimSpace(string(comm)) == name {
			return id
		}
		if found := descendant(id, name); found != 0 {
			return found
		}
	}
	return 0
}

// Option changes how Start runs the server.
type Option func(*options)

type options struct {
	sharedPortmap bool
	squash        string
	ownHost       bool
	exportExtra   string
}

// SharedPortmap runs rpcbind in the network namespace of the caller, so that the test can use
// 127.0.0.1:111. The caller must run on a locked thread in a new network namespace, because rpcbind
// listens on every address. Otherwise the test fails.
func SharedPortmap() Option { return func(o *options) { o.sharedPortmap = true } }

// Addresses of OwnHost.
const (
	ClientAddr = "192.0.2.1"
	ServerAddr = "192.0.2.2"
)

// OwnHost runs the server with its lock manager in a network namespace of the server, as on another
// host. Its address is ServerAddr; the address of the caller is ClientAddr. It also runs rpcbind in
// the network namespace of the caller. The caller must run in a network namespace where port 111 is
// free. Otherwise the test fails.
func OwnHost() Option { return func(o *options) { o.ownHost = true } }

// ExportOption adds a line to the EXPORT block of the configuration, for example "Access_Type =
// RO;".
func ExportOption(line string) Option {
	return func(o *options) { o.exportExtra += "  " + line + "\n" }
}

// Squash maps users as Root_Squash, All_Squash or No_Root_Squash, to uid and gid 65534. The default
// is No_Root_Squash.
func Squash(kind string) Option { return func(o *options) { o.squash = kind } }

// Start exports dir until the test ends, read-write, for AUTH_SYS. The file system of dir must have
// file handles (ext4, xfs, tmpfs). Start returns when the server answers.
func Start(t testing.TB, dir string, opts ...Option) *Server {
	t.Helper()
	o := options{squash: "No_Root_Squash"}
	for _, opt := range opts {
		opt(&o)
	}
	checkHost(t)
	if o.ownHost {
		checkOwnHost(t)
	}
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
	kit.NeedsRoot(t)
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

// checkOwnHost fails the test when OwnHost is not possible.
func checkOwnHost(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("rpc.statd"); err != nil {
		t.Fatal("program rpc.statd not found; run apt-get install nfs-common")
	}
	if conn, err := net.Dial("tcp", "127.0.0.1:111"); err == nil {
		conn.Close()
		t.Fatal("OwnHost needs a network namespace without a port mapper; run the test with unshare --net")
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
  Bind_addr = %s;
  NFS_Port = %d;
  MNT_Port = %d;
  Protocols = 3;
  Enable_NLM = %t;
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
  Squash = %s;
  Anonymous_Uid = 65534;
  Anonymous_Gid = 65534;
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
ganesha.nfsd -F -f "$1" -L "$2" -E "$4" -p /run/ganesha.pid 3<&- </dev/null &
server=$!
( read -r _ <&3 || :; kill -TERM $server; sleep 3; kill -KILL $server ) >/dev/null 2>&1 &
wait $server
`

// ownHostScript is script for OwnHost. The server's port mapper and status monitor run in its
// network namespace.
const ownHostScript = `set -e
exec 3<&0
mount -t tmpfs tmpfs /run
mkdir -p /run/ganesha /run/rpcbind /run/nsm/sm /run/nsm/sm.bak /run/netns
chown _rpc /run/rpcbind
chown -R statd /run/nsm
ip link set lo up
ip netns add server
ip link add client0 type veth peer name server0 netns server
ip addr add ` + ClientAddr + `/24 dev client0
ip link set client0 up
ip netns exec server sh -c 'ip link set lo up; ip addr add ` + ServerAddr + `/24 dev server0; ip link set server0 up'
rpcbind -f 3<&- </dev/null &
for i in $(seq 300); do [ -S /run/rpcbind.sock ] && break; sleep 0.1; done
rm -f /run/rpcbind.sock /run/rpcbind.lock
ip netns exec server rpcbind -f 3<&- </dev/null &
for i in $(seq 300); do [ -S /run/rpcbind.sock ] && break; sleep 0.1; done
ip netns exec server rpc.statd -F -L -P /run/nsm 3<&- </dev/null &
ip netns exec server ganesha.nfsd -F -f "$1" -L "$2" -E "$4" -p /run/ganesha.pid 3<&- </dev/null &
server=$!
( read -r _ <&3 || :; kill -TERM $server; sleep 3; kill -KILL $server ) >/dev/null 2>&1 &
wait $server
`

func start(t testing.TB, dir string, o *options) (*Server, error) {
	tmp := t.TempDir()
	s := &Server{Host: "127.0.0.1", Export: dir, LogFile: filepath.Join(tmp, "ganesha.log"),
		NFSPort: int(kit.FreePort(t).Port()), MountPort: int(kit.FreePort(t).Port()),
		epoch: time.Now().Unix()}
	config := filepath.Join(tmp, "ganesha.conf")
	if o.ownHost {
		s.Host = ServerAddr
	}
	text := fmt.Sprintf(configText, s.Host, s.NFSPort, s.MountPort, o.ownHost, dir, o.squash, o.exportExtra)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	s.config, s.options = config, o
	if err := s.launch(); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		s.running.stop()
		if t.Failed() {
			t.Logf("last lines of the log of NFS-Ganesha:\n%s", logTail(s.LogFile))
		}
	})
	return s, nil
}

// launch runs the program and waits until it answers.
func (s *Server) launch() error {
	portmap, program := "private", script
	switch {
	case s.options.sharedPortmap:
		portmap = "shared"
	case s.options.ownHost:
		program = ownHostScript
	}
	r, err := startProgram(exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", program,
		"ganesha", s.config, s.LogFile, portmap, strconv.FormatInt(s.epoch, 10)))
	if err != nil {
		return err
	}
	s.running = r
	if err := s.waitReady(); err != nil {
		r.stop()
		return fmt.Errorf("%w\n%s%s", err, r.out.String(), logTail(s.LogFile))
	}
	return nil
}

// Restart kills the server, calls down while no server runs, and starts the server again with the
// same ports.
func (s *Server) Restart(t testing.TB, down func()) {
	t.Helper()
	s.running.cmd.Process.Kill() // unshare --kill-child then kills the processes of the namespace
	<-s.running.ended
	down()
	s.epoch++ // also when the server starts again within one second
	if err := s.launch(); err != nil {
		t.Fatalf("restart NFS-Ganesha: %v", err)
	}
}

// waitReady waits until the server answers on both ports. With SharedPortmap it also waits until
// the server is registered with the port mapper.
func (s *Server) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := s.probe(ctx, s.options)
		if err == nil {
			return nil
		}
		select {
		case <-s.running.ended:
			return fmt.Errorf("server exited: %w", s.running.err)
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
	if err := mountd.Null(ctx, args); err != nil || !o.sharedPortmap && !o.ownHost {
		return err
	}
	for _, service := range [][2]uint32{{100021, 4}, {100024, 1}} { // NLM and NSM
		if !o.ownHost {
			break
		}
		if _, err := mountd.GetPort(ctx, args, service[0], service[1]); err != nil {
			return err
		}
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
	return nfs3.NewClient(c).Null(ctx, sunrpc.AppendAuthNone(nil))
}

// stop asks the server to end, and kills it after stopTimeout.
func (r *running) stop() {
	r.stdin.Close()
	select {
	case <-r.ended:
	case <-time.After(stopTimeout):
		r.cmd.Process.Kill() // unshare --kill-child then kills the processes of the namespace
		<-r.ended
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
