package lab_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { kit.Main(m) }

// TestGuestFunctions uses every function of a guest, on each tested kernel.
func TestGuestFunctions(t *testing.T) {
	for _, kernel := range lab.TestedKernels() {
		t.Run(kernel, func(t *testing.T) {
			begin := time.Now()
			g := lab.Start(t, lab.Options{Kernel: kernel, Credits: 32, Inline: 8192})
			t.Logf("%s served after %v", g.Release, time.Since(begin).Round(time.Millisecond))
			if got := strings.TrimSpace(g.MustRun("uname -r")); got != g.Release {
				t.Errorf("got kernel release %s, want %s", got, g.Release)
			}
			t.Run("commands", func(t *testing.T) { testCommands(t, g) })
			t.Run("settings", func(t *testing.T) { testSettings(t, g) })
			t.Run("kernel client", func(t *testing.T) { testKernelClient(t, g) })
			t.Run("capture", func(t *testing.T) { testCapture(t, g) })
			t.Run("network", func(t *testing.T) { testNetwork(t, g) })
			t.Run("power", func(t *testing.T) { testPower(t, g) })
		})
	}
}

func testCommands(t *testing.T, g *lab.Guest) {
	if out := g.MustRun("printf 'one\\ntwo'; echo three >&2"); out != "one\ntwothree\n" {
		t.Errorf("got output %q, want both outputs", out)
	}
	if out := g.MustRun("true"); out != "" {
		t.Errorf("got output %q, want none", out)
	}
	_, err := g.Run("echo before; exit 7")
	var failed *lab.CommandError
	if !errors.As(err, &failed) || failed.ExitCode != 7 || failed.Output != "before\n" {
		t.Errorf("got error %v, want exit code 7 and the output", err)
	}
	_, err = g.RunFor("sleep 1000", time.Second)
	if !errors.As(err, &failed) || failed.ExitCode != 137 {
		t.Errorf("command over its time limit: got error %v, want exit code 137", err)
	}
	big := strings.Repeat("0123456789abcdef\n", 4096)
	if out := g.MustRun("for i in $(seq 4096); do echo 0123456789abcdef; done"); out != big {
		t.Errorf("got %d bytes of output, want %d", len(out), len(big))
	}
	// The two commands run concurrently: one waits for the other.
	waits := make(chan error, 1)
	go func() {
		_, err := g.Run("while ! [ -e /tmp/go ]; do sleep 0.1; done")
		waits <- err
	}()
	g.MustRun("touch /tmp/go")
	if err := <-waits; err != nil {
		t.Error(err)
	}
}

func testSettings(t *testing.T, g *lab.Guest) {
	for file, want := range map[string]string{
		"/proc/sys/sunrpc/svc_rdma/max_requests": "32",
		"/proc/sys/sunrpc/svc_rdma/max_req_size": "8192",
		"/proc/fs/nfsd/max_block_size":           "1048576",
		"/proc/fs/nfsd/threads":                  "8",
	} {
		if got := strings.TrimSpace(g.MustRun("cat " + file)); got != want {
			t.Errorf("%s: got %s, want %s", file, got, want)
		}
	}
}

// kernelMount is a shell command that mounts the guest's export in the guest, with the kernel's
// client.
const kernelMount = "modprobe -a nfs nfsv3 && mount -t nfs " + kernelOptions + " 10.0.2.15:/export /mnt"

// kernelOptions are the mount options of the kernel's client.
const kernelOptions = "-o rdma,port=20049,vers=3,nolock,mountport=20048,mountproto=tcp"

func testKernelClient(t *testing.T, g *lab.Guest) {
	g.MustRun(`set -e
		dd if=/dev/urandom of=/tmp/f bs=1M count=4 2>/dev/null
		` + kernelMount + `
		grep ' /mnt nfs .*proto=rdma' /proc/mounts
		cp /tmp/f /mnt/f
		cmp /tmp/f /export/f
		echo 3 >/proc/sys/vm/drop_caches
		cmp /tmp/f /mnt/f
		rm /mnt/f /tmp/f
		umount /mnt`)
}

// TestKernelClientOverRXE mounts the server with the kernel's client over RoCE.
func TestKernelClientOverRXE(t *testing.T) {
	for _, kernel := range lab.TestedKernels() {
		t.Run(kernel, func(t *testing.T) {
			g := lab.Start(t, lab.Options{Kernel: kernel, Provider: lab.RXE, MemoryMiB: 512})
			if out := g.MustRun("rdma link"); !strings.Contains(out, "rxe0/1 state ACTIVE") ||
				strings.Contains(out, "siw") {
				t.Errorf("got RDMA links %s, want only rxe0", out)
			}
			testKernelClient(t, g)
		})
	}
}

// connect returns an NFS client of the guest over RDMA, for use until the test ends.
func connect(t *testing.T, g *lab.Guest) *nfs3.Client {
	t.Helper()
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{CRC: true}), Addr: g.RDMA})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for err := tr.Connect(ctx); err != nil; err = tr.Connect(ctx) {
		t.Logf("connect: %v", err) // a lost listener never comes back
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			t.Fatal("no connection within a minute")
		}
	}
	return nfs3.NewClient(tr, nfs3.Options{})
}

func testCapture(t *testing.T, g *lab.Guest) {
	c := g.Capture(t, "null")
	client := connect(t, g)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const calls = 5
	for range calls {
		if err := client.Null(ctx, sunrpc.AppendAuthNone(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	for filter, want := range map[string]int{"iwarp_mpa.req": 1, "iwarp_mpa.rep": 1,
		"rpcordma && rpc.msgtyp == 0": calls, "rpcordma && rpc.msgtyp == 1": calls} {
		out, err := c.Tshark("-Y", filter)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out, "\n"); n < want { // the transport may send keepalive calls
			t.Errorf("got %d packets for filter %s, want at least %d", n, filter, want)
		}
	}
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("got malformed packets (error %v): %s", err, out)
	}
}

// ping calls the NULL procedure of MOUNT. MOUNT uses plain TCP, so an aborted call cannot harm siw.
func ping(g *lab.Guest, limit time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	begin := time.Now()
	err := mountd.Null(ctx, mountd.Args{Host: g.Mount.Addr().String(), Port: int(g.Mount.Port()), Timeout: limit})
	return time.Since(begin), err
}

const answerTimeout = time.Minute

func testNetwork(t *testing.T, g *lab.Guest) {
	if _, err := ping(g, answerTimeout); err != nil {
		t.Fatalf("ping before the cut: %v", err)
	}
	if err := g.CutNetwork(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("ping over a cut network: got a reply, want a timeout")
	}
	g.MustRun("true") // commands do not use the network
	// The guest must not see a connection that ends during the cut: siw would lose its listener.
	conn, err := net.Dial("tcp", g.RDMA.String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte("MPA ID Req Frame")); err != nil {
		t.Error(err)
	}
	conn.Close()
	if err := g.RestoreNetwork(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, answerTimeout); err != nil {
		t.Errorf("ping after the cut: %v", err)
	}
	for range 2 { // the second fails if the first removed the listener
		connect(t, g)
	}
	const delay = 300 * time.Millisecond
	if err := g.SlowNetwork(lab.Impairment{Delay: delay}); err != nil {
		t.Fatal(err)
	}
	// A call takes at least two delays, one each way. The guest's TCP handshake adds another
	// round trip; QEMU answers the host's at once.
	if took, err := ping(g, answerTimeout); err != nil || took < 2*delay {
		t.Errorf("call over the slow network: got %v (error %v), want at least two delays of %v", took, err, delay)
	}
	if err := g.SlowNetwork(lab.Impairment{}); err != nil {
		t.Fatal(err)
	}
	if err := g.Freeze(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("ping of a frozen guest: got a reply, want a timeout")
	}
	if err := g.Thaw(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, answerTimeout); err != nil {
		t.Errorf("ping after the thaw: %v", err)
	}
}

func testPower(t *testing.T, g *lab.Guest) {
	// A file handle contains the inode number, so a synced file must keep it.
	const write = "echo kept >/export/f && sync && touch /fast/f && stat -c %i /export/f"
	check := func(inode string) {
		t.Helper()
		if got := g.MustRun("cat /export/f && stat -c %i /export/f"); got != "kept\n"+inode {
			t.Errorf("after the power failure: got %q, want the same file with inode %s", got, inode)
		}
		if out := g.MustRun("ls /fast"); out != "" {
			t.Errorf("got files %s in the export in memory, want none", out)
		}
		if _, err := ping(g, answerTimeout); err != nil {
			t.Error(err)
		}
	}
	inode := g.MustRun(write)
	ended := make(chan error, 1)
	go func() {
		_, err := g.Run("sleep 100")
		ended <- err
	}()
	for g.MustRun("pidof sleep >/dev/null && echo yes || true") == "" {
		time.Sleep(100 * time.Millisecond)
	}
	if err := g.Reset(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, lab.ErrPower) {
		t.Errorf("command during a reset: got error %v, want ErrPower", err)
	}
	check(inode)

	g.MustRun("touch /fast/f")
	before := g.Mount
	g.PowerOff()
	if _, err := g.Run("true"); err == nil {
		t.Error("command in a guest that is off: got no error")
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("ping of a guest that is off: got a reply")
	}
	if err := g.Boot(); err != nil {
		t.Fatal(err)
	}
	if g.Mount != before {
		t.Errorf("got a changed address: before the boot %v, after it %v", before, g.Mount)
	}
	check(inode)
}

// A recorder stands for a test whose failures are expected.
type recorder struct {
	testing.TB
	errors  []string
	cleanup []func()
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}
func (r *recorder) Failed() bool     { return len(r.errors) > 0 }
func (r *recorder) Cleanup(f func()) { r.cleanup = append(r.cleanup, f) }
func (r *recorder) end() {
	for i := len(r.cleanup) - 1; i >= 0; i-- {
		r.cleanup[i]()
	}
	r.cleanup = nil
}

// TestKernelErrorsFailTheTest checks that a kernel warning and a panic fail the test, and that an
// expected warning does not.
func TestKernelErrorsFailTheTest(t *testing.T) {
	r := &recorder{TB: t}
	g := lab.Start(r, lab.Options{MemoryMiB: 512, ExpectedKernelErrors: []string{"WARNING: .* at expected"}})
	defer r.end()
	g.MustRun(twoWarnings)
	if _, err := g.RunFor("echo c >/proc/sysrq-trigger", answerTimeout); !errors.Is(err, lab.ErrPanic) {
		t.Errorf("command that causes a panic: got error %v, want ErrPanic", err)
	}
	if err := g.Reset(); err != nil { // a panicked kernel does nothing until then
		t.Fatal(err)
	}
	g.MustRun("true")
	r.end()
	all := strings.Join(r.errors, "\n")
	for what, want := range map[string]bool{"expected.c": false, "other.c": true, "Kernel panic": true} {
		if strings.Contains(all, what) != want {
			t.Errorf("kernel error of %s: got reported %v, want %v; all reports:\n%s", what, !want, want, all)
		}
	}
}

// twoWarnings is a shell command that logs two kernel warnings.
const twoWarnings = "echo '<4>WARNING: CPU: 0 PID: 1 at expected.c:1' >/dev/kmsg; " +
	"echo '<4>WARNING: CPU: 0 PID: 1 at other.c:1' >/dev/kmsg"

// TestTwoKernelsAtOnce runs guests of both kernels at once.
func TestTwoKernelsAtOnce(t *testing.T) {
	guests := make(chan *lab.Guest, len(lab.Kernels))
	t.Run("start", func(both *testing.T) { // returns when both subtests have ended
		for _, kernel := range lab.Kernels {
			both.Run(kernel, func(t *testing.T) {
				t.Parallel()
				g := lab.Start(t, lab.Options{Kernel: kernel, MemoryMiB: 512, CPUs: 1})
				guests <- g
				// Keep each guest until both run.
				for len(guests) < len(lab.Kernels) && !both.Failed() {
					time.Sleep(100 * time.Millisecond)
				}
				if _, err := ping(g, answerTimeout); err != nil {
					t.Error(err)
				}
				if got := strings.TrimSpace(g.MustRun("uname -r")); got != g.Release {
					t.Errorf("got kernel release %[2]s, want %[1]s", g.Release, got)
				}
			})
		}
	})
}

// childEnv makes the test program start a guest and wait until it is killed.
const childEnv = "NFSRDMAD_LAB_TEST_CHILD"

// TestGuestEndsWithKilledTest checks that a guest and a capture end when their test's process is
// killed.
func TestGuestEndsWithKilledTest(t *testing.T) {
	if os.Getenv(childEnv) != "" {
		g := lab.Start(t, lab.Options{MemoryMiB: 512})
		g.Capture(t, "child")
		fmt.Println("started")
		select {}
	}
	lab.SkipIfDisabled(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestGuestEndsWithKilledTest$", "-test.v")
	// a killed process leaves its directory
	cmd.Env = append(os.Environ(), childEnv+"=1", "TMPDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	var output strings.Builder
	buf := make([]byte, 4096)
	for !strings.Contains(output.String(), "started") {
		n, err := out.Read(buf)
		output.Write(buf[:n])
		if err != nil {
			t.Fatalf("%v: %s", err, output.String())
		}
	}
	children := childrenOf(t, cmd.Process.Pid)
	if len(children) != 2 {
		t.Fatalf("got child processes %v, want QEMU and dumpcap", children)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, out)
	for deadline := time.Now().Add(answerTimeout); ; time.Sleep(50 * time.Millisecond) {
		alive := ""
		for pid, name := range children {
			if now, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(now) == name {
				alive += fmt.Sprintf("%d %s", pid, name)
			}
		}
		if alive == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes still running: %s", alive)
		}
	}
}

// childrenOf returns the names of a process's children by PID.
func childrenOf(t *testing.T, parent int) map[int]string {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", parent))
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[int]string)
	for _, task := range tasks {
		list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", parent, task.Name()))
		for field := range strings.FieldsSeq(string(list)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			found[pid] = string(name)
		}
	}
	return found
}
