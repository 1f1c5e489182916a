package lab

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Ports of the services in a guest.
const (
	rdmaPort    = 20049 // RFC 8267 §6
	nfsPort     = 2049
	mountPort   = 20048
	portmapPort = 111
	nlmPort     = 4045 // in image/guest/init
)

const (
	// The host's ports are below the range from which Linux takes source ports. Otherwise a connect
	// to such a port while the guest is off could get that port as its source and connect to
	// itself.
	firstHostPort = 20100
	lastHostPort  = 32000
	// startTries bounds the retries after another process takes a host port before QEMU binds it.
	startTries = 5
	// logLines is the number of console lines that a failed test shows.
	logLines = 60
)

// A Guest is a virtual machine with an NFS/RDMA server. Its addresses are ports of the host and
// stay the same over resets.
type Guest struct {
	RDMA    netip.AddrPort // NFS over RDMA, with SIW
	NFS     netip.AddrPort // NFS over TCP
	Mount   netip.AddrPort // MOUNT over TCP
	Portmap netip.AddrPort // rpcbind over TCP
	NLM     netip.AddrPort // lock manager over TCP
	Release string         // kernel release, as in uname -r
	// Linked is the address on Options.Link, where the server's ports are the standard ones.
	Linked netip.Addr

	t          testing.TB
	opts       Options
	img        image
	disk       *os.File
	console    *console
	rdma       *forwarder     // from RDMA to QEMU's forwarded port
	remoteAddr netip.AddrPort // host address of the guest's remotePort
	port       *port          // on Options.Link; nil without a link
	// captures numbers the captures on the link.
	captures atomic.Int32
	// remote carries out every method if this process runs in a guest; then the fields around it
	// are not used.
	remote *remoteGuest

	power sync.Mutex // held while the power changes

	mu      sync.Mutex
	machine *machine // guarded by mu; nil while the guest is off
	bootID  string   // guarded by mu; ID of the last boot that got ready
	cut     bool     // guarded by mu; CutNetwork is in effect
}

// Start boots a guest and waits until it serves. The guest ends with the test, which fails if the
// guest's kernel logged an error. If there is no image, Start skips the test, or fails it if
// NFSRDMAD_LAB is 1 or all. With NFSRDMAD_LAB=0 it always skips. In a process that uses its host's
// lab, the host runs the guest.
func Start(t testing.TB, opts Options) *Guest {
	t.Helper()
	if Remote() {
		return startRemote(t, opts)
	}
	g := newGuest(t, opts)
	if err := g.firstBoot(); err != nil {
		t.Fatal(err)
	}
	return g
}

// StartAll is Start for several guests, which boot concurrently.
func StartAll(t testing.TB, opts ...Options) []*Guest {
	t.Helper()
	guests := make([]*Guest, len(opts))
	if Remote() {
		for i, o := range opts {
			guests[i] = startRemote(t, o)
		}
		return guests
	}
	for i, o := range opts {
		guests[i] = newGuest(t, o)
	}
	errs := make([]error, len(guests))
	var boots sync.WaitGroup
	for i, g := range guests {
		boots.Go(func() { errs[i] = g.firstBoot() })
	}
	boots.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return guests
}

// newGuest returns a guest that is off.
func newGuest(t testing.TB, opts Options) *Guest {
	t.Helper()
	opts = opts.withDefaults()
	img := requireImage(t, opts.Kernel)
	if strings.ContainsAny(opts.Share, " ,\"'") {
		t.Fatalf("guest %s: share %q: kernel and QEMU options cannot contain spaces, commas or quotes",
			opts.Name, opts.Share)
	}
	if opts.Systemd {
		img.root = requireSystemd(t)
	}
	disk, err := newDisk(opts.DiskMiB, img.root)
	if err != nil {
		t.Fatal(err)
	}
	g := &Guest{t: t, opts: opts, img: img, disk: disk, Release: img.release, console: &console{}}
	t.Cleanup(g.end)
	if opts.Link != nil {
		if g.port, err = opts.Link.join(opts.Address); err != nil {
			t.Fatalf("guest %s: %v", opts.Name, err)
		}
		g.Linked = g.port.addr.Addr()
	}
	return g
}

// firstBoot chooses the host's ports and boots the guest. It repeats a boot that failed for reasons
// outside the test.
func (g *Guest) firstBoot() error {
	for try := 1; ; try++ {
		err := g.choosePorts()
		if err == nil {
			err = g.Boot()
		}
		if err == nil {
			return nil
		}
		g.PowerOff()
		if g.rdma != nil {
			g.rdma.close()
		}
		switch {
		case try < startTries && (strings.Contains(err.Error(), "host forwarding rule") ||
			errors.Is(err, syscall.EADDRINUSE)):
		case try < startTries && errors.Is(err, ErrPanic), try == 1 && errors.Is(err, errNotReady):
			// A kernel may stall when the host gives little time to some of the guest's processors.
			// No code of the project has run yet.
			g.t.Logf("guest %s: boot failed, retrying: %v", g.opts.Name, err)
			g.console = &console{}
		default:
			return fmt.Errorf("guest %s: %w", g.opts.Name, err)
		}
	}
}

// newDisk returns an unlinked sparse file. It begins with a copy of the file system in the file
// image, unless image is "".
func newDisk(mib int, image string) (*os.File, error) {
	dir, err := cacheDir()
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, "disk-")
	if err != nil {
		return nil, err
	}
	err = os.Remove(f.Name())
	if image != "" && err == nil {
		err = copySparse(f, image)
	}
	if err := errors.Join(err, f.Truncate(int64(mib)<<20)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// copySparse copies the file with this name to the empty file to, with its holes.
func copySparse(to *os.File, name string) error {
	cmd := exec.Command("cp", "--sparse=always", name, "/proc/self/fd/1")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = to, &output
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", name, err, output.String())
	}
	return nil
}

func (g *Guest) choosePorts() error {
	host := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	var open []net.Listener // kept open until all ports are chosen, so that they differ
	defer func() {
		for _, l := range open {
			l.Close()
		}
	}()
	var inner netip.AddrPort
	for _, addr := range []*netip.AddrPort{&g.RDMA, &inner, &g.NFS, &g.Mount, &g.Portmap, &g.NLM, &g.remoteAddr} {
		for try := 0; ; try++ {
			*addr = netip.AddrPortFrom(host, uint16(firstHostPort+rand.IntN(lastHostPort-firstHostPort)))
			l, err := net.Listen("tcp", addr.String())
			if err == nil {
				open = append(open, l)
				break
			}
			if try == 100 {
				return err
			}
		}
	}
	g.rdma = newForwarder(g.RDMA, inner)
	if g.opts.KillSafe {
		g.rdma.life = killSafeLife
	}
	return nil
}

// arguments returns QEMU's arguments except those for the disk, the console and the control
// sockets.
func (g *Guest) arguments() []string {
	network := "user,id=net0,restrict=on,ipv6=off"
	for _, f := range []struct {
		host  netip.AddrPort
		guest int
	}{
		{g.rdma.to, rdmaPort},
		{g.NFS, nfsPort},
		{g.Mount, mountPort},
		{g.Portmap, portmapPort},
		{g.NLM, nlmPort},
		{g.remoteAddr, remotePort},
	} {
		network += fmt.Sprintf(",hostfwd=tcp:%s-%s:%d", f.host, guestAddr, f.guest)
	}
	o := g.opts
	// Level 5 prints warnings on the console and little else, because a serial port is slow.
	// Watchdogs and the timer check at boot would report a busy host as an error.
	line := "console=ttyS0 loglevel=5 panic=0 mitigations=off nokaslr net.ifnames=0 " +
		"tsc=reliable no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
	if khz := tscKHz(); khz > 0 {
		line += fmt.Sprintf(" tsc_early_khz=%d", khz)
	}
	if o.Provider != None {
		line += " lab.provider=" + o.Provider
	}
	for _, s := range []struct {
		name  string
		value int
	}{{"threads", o.Threads}, {"maxblock", o.MaxBlock}, {"credits", o.Credits}, {"inline", o.Inline}} {
		if s.value != 0 {
			line += fmt.Sprintf(" lab.%s=%d", s.name, s.value)
		}
	}
	// After a reset QEMU keeps the translated code of the previous boot. This makes the boot three
	// times as slow until the translation buffer is full and flushed; a small buffer fills early.
	args := []string{
		"-name", "nfsrdmad-lab-" + o.Name, "-M", "q35", "-accel", "tcg,thread=multi,tb-size=64", "-cpu", "max",
		"-smp", strconv.Itoa(o.CPUs), "-m", strconv.Itoa(o.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none",
		"-kernel", g.img.kernel, "-initrd", g.img.initramfs,
		"-netdev", network, "-device", "virtio-net-pci,netdev=net0,romfile=", "-device", "virtio-rng-pci",
	}
	if g.port != nil {
		line += fmt.Sprintf(" lab.link=%v lab.mtu=%d", g.port.addr, linkMTU)
	}
	if o.Share != "" {
		line += " lab.share=" + o.Share
		args = append(args, "-virtfs", "local,path="+o.Share+",mount_tag=share,security_model=none")
	}
	if o.Systemd {
		line += " lab.systemd=1"
	}
	if o.HostRoot {
		line += " lab.hostroot=1"
		// The host's root contains other file systems, whose inode numbers must not collide.
		args = append(args, "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap")
	}
	if o.Virtiofs != "" {
		args = append(args, "-object", fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on", o.MemoryMiB),
			"-numa", "node,memdev=mem", "-chardev", "socket,id=virtiofs,path="+o.Virtiofs,
			"-device", "vhost-user-fs-pci,chardev=virtiofs,tag=share,queue-size=1024")
	}
	return append(args, "-append", line)
}

// Boot powers on a guest that is off, with the same disk and addresses, and waits until it serves.
func (g *Guest) Boot() error {
	if g.remote != nil {
		return g.remote.do(opBoot)
	}
	g.power.Lock()
	defer g.power.Unlock()
	g.mu.Lock()
	on, last := g.machine != nil, g.bootID
	g.mu.Unlock()
	if on {
		return fmt.Errorf("guest %s: boot: already on", g.opts.Name)
	}
	return g.powerOn(last)
}

func (g *Guest) powerOn(last string) error {
	g.console.note("power on, kernel %s", g.img.release)
	b := g.console.beginBoot(last)
	m, err := startMachine(g.opts.Name, g.arguments(), g.disk, g.port, g.console)
	if err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	g.mu.Lock()
	g.machine, g.cut = m, false
	g.mu.Unlock()
	if err := g.rdma.listen(); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	return g.awaitReady(m, b)
}

// awaitReady waits until the boot serves.
func (g *Guest) awaitReady(m *machine, b *boot) error {
	if err := m.awaitReady(b); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	g.mu.Lock()
	g.bootID = b.id
	cut := g.cut
	g.mu.Unlock()
	if !cut {
		g.rdma.release()
	}
	return nil
}

// PowerOff ends the guest at once. Data that the guest has not written to its disk is lost.
// Connections of the host end, and new ones are refused; use Freeze for a server that only stops
// responding. PowerOff does nothing if the guest is off.
func (g *Guest) PowerOff() {
	if g.remote != nil {
		g.remote.do(opPowerOff)
		return
	}
	g.power.Lock()
	defer g.power.Unlock()
	g.powerOff()
}

func (g *Guest) powerOff() {
	g.mu.Lock()
	m := g.machine
	g.machine = nil
	g.mu.Unlock()
	if m == nil {
		return
	}
	g.console.note("power off")
	g.rdma.refuse()
	m.kill()
	if g.port != nil {
		g.port.unplug()
	}
}

// ShutDown stops the system of a guest with Options.Systemd, as systemctl poweroff does, and waits
// until the guest is off. It returns an error if that takes longer than limit.
func (g *Guest) ShutDown(limit time.Duration) error {
	if g.remote != nil {
		return fmt.Errorf("guest %s: shut down: not supported in a guest", g.opts.Name)
	}
	g.power.Lock()
	defer g.power.Unlock()
	m, err := g.running()
	if err != nil {
		return err
	}
	g.console.note("shut down")
	_, commandErr := m.run("systemctl --no-block poweroff", limit) // its port can end before it
	select {
	case <-m.ended:
	case <-time.After(limit):
		return errors.Join(fmt.Errorf("guest %s: shut down: still on after %v", g.opts.Name, limit), commandErr)
	}
	g.powerOff()
	return nil
}

// running returns the machine, or an error if the guest is off.
func (g *Guest) running() (*machine, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.machine == nil {
		return nil, fmt.Errorf("guest %s: is off; call Boot", g.opts.Name)
	}
	return g.machine, nil
}

// Reset resets the guest, also a frozen one, and waits until it serves again. Data that it has not
// written to its disk is lost. Connections of the host stay open until they send: the new boot does
// not know them and answers the next segment with an RST.
func (g *Guest) Reset() error {
	if g.remote != nil {
		return g.remote.do(opReset)
	}
	g.power.Lock()
	defer g.power.Unlock()
	m, err := g.running()
	if err != nil {
		return err
	}
	return g.reset(m)
}

func (g *Guest) reset(m *machine) error {
	m.endSession(ErrPower)
	g.rdma.hold()
	// The old boot must not print anything after the new boot is expected.
	if err := m.qmp.do("stop", nil); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	g.mu.Lock()
	last := g.bootID
	g.mu.Unlock()
	g.console.note("reset")
	b := g.console.beginBoot(last)
	if err := errors.Join(m.qmp.do("system_reset", nil), m.qmp.do("cont", nil)); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	return g.awaitReady(m, b)
}

// Freeze stops the guest's processors: the server stops responding, as if it had lost its power.
// Connections of the host stay open, and new ones are accepted but get no reply. Thaw resumes the
// guest; Reset turns the freeze into a power failure.
func (g *Guest) Freeze() error {
	if g.remote != nil {
		return g.remote.do(opFreeze)
	}
	g.rdma.hold()
	return g.runQMP("freeze", "stop")
}

// Thaw resumes a guest after Freeze.
func (g *Guest) Thaw() error {
	if g.remote != nil {
		return g.remote.do(opThaw)
	}
	if err := g.runQMP("thaw", "cont"); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.cut {
		g.rdma.release()
	}
	return nil
}

// runQMP runs a QMP command without arguments and notes it in the log.
func (g *Guest) runQMP(what, command string) error {
	g.power.Lock()
	defer g.power.Unlock()
	m, err := g.running()
	if err != nil {
		return err
	}
	g.console.note("%s", what)
	if err := m.qmp.do(command, nil); err != nil {
		return fmt.Errorf("guest %s: %s: %w", g.opts.Name, what, err)
	}
	return nil
}

// Log returns the console output since the first boot, with notes where the power or the network
// changed.
func (g *Guest) Log() string {
	if g.remote != nil {
		return g.remote.ask(remoteRequest{Op: opLog}).Text
	}
	return strings.Join(g.console.text(), "\n")
}

// end powers the guest off and reports its kernel errors to the test.
func (g *Guest) end() {
	g.powerOff()
	if g.rdma != nil {
		g.rdma.close()
	}
	g.disk.Close()
	lines := g.console.text()
	found, expected := kernelErrors(lines, g.opts)
	for _, c := range expected {
		g.t.Logf("guest %s: expected kernel error: %s", g.opts.Name, c)
	}
	// Report kernel errors last: a reader of the output begins at its end.
	defer func() {
		for _, c := range found {
			g.t.Errorf("guest %s: kernel error: %s", g.opts.Name, c)
		}
	}()
	if len(found) == 0 && !g.t.Failed() {
		return
	}
	g.t.Logf("guest %s, end of the console:\n%s", g.opts.Name, strings.Join(lines[max(0, len(lines)-logLines):], "\n"))
	file := filepath.Join(g.t.ArtifactDir(), "console-"+g.opts.Name+".log")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err == nil {
		g.t.Logf("guest %s, full console (kept with go test -artifacts): %s", g.opts.Name, file)
	}
}
