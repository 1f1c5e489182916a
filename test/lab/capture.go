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
	captureStart = 60 * time.Second
	captureStop  = 60 * time.Second
	// size in MiB of the kernel's ring buffer, so that a busy host drops no packet
	captureBuffer = 256
	// captureSettle is the time between the end of the traffic and the end of a capture. dumpcap
	// drops packets that the kernel has not passed to it yet, and a guest's kernel sends a
	// program's data from its own threads.
	captureSettle = time.Second
)

// ErrPacketsLost reports that packets are missing from a capture. A test must not use this capture.
var ErrPacketsLost = errors.New("capture lost packets")

// A Capture records the traffic of a guest in a file.
type Capture struct {
	File string // pcapng or pcap; complete after Stop

	// remote carries out every method if this process runs in a guest; then only File is set.
	remote *remoteGuest

	stop func() error
	once sync.Once
	err  error
}

// Capture starts a capture that ends with Stop, or with the test. It records the host's traffic
// with the guest's RDMA port. For a guest on a link it records all frames that the guest sends and
// receives there. The file is in the test's artifact directory.
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

// Stop ends the capture. Call it when the traffic of interest is over. It returns ErrPacketsLost if
// packets are missing.
func (c *Capture) Stop() error {
	if c.remote != nil {
		return c.remote.do(opStopCapture)
	}
	c.once.Do(func() { c.err = c.stop() })
	return c.err
}

// A dumpcap is one running dumpcap(1) process.
type dumpcap struct {
	cmd    *exec.Cmd
	ready  chan struct{} // closed when dumpcap captures
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
		runtime.LockOSThread() // as for QEMU: the end of this thread sends the signal
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
			// dumpcap prints this line when it captures
			if !open && strings.Contains(sc.Text(), "File:") {
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

// wait waits until dumpcap captures packets.
func (d *dumpcap) wait(t testing.TB) {
	t.Helper()
	select {
	case <-d.ready:
	case <-d.ended:
		t.Fatalf("dumpcap ended: %s", d.output())
	case <-time.After(captureStart):
		t.Fatalf("dumpcap did not start within %v: %s", captureStart, d.output())
	}
}

func (d *dumpcap) output() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stderr.String()
}

// stop ends dumpcap and reports whether it recorded every packet.
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
	if output := d.output(); !strings.Contains(output, "dropped on interface") || !strings.Contains(output, "/0 ") {
		return fmt.Errorf("%w: %s", ErrPacketsLost, output)
	}
	return nil
}

// Tshark runs tshark on the capture and returns its output. tshark decodes MPA, DDP, RDMAP, RoCE,
// RPC-over-RDMA and NFS by their contents. A reserved source port may be that of another protocol.
func (c *Capture) Tshark(args ...string) (string, error) {
	if c.remote != nil {
		a := c.remote.ask(remoteRequest{Op: opReadCapture, Args: args})
		return a.Text, a.Err.unpack()
	}
	cmd := exec.Command("tshark", append([]string{"-n", "-r", c.File, "-o", "tcp.desegment_tcp_streams:TRUE",
		"-o", "tcp.try_heuristic_first:TRUE"}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("tshark %v: %w: %s", args, err, stderr.String())
	}
	return string(out), nil
}

// Malformed returns a line for each packet that does not decode up to RPC. It leaves NFS out: the
// decoder does not insert RDMA Write data into NFS replies, and would report each of these replies
// as truncated.
func (c *Capture) Malformed() (string, error) {
	return c.Tshark("--disable-protocol", "nfs", "-Y", "_ws.malformed || _ws.unreassembled || _ws.short")
}
