package knfsd

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// These cases run the real program, and do to it what happens to programs. A stock server takes no
// harm of it.
var (
	_ = register("sixteen mounts", "sixteen mounts started together", testSixteenMounts)
	_ = register("nconnect", "nconnect=8", testNConnect)
	_ = register("cancelled mounts", "mounts interrupted and killed at any moment", testCancelledMounts)
	_ = register("killed daemons", "daemons killed at any moment of a mount", testKilledDaemons)
)

// harmRounds is how often a mount is disturbed, harmRoundsIn in a guest, and harmMost where the
// disturbance came too late each time.
const harmRounds, harmRoundsIn, harmMost = 12, 6, 60

// A program is nfsrdmad with a control socket of its own, a guest to mount from, and files in it.
type program struct {
	t           *testing.T
	b           bench
	bin, dir    string
	socket, log string
	daemon      *exec.Cmd
}

const helloFile, helloText = "hello", "world\n"

// newProgram builds the program, and puts a file on the server. No daemon runs yet.
func newProgram(t *testing.T, b bench) *program {
	t.Helper()
	p := &program{t: t, b: b, dir: t.TempDir()}
	p.bin, p.socket, p.log = *programFlag, filepath.Join(p.dir, "s"), filepath.Join(p.dir, "log")
	if p.bin == "" {
		p.bin = filepath.Join(p.dir, "nfsrdmad")
		run(t, "", "go", "build", "-o", p.bin, "github.com/nfsrdmad/nfsrdmad/cmd/nfsrdmad")
	}
	t.Cleanup(p.unmount)
	b.MustRun("echo world >/export/" + helloFile)
	t.Cleanup(func() { b.MustRun("rm /export/" + helloFile) })
	return p
}

// unmount takes away what a daemon left that was killed as its case failed.
func (p *program) unmount() {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		p.t.Error(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if dir := strings.Fields(line)[1]; strings.HasPrefix(dir, p.dir+"/") {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				p.t.Errorf("unmount %s: %v", dir, err)
			}
		}
	}
}

// command is the program with these arguments, the control socket among them.
func (p *program) command(args ...string) *exec.Cmd {
	cmd := exec.Command(p.bin, append([]string{args[0], "--control-socket", p.socket}, args[1:]...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// mountCommand mounts the guest's export on a directory below p.dir, which it makes.
func (p *program) mountCommand(name, options string, flags ...string) (cmd *exec.Cmd, dir string) {
	p.t.Helper()
	dir = filepath.Join(p.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		p.t.Fatal(err)
	}
	opts := fmt.Sprintf("port=%d,mountport=%d,provider=%s%s", p.b.RDMA.Port(), p.b.Mount.Port(), p.b.name, options)
	return p.command(append(append([]string{"mount"}, flags...), p.b.Mount.Addr().String()+":"+lab.ExportRW, dir,
		"-o", opts)...), dir
}

// start starts a daemon, and waits until it answers.
func (p *program) start() {
	p.t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	d := p.command("daemon", "--metrics-listen", "", "--connect-timeout", limit.String())
	d.Stderr = log
	if err := d.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.daemon = d
	p.t.Cleanup(func() {
		if d.ProcessState == nil {
			d.Process.Kill()
			d.Wait()
		}
		if p.t.Failed() {
			text, _ := os.ReadFile(p.log)
			p.t.Logf("the daemon's log:\n%.10000s", text)
		}
	})
	waitFor(p.t, "the daemon to answer", func() bool { return p.command("list").Run() == nil })
}

// stop ends the daemon in order, and with it all mounts.
func (p *program) stop() {
	p.t.Helper()
	p.daemon.Process.Signal(syscall.SIGTERM)
	if err := p.daemon.Wait(); err != nil {
		p.t.Errorf("daemon: %v", err)
	}
}

// serves checks that a directory is a mount of the guest.
func (p *program) serves(dir string) {
	p.t.Helper()
	if text, err := os.ReadFile(filepath.Join(dir, helloFile)); err != nil || string(text) != helloText {
		p.t.Errorf("%s: %q, %v", dir, text, err)
	}
}

// unharmed checks that the server takes connections, and serves them.
func (p *program) unharmed() {
	p.t.Helper()
	m := p.b.mount(p.t, nil)
	p.serves(m.dir)
}

// mountAll starts mounts together, and checks each.
func (p *program) mountAll(mounts int, options string) {
	p.t.Helper()
	var all sync.WaitGroup
	for i := range mounts {
		cmd, dir := p.mountCommand(fmt.Sprint("m", i), options)
		all.Go(func() {
			if out, err := cmd.CombinedOutput(); err != nil {
				p.t.Errorf("mount on %s: %v: %s", dir, err, out)
				return
			}
			p.serves(dir)
		})
	}
	all.Wait()
}

func testSixteenMounts(t *testing.T, b bench) {
	const mounts = 16
	p := newProgram(t, b)
	p.start()
	capture := b.Capture(t, "sixteen")
	p.mountAll(mounts, "")
	p.stop()
	if n := len(gentle(t, b, capture, 1, false)); n != mounts {
		t.Errorf("%d connections, want %d", n, mounts)
	}
	p.unharmed()
}

func testNConnect(t *testing.T, b bench) {
	const mounts, each = 2, 8
	p := newProgram(t, b)
	p.start()
	capture := b.Capture(t, "nconnect")
	p.mountAll(mounts, fmt.Sprintf(",nconnect=%d", each))
	p.stop()
	if n := len(gentle(t, b, capture, 1, false)); n != mounts*each {
		t.Errorf("%d connections, want %d", n, mounts*each)
	}
	p.unharmed()
}

// typicalMount is how long an undisturbed mount takes now.
func (p *program) typicalMount() time.Duration {
	p.t.Helper()
	cmd, dir := p.mountCommand("typical", "")
	begin := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		p.t.Fatalf("mount: %v: %s", err, out)
	}
	took := time.Since(begin)
	p.serves(dir)
	if out, err := p.command("umount", dir).CombinedOutput(); err != nil {
		p.t.Fatalf("umount: %v: %s", err, out)
	}
	return took
}

// moments are random times in a mount, the same for the same seed.
func moments(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// testCancelledMounts interrupts and kills the command that mounts, by turns.
func testCancelledMounts(t *testing.T, b bench) {
	p := newProgram(t, b)
	p.start()
	typical, rng := p.typicalMount(), moments(t)
	capture := b.Capture(t, "cancelled")
	mounted := 0
	rounds := b.smaller(harmRounds, harmRoundsIn)
	for i := 0; i < rounds; i++ {
		cmd, dir := p.mountCommand("m", "")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rng.Int64N(int64(typical))))
		cmd.Process.Signal([]os.Signal{os.Interrupt, os.Kill}[i%2])
		if cmd.Wait() == nil {
			mounted++
		}
		if mounted == rounds && rounds < harmMost { // none was cancelled
			rounds++
		}
		// It may have been too late, or not have come to the daemon yet.
		waitFor(t, "the end of the mount", func() bool {
			p.command("umount", dir).Run()
			out, err := p.command("list").Output()
			return err == nil && !strings.Contains(string(out), dir)
		})
	}
	p.stop()
	t.Logf("%d of %d mounts were done before they were cancelled, %d connections", mounted, rounds,
		len(gentle(t, b, capture, 1, false)))
	if mounted == rounds {
		t.Error("no mount was cancelled")
	}
	p.unharmed()
}

// testKilledDaemons kills the process that connects: a daemon, and a mount in the foreground, by
// turns.
func testKilledDaemons(t *testing.T, b bench) {
	b = b.another(lab.Options{}) // a kill in the handshake costs it its listener
	p := newProgram(t, b)
	p.start()
	typical, rng := p.typicalMount(), moments(t)
	p.stop()
	capture := b.Capture(t, "killed")
	rounds := b.smaller(harmRounds, harmRoundsIn)
	for i := range rounds {
		var flags []string
		if i%2 == 1 {
			flags = []string{"--foreground"}
		} else {
			p.start()
		}
		cmd, dir := p.mountCommand("m", "", flags...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rng.Int64N(int64(typical))))
		if i%2 == 0 {
			p.daemon.Process.Kill()
			p.daemon.Wait()
		} else {
			cmd.Process.Kill()
		}
		cmd.Wait()
		for unix.Unmount(dir, unix.MNT_DETACH) == nil { // nobody serves it any more
		}
	}
	// A killed process cannot tell the next one that its connect is still under way.
	all := gentle(t, b, capture, 2, true)
	unlucky := 0
	for _, c := range all {
		if c.unlucky {
			unlucky++
		}
	}
	t.Logf("%d connections, %d of them killed in the handshake", len(all), unlucky)
	if unlucky == 0 {
		p.unharmed()
	}
}
