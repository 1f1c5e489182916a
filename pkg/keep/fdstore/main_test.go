package fdstore

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestMain also runs the other processes of the tests, which are this program with an argument.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		var err error
		switch os.Args[1] {
		case "holder":
			err = RunHolder()
		case "daemon":
			err = runDaemon(os.Args[2])
		default:
			kit.Main(m) // exits
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			unix.Exit(1)
		}
		unix.Exit(0) // os.Exit waits for 1 s with the race detector
	}
	kit.Main(m)
}

func testConfig(t testing.TB) Config {
	t.Helper()
	return configAt(filepath.Join(t.TempDir(), "holder.sock"))
}

func configAt(socket string) Config {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	// The holder ignores the argument. holderPID finds the process by it.
	return Config{Socket: socket, Command: []string{self, "holder", socket}, Timeout: kit.Timeout}
}

// runDaemon opens the store, prints its entries, and executes the commands of its standard input:
//
//	put NAME CONTENT
//	remove NAME
//
// It prints "ok" or the error after each command.
func runDaemon(socket string) error {
	passed, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	s, err := Open(configAt(socket))
	if err != nil {
		return err
	}
	for _, v := range os.Environ() {
		if strings.HasPrefix(v, "LISTEN_") {
			return fmt.Errorf("environment has %s", v)
		}
	}
	for fd := listenStart; fd < listenStart+passed; fd++ {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			return fmt.Errorf("descriptor %d has no FD_CLOEXEC", fd)
		}
	}
	for _, e := range s.Kept() {
		fmt.Printf("kept %s %s\n", e.Name, contentOf(e.File))
	}
	fmt.Println("ready", s)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		f := strings.Fields(in.Text())
		switch f[0] {
		case "put":
			err = s.Put(f[1], memfd(f[2]))
		case "remove":
			err = s.Remove(f[1])
		}
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok")
		}
	}
	return s.Close()
}

// memfd returns a memfd with the content.
func memfd(content string) *os.File {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		panic(err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	if _, err := f.WriteString(content); err != nil {
		panic(err)
	}
	return f
}

func contentOf(f *os.File) string {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// A daemon is a process that runs runDaemon.
type daemon struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	kept  map[string]string
	store string
}

// startDaemon starts a daemon. prepare may change its command, and started gets its pid.
func startDaemon(t testing.TB, socket string, prepare func(*exec.Cmd), started func(pid int)) *daemon {
	t.Helper()
	self, err := os.Executable()
	kit.Must(t, err)
	d := &daemon{t: t, kept: make(map[string]string)}
	d.cmd = exec.Command("/bin/sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh", self, "daemon", socket)
	d.cmd.Stderr = os.Stderr
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if d.in, err = d.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := d.cmd.StdoutPipe()
	kit.Must(t, err)
	d.out = bufio.NewScanner(out)
	prepare(d.cmd)
	err = d.cmd.Start()
	kit.Must(t, err)
	started(d.cmd.Process.Pid)
	t.Cleanup(d.kill)
	for {
		line := d.line()
		if store, ok := strings.CutPrefix(line, "ready "); ok {
			d.store = store
			return d
		}
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "kept" {
			t.Fatalf("daemon printed %q at its start", line)
		}
		d.kept[f[1]] = f[2]
	}
}

func (d *daemon) line() string {
	d.t.Helper()
	if !d.out.Scan() {
		d.t.Fatalf("daemon ended: %v", d.out.Err())
	}
	return d.out.Text()
}

// do executes commands, which must succeed.
func (d *daemon) do(commands ...string) {
	d.t.Helper()
	for _, c := range commands {
		if _, err := fmt.Fprintln(d.in, c); err != nil {
			d.t.Fatal(err)
		}
		if got := d.line(); got != "ok" {
			d.t.Fatalf("%s: got %s, want ok", c, got)
		}
	}
}

// kill kills the daemon with SIGKILL.
func (d *daemon) kill() {
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait()
}

// holderPID returns the pid of the holder for a socket, or 0.
func holderPID(t testing.TB, socket string) int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	kit.Must(t, err)
	for _, dir := range dirs {
		if comm, _ := os.ReadFile(dir + "/comm"); string(comm) != holderComm+"\n" {
			continue
		}
		args, _ := os.ReadFile(dir + "/cmdline")
		if strings.HasSuffix(string(args), "\x00holder\x00"+socket+"\x00") {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			return pid
		}
	}
	return 0
}

// runningHolder returns the pid of the holder, and ends the holder after the test.
func runningHolder(t testing.TB, socket string) int {
	t.Helper()
	var pid int
	kit.Eventually(t, "holder", func() bool { pid = holderPID(t, socket); return pid != 0 })
	t.Cleanup(func() {
		if holderPID(t, socket) == pid {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	return pid
}

// descriptors returns the number of open descriptors of a process.
func descriptors(t testing.TB, pid int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	kit.Must(t, err)
	return len(all)
}
