package mounts

import (
	"bytes"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
)

// ProcessTimeout bounds the start and the end of a process.
const ProcessTimeout = 3 * time.Minute

// RunTimeout bounds a program that Run runs.
const RunTimeout = 30 * time.Minute

// ProgramEnv is an environment variable with the path of nfsrdmad, for a test process whose parent
// has built it.
const ProgramEnv = "NFSRDMAD_PROGRAM"

// Program builds nfsrdmad once for all tests of this process and returns its path. The file stays
// in bin, which git ignores, so that the linker runs only after a change. Each test package has a
// file for itself.
var Program = sync.OnceValues(func() (string, error) {
	if file := os.Getenv(ProgramEnv); file != "" {
		return file, nil
	}
	const name = "github.com/nfsrdmad/nfsrdmad" // some tests are in other modules, which have less modules
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", name).Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	pkg, err := os.Getwd()
	if err != nil {
		return "", err
	}
	dir := strings.TrimSpace(string(module))
	file := filepath.Join(dir, "bin", filepath.Base(pkg), "nfsrdmad")
	out, err := exec.Command("go", "build", "-C", dir, "-o", file, "./cmd/nfsrdmad").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return file, nil
})

// A Process is a running nfsrdmad. Its output goes to the test's log when the test fails.
type Process struct {
	Cmd   *exec.Cmd
	Ended chan struct{} // closed after Cmd.Wait returned
	Out   Output
}

// An Output is a bytes.Buffer that may be read while a process writes to it.
type Output struct {
	sync.Mutex
	buf bytes.Buffer
}

func (b *Output) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.buf.Write(p)
}

func (b *Output) String() string {
	b.Lock()
	defer b.Unlock()
	return b.buf.String()
}

// StartProcess starts nfsrdmad with args, behind the command wrap if that is not empty. input may
// be nil. The process is killed when the test ends.
func StartProcess(t *testing.T, wrap []string, input *os.File, args ...string) *Process {
	t.Helper()
	file, err := Program()
	if err != nil {
		t.Fatal(err)
	}
	line := append(append(append([]string{}, wrap...), file), args...)
	p := &Process{Cmd: exec.Command(line[0], line[1:]...), Ended: make(chan struct{})}
	p.Cmd.Stdout, p.Cmd.Stderr = &p.Out, &p.Out
	if input != nil {
		p.Cmd.Stdin = input
	}
	p.Cmd.WaitDelay = time.Second
	if err := p.Cmd.Start(); err != nil {
		t.Fatalf("start %v: %v", line, err)
	}
	go func() {
		defer close(p.Ended)
		_ = p.Cmd.Wait()
	}()
	t.Cleanup(func() {
		p.kill(t)
		if t.Failed() && p.Out.String() != "" {
			t.Logf("output of nfsrdmad %s:\n%s", strings.Join(args, " "), lastLines(p.Out.String(), 40))
		}
	})
	return p
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// End sends a signal and waits until the process has exited. A process that ignores the signal
// fails the test.
func (p *Process) End(t *testing.T, sig syscall.Signal) {
	t.Helper()
	_ = p.Cmd.Process.Signal(sig)
	select {
	case <-p.Ended:
	case <-time.After(ProcessTimeout):
		t.Errorf("nfsrdmad still runs %v after signal %v", ProcessTimeout, sig)
		p.kill(t)
	}
}

// kill kills the process and waits until it has exited. A thread that waits in the kernel can
// prevent that.
func (p *Process) kill(t *testing.T) {
	t.Helper()
	_ = p.Cmd.Process.Kill()
	select {
	case <-p.Ended:
	case <-time.After(ProcessTimeout):
		t.Errorf("nfsrdmad still runs %v after SIGKILL", ProcessTimeout)
	}
}

// WaitFor polls until done returns nil. It fails the test after ProcessTimeout, and at once when
// the process ends.
func (p *Process) WaitFor(t *testing.T, what string, done func() error) {
	t.Helper()
	deadline := time.Now().Add(ProcessTimeout)
	for {
		err := done()
		if err == nil {
			return
		}
		select {
		case <-p.Ended:
			t.Fatalf("nfsrdmad ended before %s: %v\n%s", what, err, p.Out.String())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v after %v\n%s", what, err, ProcessTimeout, p.Out.String())
		}
	}
}

// A ServedDir is "nfsrdmad serve DIR" as a process that can be stopped and started again with the
// same ports.
type ServedDir struct {
	Dir, RDMA, TCP string // the directory, and "host:port" of NFS over RDMA and of MOUNT and NFS over TCP
	launcher       *Process
	commands       io.Writer // of the launcher
	starts         int       // servers started so far
	pid            int       // of the server; 0 while none runs
}

// launcherScript starts the server for every line of its input and prints the process ID. It kills
// the server when its input ends, so also when the test process exits. A test with open files on a
// mount cannot start the server itself: the new process would close its copies of the files before
// it becomes the server, and closing them needs the server.
const launcherScript = `while read -r _; do "$@" </dev/null & pid=$!; echo "pid $pid"; done; kill -KILL $pid`

// ServeDir serves dir on two free ports of 127.0.0.1 until the test ends.
func ServeDir(t *testing.T, dir string, flags ...string) *ServedDir {
	t.Helper()
	return ServeDirAt(t, kit.FreePort(t).String(), kit.FreePort(t).String(), dir, flags...)
}

// ServeDirAt is ServeDir on the given addresses "host:port" of NFS over RDMA, and of MOUNT and NFS
// over TCP.
func ServeDirAt(t *testing.T, rdma, tcp, dir string, flags ...string) *ServedDir {
	t.Helper()
	input, output, err := os.Pipe()
	kit.Must(t, err)
	defer input.Close()
	t.Cleanup(func() { output.Close() })
	s := &ServedDir{Dir: dir, RDMA: rdma, TCP: tcp, commands: output}
	wrap := []string{"sh", "-c", launcherScript, "launcher"}
	args := append([]string{"serve", s.Dir, "--rdma-listen", s.RDMA, "--tcp-listen", s.TCP}, flags...)
	s.launcher = StartProcess(t, wrap, input, args...)
	t.Cleanup(func() {
		if s.pid != 0 {
			s.End(t, syscall.SIGTERM)
		}
	})
	s.start(t)
	return s
}

// start starts the process and waits until both ports answer.
func (s *ServedDir) start(t *testing.T) {
	t.Helper()
	s.starts++
	if _, err := io.WriteString(s.commands, "start\n"); err != nil {
		t.Fatal(err)
	}
	s.launcher.WaitFor(t, "starting the server", func() error {
		text := s.launcher.Out.String()
		i := strings.LastIndex(text, "pid ")
		if strings.Count(text, "pid ") < s.starts {
			return errors.New("no process ID yet")
		}
		_, err := fmt.Sscanf(text[i:], "pid %d\n", &s.pid)
		return err
	})
	for _, addr := range []string{s.TCP, s.RDMA} {
		s.launcher.WaitFor(t, "listening on "+addr, func() error {
			c, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil && s.hasEnded() {
				t.Fatalf("server ended:\n%s", s.launcher.Out.String())
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
func (s *ServedDir) hasEnded() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.pid))
	_, state, _ := strings.Cut(string(stat), ") ")
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.pid))
	return err != nil || strings.HasPrefix(state, "Z") && len(threads) <= 1
}

// PID returns the process ID of the server, or 0 while no server runs.
func (s *ServedDir) PID() int { return s.pid }

// End sends a signal to the server and waits until it has exited.
func (s *ServedDir) End(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(s.pid, sig); err != nil {
		t.Errorf("signal to the server: %v", err)
	}
	s.launcher.WaitFor(t, "end of the server", func() error {
		if !s.hasEnded() {
			return errors.New("still running")
		}
		return nil
	})
	s.pid = 0
}

// Restart ends the process with sig, calls down while no server runs, and starts it again.
func (s *ServedDir) Restart(t *testing.T, sig syscall.Signal, down func()) {
	t.Helper()
	s.End(t, sig)
	if down != nil {
		down()
	}
	s.start(t)
}

// MountServed mounts s with "nfsrdmad mount --foreground" until the test ends. The mount is another
// process, so every system call of the test on the mount may block.
func MountServed(t *testing.T, s *ServedDir, options ...string) string {
	t.Helper()
	dir, _ := StartServedMount(t, s, options...)
	return dir
}

// StartServedMount is MountServed, and also returns the process.
func StartServedMount(t *testing.T, s *ServedDir, options ...string) (string, *Process) {
	t.Helper()
	return StartMount(t, "127.0.0.1:/", append(options, "port="+PortOf(t, s.RDMA), "mountport="+PortOf(t, s.TCP))...)
}

// MountProcess is MountServed for a source "HOST:/EXPORT", with the ports in options.
func MountProcess(t *testing.T, source string, options ...string) string {
	t.Helper()
	dir, _ := StartMount(t, source, options...)
	return dir
}

// StartMount is MountProcess, and also returns the process.
func StartMount(t *testing.T, source string, options ...string) (string, *Process) {
	t.Helper()
	dir := OpenTempDir(t)
	p := StartProcess(t, nil, nil, "mount", "--foreground", source, dir, "-o", strings.Join(options, ","))
	t.Cleanup(func() {
		p.End(t, syscall.SIGTERM)
		if IsMountPoint(dir) {
			t.Errorf("%s is still mounted after the client ended", dir)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	p.WaitFor(t, "mounting "+dir, func() error {
		if !IsMountPoint(dir) {
			return errors.New("not mounted yet")
		}
		return nil
	})
	return dir, p
}

// MountGanesha mounts the export of NFS-Ganesha through a new relay. The relay runs on the host of
// the server.
func MountGanesha(t *testing.T, g *ganesha.Server, options ...string) string {
	t.Helper()
	dir, _ := StartGaneshaMount(t, g, options...)
	return dir
}

// StartGaneshaMount is MountGanesha, and also returns the process of the mount.
func StartGaneshaMount(t *testing.T, g *ganesha.Server, options ...string) (string, *Process) {
	t.Helper()
	return StartMount(t, g.Host+":"+g.Export, append(options, ServeGanesha(t, g)...)...)
}

// ServeGanesha starts a relay for the export of NFS-Ganesha until the test ends. The relay runs on
// the host of the server. It returns the mount options with the ports.
func ServeGanesha(t *testing.T, g *ganesha.Server) []string {
	t.Helper()
	rdma, _ := StartRelay(t, g)
	return []string{"port=" + PortOf(t, rdma), "mountport=" + strconv.Itoa(g.MountPort)}
}

// StartRelay is ServeGanesha, but it returns the address of the RDMA port and the process.
func StartRelay(t *testing.T, g *ganesha.Server) (rdma string, p *Process) {
	t.Helper()
	rdma = net.JoinHostPort(g.Host, fmt.Sprint(kit.FreePort(t).Port()))
	p = StartProcess(t, g.OnHost(t), nil, "serve", "--backend", g.Addr(), "--rdma-listen", rdma)
	p.WaitFor(t, "serving RDMA", func() error {
		if !strings.Contains(p.Out.String(), "serving RDMA") {
			return errors.New("not serving yet")
		}
		return nil
	})
	return rdma, p
}

// PortOf returns the port of "host:port".
func PortOf(t *testing.T, addr string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// IsMountPoint reports whether a file system is mounted on dir.
func IsMountPoint(dir string) bool {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && strings.Contains(string(mounts), " "+dir+" ")
}

// OpenTempDir is a temporary directory that every user can reach and write to.
func OpenTempDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for path, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o755, dir: 0o777} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// MemoryDir is an OpenTempDir in memory (tmpfs) until the test ends. options are those of tmpfs.
func MemoryDir(t *testing.T, options string) string {
	t.Helper()
	dir := OpenTempDir(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount tmpfs at %s: %v", dir, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// Run runs a program in dir and returns its output. If the program fails, the test fails. An empty
// dir is the current directory.
func Run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), RunTimeout)
	defer cancel()
	// The shell changes the directory. With Cmd.Dir, the forked process would change the directory
	// before exec. Go's runtime waits for the exec, and this process could not serve the mount
	// during this wait.
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", `cd -- "${0:-.}" && exec "$@"`, dir, name}, args...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}
