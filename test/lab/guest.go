package lab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// Ports of a guest, as assigned to these services.
const (
	rdmaPort    = 20049 // RFC 8267 §6
	nfsPort     = 2049
	mountPort   = 20048
	portmapPort = 111
)

const (
	// Ports for the host's side are below the range that Linux takes source ports from: while the
	// guest is off, a connect to such a port could otherwise be given that very port as its source,
	// and connect to itself.
	firstHostPort = 20100
	lastHostPort  = 32000
	// startTries is for host ports that are taken between their choice and QEMU's start.
	startTries = 5
	// bootTries is for kernels that do not come up in the emulator.
	bootTries = 5
	// logLines is how much of the console a failed test shows.
	logLines = 60
)

// A Guest is a virtual machine with an NFS/RDMA server. Its addresses are on the host and stay the
// same over resets.
type Guest struct {
	RDMA    netip.AddrPort // NFS/RDMA, with SIW
	NFS     netip.AddrPort // NFS over TCP
	Mount   netip.AddrPort // MOUNT over TCP
	Portmap netip.AddrPort // rpcbind over TCP
	Release string         // of the kernel
	// on Options.Link, for the guests there; the server's ports are the usual ones
	Linked netip.Addr

	t       testing.TB
	opts    Options
	img     image
	disk    *os.File
	console *console
	rdma    *forwarder     // between RDMA and QEMU's own port
	lend    netip.AddrPort // where the guest's remotePort is reached
	port    *port          // of Options.Link; nil without
	// captures numbers the captures of the link.
	captures atomic.Int32
	// does everything, where this process runs in a guest itself; what is below and above it is not
	// used then
	remote *remoteGuest

	power sync.Mutex // held while the power changes

	mu      sync.Mutex
	machine *machine // guarded by mu; nil while the power is off
	bootID  string   // guarded by mu; of the last boot that got ready
	cut     bool     // guarded by mu: the network is
}

// Start boots a guest and waits until it serves. The guest ends with the test, which fails if the
// guest's kernel complained. Where there is no image the test skips, or fails if NFSRDMAD_LAB is 1
// or all; with NFSRDMAD_LAB=0 it always skips. In a process that uses its host's lab the guest runs
// there.
func Start(t testing.TB, opts Options) *Guest {
	t.Helper()
	if Remote() {
		return startRemote(t, opts)
	}
	g := newGuest(t, opts)
	if err := g.first(); err != nil {
		t.Fatal(err)
	}
	return g
}

// StartAll is Start for several guests, which boot at the same time.
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
		boots.Go(func() { errs[i] = g.first() })
	}
	boots.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return guests
}

// newGuest makes a guest that is off.
func newGuest(t testing.TB, opts Options) *Guest {
	t.Helper()
	opts = opts.withDefaults()
	img := need(t, opts.Kernel)
	if strings.ContainsAny(opts.Share, " ,\"'") {
		t.Fatalf("guest %s: neither a kernel's command line nor QEMU's takes the shared directory's name %q",
			opts.Name, opts.Share)
	}
	disk, err := newDisk(opts.DiskMiB)
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

// first boots the guest for the first time.
func (g *Guest) first() error {
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
			// A kernel may stand still where the host has little time for all of its processors:
			// nothing of ours has run yet.
			g.t.Logf("guest %s: booted again: %v", g.opts.Name, err)
			g.console = &console{}
		default:
			return fmt.Errorf("guest %s: %w", g.opts.Name, err)
		}
	}
}

// newDisk makes a sparse file without a name.
func newDisk(mib int) (*os.File, error) {
	dir, err := cacheDir()
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, "disk-")
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Remove(f.Name()), f.Truncate(int64(mib)<<20)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (g *Guest) choosePorts() error {
	host := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	var open []net.Listener // until all are known, so that they differ
	defer func() {
		for _, l := range open {
			l.Close()
		}
	}()
	var inner netip.AddrPort
	for _, addr := range []*netip.AddrPort{&g.RDMA, &inner, &g.NFS, &g.Mount, &g.Portmap, &g.lend} {
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
	return nil
}

// arguments are QEMU's, without the disk, the console and the control sockets.
func (g *Guest) arguments() []string {
	network := "user,id=net0,restrict=on,ipv6=off"
	for _, f := range []struct {
		host  netip.AddrPort
		guest int
	}{{g.rdma.to, rdmaPort}, {g.NFS, nfsPort}, {g.Mount, mountPort}, {g.Portmap, portmapPort}, {g.lend, remotePort}} {
		network += fmt.Sprintf(",hostfwd=tcp:%s-%s:%d", f.host, guestAddr, f.guest)
	}
	o := g.opts
	// Level 5 lets warnings through to the console, and little else, which a serial port would be
	// slow for. Watchdogs, and the check of the timer at boot, would bark at a busy host.
	line := "console=ttyS0 loglevel=5 panic=0 mitigations=off nokaslr net.ifnames=0 tsc=reliable no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
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
	// Translated code of the boot before makes a reset three times as slow as a first boot, until
	// the translator's buffer is full and emptied: a small one is so early.
	args := []string{
		"-name", "nfsrdmad-lab-" + o.Name, "-M", "q35", "-accel", "tcg,thread=multi,tb-size=64", "-cpu", "max", "-smp", strconv.Itoa(o.CPUs), "-m", strconv.Itoa(o.MemoryMiB),
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
	if o.HostRoot {
		line += " lab.hostroot=1"
		// The host's root has other file systems in it, whose inode numbers are not to meet.
		args = append(args, "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap")
	}
	return append(args, "-append", line)
}

// Boot gives a guest that is off its power again, with the disk and the addresses it had, and waits
// until it serves.
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
		return fmt.Errorf("guest %s: is on already", g.opts.Name)
	}
	return g.untripped(func(try int) error {
		if try > 1 {
			g.powerOff()
		}
		return g.powerOn(last)
	})
}

// untripped boots again where the kernel tripped over the emulator, whether it came up or not. What
// it said then is left out of the log.
func (g *Guest) untripped(boot func(try int) error) error {
	for try := 1; ; try++ {
		from := g.console.mark()
		err := boot(try)
		if try == bootTries || !g.console.forgetTripped(from) {
			return err
		}
	}
}

func (g *Guest) powerOn(last string) error {
	g.console.note("power on, kernel %s", g.img.release)
	b := g.console.expect(last)
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
	return g.settle(m, b)
}

// settle waits for a boot.
func (g *Guest) settle(m *machine, b *boot) error {
	if err := m.ready(b); err != nil {
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

// PowerOff ends the guest at once, as it is. What it has not written to its disk is lost.
// Connections of the host end too, with QEMU, and new ones are refused; see Freeze for a server
// that only falls silent. No error: the guest is off afterwards, and may have been before.
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

// running returns the machine.
func (g *Guest) running() (*machine, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.machine == nil {
		return nil, fmt.Errorf("guest %s: is off", g.opts.Name)
	}
	return g.machine, nil
}

// Reset presses the reset button, also of a frozen guest, and waits until the guest serves again.
// What it has not written to its disk is lost. Connections of the host stay open, to a server that
// does not know them any more and answers the next segment with a reset.
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
	return g.untripped(func(int) error { return g.reset(m) })
}

func (g *Guest) reset(m *machine) error {
	m.lost(ErrPower)
	g.rdma.hold()
	// so that the old boot cannot say anything more once the new one is expected
	if err := m.qmp.do("stop", nil); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	g.mu.Lock()
	last := g.bootID
	g.mu.Unlock()
	g.console.note("reset")
	b := g.console.expect(last)
	if err := errors.Join(m.qmp.do("system_reset", nil), m.qmp.do("cont", nil)); err != nil {
		return fmt.Errorf("guest %s: %w", g.opts.Name, err)
	}
	return g.settle(m, b)
}

// Freeze stops the guest's processors: the server falls silent, as if its power were gone.
// Connections of the host stay open, and new ones are taken, but get no answer. Thaw lets it go on;
// Reset makes the power cut true.
func (g *Guest) Freeze() error {
	if g.remote != nil {
		return g.remote.do(opFreeze)
	}
	g.rdma.hold()
	return g.tell("freeze", "stop")
}

// Thaw ends Freeze.
func (g *Guest) Thaw() error {
	if g.remote != nil {
		return g.remote.do(opThaw)
	}
	if err := g.tell("thaw", "cont"); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.cut {
		g.rdma.release()
	}
	return nil
}

// tell has QEMU run a command.
func (g *Guest) tell(what, command string) error {
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

// Log is the console since the first boot, with marks where the power or the network changed.
func (g *Guest) Log() string {
	if g.remote != nil {
		return g.remote.ask(remoteRequest{Op: opLog}).Text
	}
	return strings.Join(g.console.text(), "\n")
}

// end is the clean-up of Start.
func (g *Guest) end() {
	g.powerOff()
	if g.rdma != nil {
		g.rdma.close()
	}
	g.disk.Close()
	lines := g.console.text()
	found, announced := complaints(lines, g.opts)
	for _, c := range announced {
		g.t.Logf("guest %s: its kernel complained, as it was expected to: %s", g.opts.Name, c)
	}
	// Last is what is read first.
	defer func() {
		for _, c := range found {
			g.t.Errorf("guest %s: its kernel complained: %s", g.opts.Name, c)
		}
	}()
	if len(found) == 0 && !g.t.Failed() {
		return
	}
	g.t.Logf("guest %s, end of its console:\n%s", g.opts.Name, strings.Join(lines[max(0, len(lines)-logLines):], "\n"))
	file := filepath.Join(g.t.ArtifactDir(), "console-"+g.opts.Name+".log")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err == nil {
		g.t.Logf("guest %s, the whole console (kept with go test -artifacts): %s", g.opts.Name, file)
	}
}
