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

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/softiwarp"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// TestGuest goes once through what a guest can do, on each kernel that is tested.
func TestGuest(t *testing.T) {
	for _, kernel := range lab.Tested() {
		t.Run(kernel, func(t *testing.T) {
			begin := time.Now()
			g := lab.Start(t, lab.Options{Kernel: kernel, Credits: 32, Inline: 8192})
			t.Logf("%s served after %v", g.Release, time.Since(begin).Round(time.Millisecond))
			if got := strings.TrimSpace(g.MustRun("uname -r")); got != g.Release {
				t.Errorf("the guest runs %s, its image says %s", got, g.Release)
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
		t.Errorf("output %q", out)
	}
	if out := g.MustRun("true"); out != "" {
		t.Errorf("output %q of nothing", out)
	}
	_, err := g.Run("echo before; exit 7")
	var failed *lab.CommandError
	if !errors.As(err, &failed) || failed.ExitCode != 7 || failed.Output != "before\n" {
		t.Errorf("exit 7: %v", err)
	}
	_, err = g.RunFor("sleep 1000", time.Second)
	if !errors.As(err, &failed) || failed.ExitCode != 137 {
		t.Errorf("a command over its limit: %v", err)
	}
	big := strings.Repeat("0123456789abcdef\n", 4096)
	if out := g.MustRun("for i in $(seq 4096); do echo 0123456789abcdef; done"); out != big {
		t.Errorf("%d octets of output, want %d", len(out), len(big))
	}
	// One command waits for what the other does.
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
			t.Errorf("%s holds %s, want %s", file, got, want)
		}
	}
}

// kernelMount is a shell command that mounts the guest's export in the guest, with the kernel's own
// client.
const kernelMount = "modprobe -a nfs nfsv3 && mount -t nfs -o rdma,port=20049,vers=3,nolock,mountport=20048,mountproto=tcp 10.0.2.15:/export /mnt"

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

// TestRXE has the kernel's own client meet the server over RoCE.
func TestRXE(t *testing.T) {
	if !lab.Whole() {
		t.Skip("TestLink has the same between two guests")
	}
	for _, kernel := range lab.Tested() {
		t.Run(kernel, func(t *testing.T) {
			g := lab.Start(t, lab.Options{Kernel: kernel, Provider: lab.RXE, MemoryMiB: 512})
			if out := g.MustRun("rdma link"); !strings.Contains(out, "rxe0/1 state ACTIVE") ||
				strings.Contains(out, "siw") {
				t.Errorf("RDMA links: %s", out)
			}
			testKernelClient(t, g)
		})
	}
}

// connect makes an NFS client of the guest over RDMA, until the test ends.
func connect(t *testing.T, g *lab.Guest) *nfs3.Client {
	t.Helper()
	tr, err := xprt.New(xprt.Config{Provider: softiwarp.New(softiwarp.Config{CRC: true}), Addr: g.RDMA})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := tr.Connect(ctx); err != nil {
		t.Fatal(err)
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
		if n := strings.Count(out, "\n"); n < want { // the transport may have calls of its own
			t.Errorf("%d packets are %s, want at least %d", n, filter, want)
		}
	}
	if out, err := c.Malformed(); err != nil || out != "" {
		t.Errorf("malformed packets (%v): %s", err, out)
	}
}

// ping asks the MOUNT service whether it is there. MOUNT goes over plain TCP: nothing that is cut
// short can harm siw.
func ping(g *lab.Guest, limit time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	begin := time.Now()
	err := mountd.Null(ctx, mountd.Args{Host: g.Mount.Addr().String(), Port: int(g.Mount.Port()), Timeout: limit})
	return time.Since(begin), err
}

const patient = time.Minute

func testNetwork(t *testing.T, g *lab.Guest) {
	if _, err := ping(g, patient); err != nil {
		t.Fatalf("before the cut: %v", err)
	}
	if err := g.CutNetwork(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("the server answers over a network that is cut")
	}
	g.MustRun("true") // commands go another way
	// A connection that begins and ends meanwhile is none: siw's listener would not survive it.
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
	if _, err := ping(g, patient); err != nil {
		t.Errorf("after the cut: %v", err)
	}
	for range 2 { // the second tells what the first has done
		connect(t, g)
	}
	const delay = 300 * time.Millisecond
	if err := g.SlowNetwork(lab.Line{Delay: delay}); err != nil {
		t.Fatal(err)
	}
	// There and back, and both ways are slow: the guest's end of the TCP connection adds one more
	// round, QEMU answers for it at once.
	if took, err := ping(g, patient); err != nil || took < 2*delay {
		t.Errorf("a call took %v (%v), with a delay of %v each way", took, err, delay)
	}
	if err := g.SlowNetwork(lab.Line{}); err != nil {
		t.Fatal(err)
	}
	if err := g.Freeze(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("a frozen server answers")
	}
	if err := g.Thaw(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(g, patient); err != nil {
		t.Errorf("after the thaw: %v", err)
	}
}

func testPower(t *testing.T, g *lab.Guest) {
	// A synchronous file is on the disk; the inode number is what its file handle is made of.
	const write = "echo kept >/export/f && sync && touch /fast/f && stat -c %i /export/f"
	check := func(inode string) {
		t.Helper()
		if got := g.MustRun("cat /export/f && stat -c %i /export/f"); got != "kept\n"+inode {
			t.Errorf("after the power was gone: %q, want the same file %s", got, inode)
		}
		if out := g.MustRun("ls /fast"); out != "" {
			t.Errorf("memory survived: %s", out)
		}
		if _, err := ping(g, patient); err != nil {
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
		t.Errorf("a command under a reset: %v", err)
	}
	check(inode)

	g.MustRun("touch /fast/f")
	before := g.Mount
	g.PowerOff()
	if _, err := g.Run("true"); err == nil {
		t.Error("a guest without power runs commands")
	}
	if _, err := ping(g, time.Second); err == nil {
		t.Error("a guest without power answers")
	}
	if err := g.Boot(); err != nil {
		t.Fatal(err)
	}
	if g.Mount != before {
		t.Errorf("the address was %v and is %v", before, g.Mount)
	}
	check(inode)
}

// A recorder is a test that may fail.
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

// TestComplaints holds a test to what the kernel says, a warning and a panic here, unless it was
// announced.
func TestComplaints(t *testing.T) {
	r := &recorder{TB: t}
	g := lab.Start(r, lab.Options{MemoryMiB: 512, Complaints: []string{"WARNING: .* at announced"}})
	defer r.end()
	g.MustRun("echo '<4>WARNING: CPU: 0 PID: 1 at announced.c:1' >/dev/kmsg; echo '<4>WARNING: CPU: 0 PID: 1 at other.c:1' >/dev/kmsg")
	if _, err := g.RunFor("echo c >/proc/sysrq-trigger", patient); !errors.Is(err, lab.ErrPanic) {
		t.Errorf("a command that makes the kernel panic: %v", err)
	}
	if err := g.Reset(); err != nil { // it stands still otherwise
		t.Fatal(err)
	}
	g.MustRun("true")
	r.end()
	all := strings.Join(r.errors, "\n")
	for what, want := range map[string]bool{"announced.c": false, "other.c": true, "Kernel panic": true} {
		if strings.Contains(all, what) != want {
			t.Errorf("complaint of %s: %v, want %v; all are:\n%s", what, !want, want, all)
		}
	}
}

// TestTwoGuests runs both kernels at once.
func TestTwoGuests(t *testing.T) {
	guests := make(chan *lab.Guest, len(lab.Kernels))
	t.Run("start", func(both *testing.T) { // returns when both have started
		for _, kernel := range lab.Kernels {
			both.Run(kernel, func(t *testing.T) {
				t.Parallel()
				g := lab.Start(t, lab.Options{Kernel: kernel, MemoryMiB: 512, CPUs: 1})
				guests <- g
				// each is there until both are
				for len(guests) < len(lab.Kernels) && !both.Failed() {
					time.Sleep(100 * time.Millisecond)
				}
				if _, err := ping(g, patient); err != nil {
					t.Error(err)
				}
				if got := strings.TrimSpace(g.MustRun("uname -r")); got != g.Release {
					t.Errorf("guest of %s runs %s", g.Release, got)
				}
			})
		}
	})
}

// childEnv makes the test binary start a guest and wait to be killed.
const childEnv = "NFSRDMAD_LAB_TEST_CHILD"

// TestKilledTest kills a whole test process: its guest and its capture go too.
func TestKilledTest(t *testing.T) {
	if os.Getenv(childEnv) != "" {
		g := lab.Start(t, lab.Options{MemoryMiB: 512})
		g.Capture(t, "child")
		fmt.Println("started")
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestKilledTest$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"=1", "TMPDIR="+t.TempDir()) // it removes nothing
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	var said strings.Builder
	buf := make([]byte, 4096)
	for !strings.Contains(said.String(), "started") {
		n, err := out.Read(buf)
		said.Write(buf[:n])
		if err != nil {
			// as its own: no guest is wanted, or nothing is built and nobody asked for it
			if strings.Contains(said.String(), "--- SKIP") {
				t.Skip(said.String())
			}
			t.Fatalf("%v: %s", err, said.String())
		}
	}
	children := childrenOf(t, cmd.Process.Pid)
	if len(children) != 2 {
		t.Fatalf("processes of the test: %v, want QEMU and dumpcap", children)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, out)
	for deadline := time.Now().Add(patient); ; time.Sleep(50 * time.Millisecond) {
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
			t.Fatalf("still alive: %s", alive)
		}
	}
}

// childrenOf returns the names of a process's children by pid.
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
