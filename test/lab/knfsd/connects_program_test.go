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

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// These cases run the nfsrdmad program and interrupt or kill it. A stock server must survive this.
var (
	_ = register("sixteen mounts", "sixteen concurrent mounts", testSixteenMounts)
	_ = register("nconnect", "nconnect=8", testNConnect)
	_ = register("canceled mounts", "mount commands interrupted and killed at random times", testCanceledMounts)
	_ = register("killed daemons", "daemons killed at random times during a mount", testKilledDaemons)
)

// disturbRounds is the number of disturbed mounts, and disturbRoundsInGuest that in a guest.
// disturbRoundsMax bounds the rounds if every disturbance comes too late.
const disturbRounds, disturbRoundsInGuest, disturbRoundsMax = 12, 6, 60

// A program is nfsrdmad with its control socket, a guest to mount from, and files in it.
type program struct {
	t           *testing.T
	b           bench
	bin, dir    string
	socket, log string
	daemon      *exec.Cmd
}

const helloFile, helloText = "hello", "world\n"

// newProgram builds the program and creates a file on the server. It does not start the daemon.
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

// unmount removes the mounts of a daemon that a failed case has killed.
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

// command returns a command of the program, with its control socket.
func (p *program) command(args ...string) *exec.Cmd {
	cmd := exec.Command(p.bin, append([]string{args[0], "--control-socket", p.socket}, args[1:]...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// mountCommand returns a command that mounts the guest's export on a new directory below p.dir.
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

// start starts a daemon and waits until it answers.
func (p *program) start() {
	p.t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	d := p.command("daemon", "--metrics-listen", "", "--connect-timeout", opTimeout.String())
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
	kit.Eventually(p.t, "the daemon to answer", func() bool { return p.command("list").Run() == nil })
}

// stop stops the daemon, which unmounts all mounts.
func (p *program) stop() {
	p.t.Helper()
	p.daemon.Process.Signal(syscall.SIGTERM)
	if err := p.daemon.Wait(); err != nil {
		p.t.Errorf("daemon: %v", err)
	}
}

// checkMount checks that a directory is a mount of the guest's export.
func (p *program) checkMount(dir string) {
	p.t.Helper()
	if text, err := os.ReadFile(filepath.Join(dir, helloFile)); err != nil || string(text) != helloText {
		p.t.Errorf("read %s: got %q, error %v", dir, text, err)
	}
}

// checkServer checks that the server accepts and checkMount a new connection.
func (p *program) checkServer() {
	p.t.Helper()
	m := p.b.mount(p.t, nil)
	p.checkMount(m.dir)
}

// mountAll runs mounts concurrently and checks each.
func (p *program) mountAll(mounts int, options string) {
	p.t.Helper()
	var all sync.WaitGroup
	for i := range mounts {
		cmd, dir := p.mountCommand(fmt.Sprint("m", i), options)
		all.Go(func() {
			if out, err := cmd.CombinedOutput(); err != nil {
				p.t.Errorf("mount %s: %v: %s", dir, err, out)
				return
			}
			p.checkMount(dir)
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
	if n := len(checkConnections(t, b, capture, 1, false)); n != mounts {
		t.Errorf("got %d connections, want %d", n, mounts)
	}
	p.checkServer()
}

func testNConnect(t *testing.T, b bench) {
	const mounts, each = 2, 8
	p := newProgram(t, b)
	p.start()
	capture := b.Capture(t, "nconnect")
	p.mountAll(mounts, fmt.Sprintf(",nconnect=%d", each))
	p.stop()
	if n := len(checkConnections(t, b, capture, 1, false)); n != mounts*each {
		t.Errorf("got %d connections, want %d", n, mounts*each)
	}
	p.checkServer()
}

// measureMount returns how long an undisturbed mount takes.
func (p *program) measureMount() time.Duration {
	p.t.Helper()
	cmd, dir := p.mountCommand("typical", "")
	begin := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		p.t.Fatalf("mount: %v: %s", err, out)
	}
	took := time.Since(begin)
	p.checkMount(dir)
	if out, err := p.command("umount", dir).CombinedOutput(); err != nil {
		p.t.Fatalf("umount: %v: %s", err, out)
	}
	return took
}

// newRNG returns a random number generator and logs its seed.
func newRNG(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// testCanceledMounts alternately interrupts and kills the mount command.
func testCanceledMounts(t *testing.T, b bench) {
	p := newProgram(t, b)
	p.start()
	typical, rng := p.measureMount(), newRNG(t)
	capture := b.Capture(t, "canceled")
	mounted := 0
	rounds := b.scaled(disturbRounds, disturbRoundsInGuest)
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
		if mounted == rounds && rounds < disturbRoundsMax { // no mount was canceled
			rounds++
		}
		// The signal may have come too late, or before the daemon got the request.
		kit.Eventually(t, "the end of the mount", func() bool {
			p.command("umount", dir).Run()
			out, err := p.command("list").Output()
			return err == nil && !strings.Contains(string(out), dir)
		})
	}
	p.stop()
	t.Logf("%d of %d mounts completed before the signal; %d connections", mounted, rounds,
		len(checkConnections(t, b, capture, 1, false)))
	if mounted == rounds {
		t.Error("got no canceled mount, want at least one")
	}
	p.checkServer()
}

// testKilledDaemons kills the process that connects: alternately a daemon, and a mount in the
// foreground.
func testKilledDaemons(t *testing.T, b bench) {
	b = b.ownServer(lab.Options{}) // a kill during the handshake can remove its listener
	p := newProgram(t, b)
	p.start()
	typical, rng := p.measureMount(), newRNG(t)
	p.stop()
	capture := b.Capture(t, "killed")
	rounds := b.scaled(disturbRounds, disturbRoundsInGuest)
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
		for unix.Unmount(dir, unix.MNT_DETACH) == nil { // no process checkMount the mount
		}
	}
	// A killed process cannot tell the next one about its pending connect.
	all := checkConnections(t, b, capture, 2, true)
	killedInHandshake := 0
	for _, c := range all {
		if c.killedInHandshake {
			killedInHandshake++
		}
	}
	t.Logf("%d connections, %d of them killed during the handshake", len(all), killedInHandshake)
	if killedInHandshake == 0 {
		p.checkServer()
	}
}
