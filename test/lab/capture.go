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
	// captureSettle is what the kernel may keep a packet before it hands it over: dumpcap leaves behind what it has not been given.
	captureSettle = time.Second
)

// ErrPacketsLost is a capture that is not whole, and so proves nothing.
var ErrPacketsLost = errors.New("the capture lost packets")

// A Capture records the host's traffic with the RDMA port of a guest.
type Capture struct {
	File string // pcapng, whole after Stop

	remote *remoteGuest // does everything, where this process runs in a guest; only File is set then

	cmd    *exec.Cmd
	ended  chan struct{}
	once   sync.Once
	err    error
	mu     sync.Mutex
	stderr strings.Builder // guarded by mu
}

// Capture records until Stop, or the end of the test. The file is in the test's artifact directory.
func (g *Guest) Capture(t testing.TB, name string) *Capture {
	t.Helper()
	if g.remote != nil {
		return g.captureRemote(t, name)
	}
	c := &Capture{File: filepath.Join(t.ArtifactDir(), name+".pcapng"), ended: make(chan struct{})}
	c.cmd = exec.Command("dumpcap", "-q", "-i", "lo", "-f", fmt.Sprintf("tcp port %d", g.RDMA.Port()), "-B", fmt.Sprint(captureBuffer), "-w", c.File)
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	pipe, err := c.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error)
	ready := make(chan struct{})
	go func() {
		runtime.LockOSThread() // as for QEMU: the signal comes with the end of this thread
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		defer close(c.ended)
		sc := bufio.NewScanner(pipe)
		for open := false; sc.Scan(); {
			c.mu.Lock()
			c.stderr.WriteString(sc.Text() + "\n")
			c.mu.Unlock()
			if !open && strings.Contains(sc.Text(), "File:") { // it says so once it listens
				open = true
				close(ready)
			}
		}
		c.cmd.Wait()
	}()
	if err := <-started; err != nil {
		t.Fatalf("dumpcap: %v; run \"make lab\"", err)
	}
	t.Cleanup(func() { c.Stop() })
	select {
	case <-ready:
	case <-c.ended:
		t.Fatalf("dumpcap ended: %s", c.said())
	case <-time.After(captureStart):
		t.Fatalf("dumpcap did not start within %v: %s", captureStart, c.said())
	}
	return c
}

func (c *Capture) said() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stderr.String()
}

// Stop ends the capture. It returns ErrPacketsLost if packets are missing. The traffic of interest must be over.
func (c *Capture) Stop() error {
	if c.remote != nil {
		return c.remote.do(opStopCapture)
	}
	c.once.Do(func() {
		time.Sleep(captureSettle)
		c.cmd.Process.Signal(os.Interrupt)
		select {
		case <-c.ended:
		case <-time.After(captureStop):
			c.cmd.Process.Kill()
			<-c.ended
			c.err = fmt.Errorf("dumpcap did not end within %v", captureStop)
			return
		}
		if said := c.said(); !strings.Contains(said, "dropped on interface") || !strings.Contains(said, "/0 ") {
			c.err = fmt.Errorf("%w: %s", ErrPacketsLost, said)
		}
	})
	return c.err
}

// Tshark reads the capture with tshark, which decodes MPA, DDP, RDMAP, RPC-over-RDMA and NFS by itself, and returns what it prints.
func (c *Capture) Tshark(args ...string) (string, error) {
	if c.remote != nil {
		a := c.remote.ask(remoteRequest{Op: opReadCapture, Args: args})
		return a.Text, a.Err.unpack()
	}
	cmd := exec.Command("tshark", append([]string{"-n", "-r", c.File, "-o", "tcp.desegment_tcp_streams:TRUE"}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("tshark %v: %w: %s", args, err, stderr.String())
	}
	return string(out), nil
}

// Malformed returns a line for each packet that does not decode, up to RPC: the decoder does not put data that went by RDMA Write back into
// an NFS reply, and would take each such reply for cut short.
func (c *Capture) Malformed() (string, error) {
	return c.Tshark("--disable-protocol", "nfs", "-Y", "_ws.malformed || _ws.unreassembled || _ws.short")
}
