package lab

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	captureStart  = 60 * time.Second
	captureStop   = 60 * time.Second
	captureBuffer = 256 // MiB of the kernel's ring, so that a busy host loses nothing
	// captureSettle is what the kernel may keep a packet before it hands it over: dumpcap leaves
	// behind what it has not been given. A guest's kernel sends by threads of its own what a
	// program there has asked for.
	captureSettle = time.Second
)

// ErrPacketsLost is a capture that is not whole, and so proves nothing.
var ErrPacketsLost = errors.New("the capture lost packets")

// A Capture records the traffic with a guest.
type Capture struct {
	File string // pcapng or pcap, whole after Stop

	// does everything, where this process runs in a guest; only File is set then
	remote *remoteGuest

	stop func() error
	once sync.Once
	err  error
}

// Capture records until Stop, or the end of the test: the host's traffic with the RDMA port of the
// guest, or, of a guest on a link, all that it sends and receives there. The file is in the test's
// artifact directory.
func (g *Guest) Capture(t testing.TB, name string) *Capture {
	t.Helper()
	if g.remote != nil {
		return g.captureRemote(t, name)
	}
	if g.port != nil {
		return g.captureLink(t, name)
	}
	c := &Capture{File: filepath.Join(t.ArtifactDir(), name+".pcapng")}
	d := startDumpcap(t, "-i", "lo", "-f", fmt.Sprintf("tcp port %d", g.RDMA.Port()), "-B", fmt.Sprint(captureBuffer),
		"-w", c.File)
	c.stop = d.stop
	t.Cleanup(func() { c.Stop() })
	d.wait(t)
	return c
}

// Stop ends the capture. It returns ErrPacketsLost if packets are missing. The traffic of interest
// must be over.
func (c *Capture) Stop() error {
	if c.remote != nil {
		return c.remote.do(opStopCapture)
	}
	c.once.Do(func() { c.err = c.stop() })
	return c.err
}

// A dumpcap is a run of that program.
type dumpcap struct {
	cmd    *exec.Cmd
	ready  chan struct{} // closed when it listens
	ended  chan struct{}
	mu     sync.Mutex
	stderr strings.Builder // guarded by mu
}

func startDumpcap(t testing.TB, args ...string) *dumpcap {
	t.Helper()
	d := &dumpcap{cmd: exec.Command("dumpcap", append([]string{"-q"}, args...)...), ready: make(chan struct{}),
		ended: make(chan struct{})}
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	pipe, err := d.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // as for QEMU: the signal comes with the end of this thread
		defer runtime.UnlockOSThread()
		err := d.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		defer close(d.ended)
		sc := bufio.NewScanner(pipe)
		for open := false; sc.Scan(); {
			d.mu.Lock()
			d.stderr.WriteString(sc.Text() + "\n")
			d.mu.Unlock()
			if !open && strings.Contains(sc.Text(), "File:") { // it says so once it listens
				open = true
				close(d.ready)
			}
		}
		d.cmd.Wait()
	}()
	if err := <-started; err != nil {
		t.Fatalf("dumpcap: %v; run \"make lab\"", err)
	}
	return d
}

// wait waits until it listens.
func (d *dumpcap) wait(t testing.TB) {
	t.Helper()
	select {
	case <-d.ready:
	case <-d.ended:
		t.Fatalf("dumpcap ended: %s", d.said())
	case <-time.After(captureStart):
		t.Fatalf("dumpcap did not start within %v: %s", captureStart, d.said())
	}
}

func (d *dumpcap) said() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stderr.String()
}

// stop ends it, and tells whether it has seen everything.
func (d *dumpcap) stop() error {
	time.Sleep(captureSettle)
	d.cmd.Process.Signal(os.Interrupt)
	select {
	case <-d.ended:
	case <-time.After(captureStop):
		d.cmd.Process.Kill()
		<-d.ended
		return fmt.Errorf("dumpcap did not end within %v", captureStop)
	}
	if said := d.said(); !strings.Contains(said, "dropped on interface") || !strings.Contains(said, "/0 ") {
		return fmt.Errorf("%w: %s", ErrPacketsLost, said)
	}
	return nil
}

// Tshark reads the capture with tshark, which decodes MPA, DDP, RDMAP, RoCE, RPC-over-RDMA and NFS
// by itself, and returns what it prints.
func (c *Capture) Tshark(args ...string) (string, error) {
	if c.remote != nil {
		a := c.remote.ask(remoteRequest{Op: opReadCapture, Args: args})
		return a.Text, a.Err.unpack()
	}
	cmd := exec.Command("tshark", append([]string{"-n", "-r", c.File, "-o", "tcp.desegment_tcp_streams:TRUE"},
		args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("tshark %v: %w: %s", args, err, stderr.String())
	}
	return string(out), nil
}

// Malformed returns a line for each packet that does not decode, up to RPC: the decoder does not
// put data that went by RDMA Write back into an NFS reply, and would take each such reply for cut
// short.
func (c *Capture) Malformed() (string, error) {
	return c.Tshark("--disable-protocol", "nfs", "-Y", "_ws.malformed || _ws.unreassembled || _ws.short")
}
