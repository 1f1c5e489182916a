package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/ganeshatest"
	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
)

const (
	// processTimeout bounds the start and the end of a process, and one call of a raw client.
	processTimeout = 3 * time.Minute
	mountProgram   = 100005 // RFC 1813 §5.1
)

// program builds nfsrdmad once for all tests of this process. The file stays in bin, which git
// ignores, so that the linker runs only after a change.
var program = sync.OnceValues(func() (string, error) {
	if file := os.Getenv(programEnv); file != "" {
		return file, nil
	}
	file, err := filepath.Abs("../../bin/integration/nfsrdmad")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("go", "build", "-o", file, "github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return file, nil
})

// A process is a running nfsrdmad. Its output goes to the test's log when the test fails.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
	out   lockedBuffer
}

// A lockedBuffer is a bytes.Buffer that may be read while a process writes to it.
type lockedBuffer struct {
	sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.buf.String()
}

// startProcess starts nfsrdmad with args, behind the command wrap if that is not empty. input may
// be nil. The process is killed when the test ends.
func startProcess(t *testing.T, wrap []string, input *os.File, args ...string) *process {
	t.Helper()
	file, err := program()
	if err != nil {
		t.Fatal(err)
	}
	line := append(append(append([]string{}, wrap...), file), args...)
	p := &process{cmd: exec.Command(line[0], line[1:]...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if input != nil {
		p.cmd.Stdin = input
	}
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %v: %v", line, err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		if t.Failed() && p.out.String() != "" {
			t.Logf("output of nfsrdmad %s:\n%s", strings.Join(args, " "), lastLines(p.out.String(), 40))
		}
	})
	return p
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// end sends a signal and waits until the process has exited. A process that ignores the signal
// fails the test.
func (p *process) end(t *testing.T, sig syscall.Signal) {
	t.Helper()
	_ = p.cmd.Process.Signal(sig)
	select {
	case <-p.ended:
	case <-time.After(processTimeout):
		t.Errorf("nfsrdmad still runs %v after signal %v", processTimeout, sig)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// waitFor polls until done returns nil. It fails the test after processTimeout, and at once when
// the process ends.
func (p *process) waitFor(t *testing.T, what string, done func() error) {
	t.Helper()
	deadline := time.Now().Add(processTimeout)
	for {
		err := done()
		if err == nil {
			return
		}
		select {
		case <-p.ended:
			t.Fatalf("nfsrdmad ended before %s: %v\n%s", what, err, p.out.String())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v after %v\n%s", what, err, processTimeout, p.out.String())
		}
	}
}

// A servedDir is "nfsrdmad serve DIR" as a process that can be stopped and started again with the
// same ports.
type servedDir struct {
	dir, rdma, tcp string
	launcher       *process
	commands       io.Writer // of the launcher
	starts         int       // servers started so far
	pid            int       // of the server; 0 while none runs
}

// launcherScript starts the server for every line of its input and prints the process ID. It kills
// the server when its input ends, so also when the test process exits. A test with open files on a
// mount cannot start the server itself: the new process would close its copies of the files before
// it becomes the server, and closing them needs the server.
const launcherScript = `while read -r _; do "$@" </dev/null & pid=$!; echo "pid $pid"; done; kill -KILL $pid`

// serveDir serves dir on two free ports of 127.0.0.1 until the test ends.
func serveDir(t *testing.T, dir string, flags ...string) *servedDir {
	t.Helper()
	return serveDirWith(t, nil, dir, flags...)
}

// serveDirWith is serveDir with a command in front, for example setpriv. The command must replace
// itself by its arguments.
func serveDirWith(t *testing.T, wrap []string, dir string, flags ...string) *servedDir {
	t.Helper()
	s := &servedDir{dir: dir, rdma: freePort(t), tcp: freePort(t)}
	input, output, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	t.Cleanup(func() { output.Close() })
	s.commands = output
	wrap = append([]string{"sh", "-c", launcherScript, "launcher"}, wrap...)
	args := append([]string{"serve", dir, "--rdma-listen", s.rdma, "--tcp-listen", s.tcp}, flags...)
	s.launcher = startProcess(t, wrap, input, args...)
	t.Cleanup(func() {
		if s.pid != 0 {
			s.end(t, syscall.SIGTERM)
		}
	})
	s.start(t)
	return s
}

// start starts the process and waits until both ports answer.
func (s *servedDir) start(t *testing.T) {
	t.Helper()
	s.starts++
	if _, err := io.WriteString(s.commands, "start\n"); err != nil {
		t.Fatal(err)
	}
	s.launcher.waitFor(t, "starting the server", func() error {
		text := s.launcher.out.String()
		i := strings.LastIndex(text, "pid ")
		if strings.Count(text, "pid ") < s.starts {
			return errors.New("no process ID yet")
		}
		_, err := fmt.Sscanf(text[i:], "pid %d\n", &s.pid)
		return err
	})
	for _, addr := range []string{s.tcp, s.rdma} {
		s.launcher.waitFor(t, "listening on "+addr, func() error {
			c, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil && s.hasEnded() {
				t.Fatalf("server ended:\n%s", s.launcher.out.String())
			}
			if err == nil {
				c.Close()
			}
			return err
		})
	}
}

// hasEnded reports whether all threads of the server have exited. Its main thread is a zombie until
// the launcher starts the next server; the other threads may exit later and close the sockets then.
func (s *servedDir) hasEnded() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.pid))
	_, state, _ := strings.Cut(string(stat), ") ")
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.pid))
	return err != nil || strings.HasPrefix(state, "Z") && len(threads) <= 1
}

// end sends a signal to the server and waits until it has exited.
func (s *servedDir) end(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(s.pid, sig); err != nil {
		t.Errorf("signal to the server: %v", err)
	}
	s.launcher.waitFor(t, "end of the server", func() error {
		if !s.hasEnded() {
			return errors.New("still running")
		}
		return nil
	})
	s.pid = 0
}

// restart ends the process with sig, calls down while no server runs, and starts it again.
func (s *servedDir) restart(t *testing.T, sig syscall.Signal, down func()) {
	t.Helper()
	s.end(t, sig)
	if down != nil {
		down()
	}
	s.start(t)
}

// freePort returns "127.0.0.1:port" with a port that was free a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// mountServed mounts s with "nfsrdmad mount --foreground" until the test ends. The mount is another
// process, so every system call of the test on the mount may block.
func mountServed(t *testing.T, s *servedDir, options ...string) string {
	t.Helper()
	return mountProcess(t, "/", append(options, "port="+portOf(t, s.rdma), "mountport="+portOf(t, s.tcp))...)
}

// mountProcess is mountServed for an export of a server on 127.0.0.1 with the ports in options.
func mountProcess(t *testing.T, export string, options ...string) string {
	t.Helper()
	dir, _ := startMount(t, export, options...)
	return dir
}

// startMount is mountProcess, and also returns the process.
func startMount(t *testing.T, export string, options ...string) (string, *process) {
	t.Helper()
	dir := openTempDir(t)
	p := startProcess(t, nil, nil, "mount", "--foreground", "127.0.0.1:"+export, dir, "-o", strings.Join(options, ","))
	t.Cleanup(func() {
		p.end(t, syscall.SIGTERM)
		if isMountPoint(dir) {
			t.Errorf("%s is still mounted after the client ended", dir)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	p.waitFor(t, "mounting "+dir, func() error {
		if !isMountPoint(dir) {
			return errors.New("not mounted yet")
		}
		return nil
	})
	return dir, p
}

// mountGanesha mounts the export of NFS-Ganesha through a relay.
func mountGanesha(t *testing.T, g *ganeshatest.Server) string {
	t.Helper()
	dir, _ := startGaneshaMount(t, g)
	return dir
}

// startGaneshaMount is mountGanesha, and also returns the process of the mount.
func startGaneshaMount(t *testing.T, g *ganeshatest.Server) (string, *process) {
	t.Helper()
	rdma := freePort(t)
	p := startProcess(t, nil, nil, "serve", "--backend", g.Addr(), "--rdma-listen", rdma)
	p.waitFor(t, "serving RDMA", func() error {
		if !strings.Contains(p.out.String(), "serving RDMA") {
			return errors.New("not serving yet")
		}
		return nil
	})
	return startMount(t, g.Export, "port="+portOf(t, rdma), "mountport="+strconv.Itoa(g.MountPort))
}

func portOf(t *testing.T, addr string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func isMountPoint(dir string) bool {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && strings.Contains(string(mounts), " "+dir+" ")
}

// openTempDir is a temporary directory that every user can reach and write to.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for path, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o755, dir: 0o777} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A rawClient is an NFSv3 client without caches, over TCP or RDMA.
type rawClient struct {
	*nfs3.Client
	t      testing.TB
	caller nfs3.Caller
	ctx    context.Context
	root   nfs3.FH
}

// dialTCP connects to addr and mounts "/". An error of the connection or of MNT is returned.
func dialTCP(t testing.TB, addr string) (*rawClient, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), processTimeout)
	t.Cleanup(cancel)
	r, err := rpctcp.Dial(ctx, addr, rpctcp.Options{})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { r.Close() })
	return newRawClient(ctx, t, r)
}

// dialRDMA is dialTCP for the RDMA port. It sends MNT over RDMA, too.
func dialRDMA(t testing.TB, addr string) (*rawClient, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), processTimeout)
	t.Cleanup(cancel)
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{}), Addr: netip.MustParseAddrPort(addr),
		Recovery: xprt.Soft, Timeout: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { tr.Close() })
	if err := tr.Connect(ctx); err != nil {
		return nil, err
	}
	return newRawClient(ctx, t, tr)
}

func newRawClient(ctx context.Context, t testing.TB, caller nfs3.Caller) (*rawClient, error) {
	c := &rawClient{Client: nfs3.NewClient(caller, nfs3.Options{}), t: t, caller: caller, ctx: ctx}
	var err error
	c.root, err = c.mnt("/")
	return c, err
}

// mnt sends MNT (RFC 1813 §5.2.1) on the client's own connection. A status other than MNT3_OK is a
// syscall.Errno.
func (c *rawClient) mnt(path string) (nfs3.FH, error) {
	m := sunrpc.Message{Prog: mountProgram, Vers: 3, Proc: 1, Cred: credential(0, 0),
		Args: sunrpc.AppendString(nil, path), MaxResult: 256, Result: make([]byte, 0, 256)}
	if err := c.caller.Call(c.ctx, &m); err != nil {
		return nfs3.FH{}, fmt.Errorf("MNT: %w", err)
	}
	d := sunrpc.NewDecoder(m.Result)
	if st := d.Uint32(); st != 0 {
		return nfs3.FH{}, fmt.Errorf("MNT: %w", syscall.Errno(st))
	}
	fh, err := nfs3.NewFH(d.Opaque(nfs3.FHSize))
	return fh, errors.Join(err, d.Err())
}

// transports are the two ways to a served directory.
var transports = []struct {
	name string
	dial func(t testing.TB, s *servedDir) (*rawClient, error)
}{
	{"TCP", func(t testing.TB, s *servedDir) (*rawClient, error) { return dialTCP(t, s.tcp) }},
	{"RDMA", func(t testing.TB, s *servedDir) (*rawClient, error) { return dialRDMA(t, s.rdma) }},
}

// mustDial returns a client over TCP that has the root handle.
func mustDial(t testing.TB, s *servedDir) *rawClient {
	t.Helper()
	c, err := dialTCP(t, s.tcp)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func credential(uid, gid uint32, gids ...uint32) []byte {
	return sunrpc.AppendAuthSys(nil, &sunrpc.AuthSys{Machine: "test", UID: uid, GID: gid, GIDs: gids})
}

func (c *rawClient) lookup(cred []byte, dir nfs3.FH, name string) (nfs3.FH, error) {
	var res nfs3.LookupResult
	err := c.Lookup(c.ctx, cred, dir, name, &res)
	return res.FH, err
}

// lookupRaw is lookup for names that nfs3 refuses to send.
func (c *rawClient) lookupRaw(dir nfs3.FH, name string) (nfs3.FH, error) {
	m := sunrpc.Message{Prog: nfs3.Program, Vers: nfs3.Version, Proc: uint32(nfs3.ProcLookup), Cred: credential(0, 0),
		Args: sunrpc.AppendString(sunrpc.AppendOpaque(nil, dir.Bytes()), name), MaxResult: 512, Result: make([]byte,
			0, 512)}
	if err := c.caller.Call(c.ctx, &m); err != nil {
		return nfs3.FH{}, err
	}
	d := sunrpc.NewDecoder(m.Result)
	if st := d.Uint32(); st != 0 {
		return nfs3.FH{}, syscall.Errno(st)
	}
	return nfs3.NewFH(d.Opaque(nfs3.FHSize))
}

// mustLookup finds a name of the root directory as root.
func (c *rawClient) mustLookup(name string) nfs3.FH {
	c.t.Helper()
	fh, err := c.lookup(credential(0, 0), c.root, name)
	if err != nil {
		c.t.Fatalf("LOOKUP %s: %v", name, err)
	}
	return fh
}

func (c *rawClient) create(cred []byte, dir nfs3.FH, name string, mode uint32) (nfs3.FH, error) {
	var res nfs3.CreateResult
	err := c.Create(c.ctx, cred, dir, name,
		&nfs3.CreateHow{Mode: nfs3.Guarded, Attr: nfs3.SetAttr{HasMode: true, Mode: mode}}, &res)
	return res.FH, err
}

func (c *rawClient) read(cred []byte, fh nfs3.FH) (string, error) {
	buf := make([]byte, 4096)
	var res nfs3.ReadResult
	err := c.Read(c.ctx, cred, fh, 0, buf, &res)
	return string(buf[:res.N]), err
}

// writeFiles makes files of dir with their contents, and the directories they need.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
