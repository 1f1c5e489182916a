package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A stock Linux server loses its listener when a connection ends that it has not looked at yet, and
// when more than ten come at once.

// hearsNothing is how long a peer listens for the end of a connection that it has not answered.
const hearsNothing = 300 * time.Millisecond

// Whoever ends in the middle of a connect, and however, its peer hears nothing of it before it
// answers.
func TestEndInMidConnect(t *testing.T) {
	for _, tt := range []struct {
		name       string
		foreground bool
		end        func(w *world, mount *exec.Cmd) error
	}{
		{"daemon terminated", false, func(w *world,
			_ *exec.Cmd) error {
			return w.daemon.Process.Signal(syscall.SIGTERM)
		}},
		{"daemon killed", false, func(w *world, _ *exec.Cmd) error {
			err := w.daemon.Process.Kill()
			_ = w.daemon.Wait()
			return err
		}},
		{"mount command interrupted", false,
			func(_ *world, mount *exec.Cmd) error { return mount.Process.Signal(syscall.SIGINT) }},
		{"mount command killed", false, func(_ *world, mount *exec.Cmd) error { return mount.Process.Kill() }},
		{"foreground mount interrupted", true,
			func(_ *world, mount *exec.Cmd) error { return mount.Process.Signal(syscall.SIGINT) }},
		{"foreground mount killed", true, func(_ *world, mount *exec.Cmd) error { return mount.Process.Kill() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			asked, ended, heard := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			addr := peer(t, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 1024)) // the MPA request
				close(asked)
				<-ended
				_ = c.SetReadDeadline(time.Now().Add(hearsNothing))
				_, err := c.Read(make([]byte, 1))
				heard <- err
			})
			args := []string{"mount", "--control-socket", w.socket}
			if tt.foreground {
				args = append(args, "--foreground")
			}
			mount := program(t, "nfsrdmad", append(args, "127.0.0.1:/", w.mkdir(t, "mnt"), "-o", w.opts(addr))...)
			if err := mount.Start(); err != nil {
				t.Fatal(err)
			}
			<-asked
			// it has come before its sender knows that it has sent it
			time.Sleep(10 * time.Millisecond)
			if err := tt.end(w, mount); err != nil {
				t.Fatal(err)
			}
			_ = mount.Wait()
			close(ended)
			if err := <-heard; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the peer heard %v", err)
			}
		})
	}
}

// copyPlain copies without splice(2), whose pipes the runtime keeps for later.
func copyPlain(w io.Writer, r io.Reader) {
	_, _ = io.Copy(struct{ io.Writer }{w}, struct{ io.Reader }{r})
}

// Many mounts of one server at a time connect one after the other.
func TestConnectsOneAtATime(t *testing.T) {
	w := newWorld(t)
	var inside, most, total atomic.Int32
	proxy := peer(t, func(c net.Conn) {
		n := inside.Add(1)
		for {
			if m := most.Load(); n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		total.Add(1)
		server, err := net.Dial("tcp", w.server.RDMAAddr.String())
		if err != nil {
			t.Error(err)
			return
		}
		defer server.Close()
		var back sync.WaitGroup
		back.Go(func() {
			reply := make([]byte, 4096)
			n, err := server.Read(reply)
			time.Sleep(10 * time.Millisecond) // room for others to come in
			inside.Add(-1)
			if err == nil {
				_, err = c.Write(reply[:n])
			}
			if err == nil {
				copyPlain(c, server)
			}
			c.Close()
		})
		copyPlain(server, c)
		server.Close()
		back.Wait()
	})
	const mounts = 16
	var all sync.WaitGroup
	for i := range mounts {
		dir := w.mkdir(t, fmt.Sprint("m", i))
		all.Go(func() {
			if o := nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o",
				w.opts(proxy)); o.code != 0 {
				t.Errorf("mount %s: %s", dir, o.stderr)
				return
			}
			if b, err := os.ReadFile(filepath.Join(dir, "hello")); err != nil || string(b) != "world" {
				t.Errorf("%s: %q, %v", dir, b, err)
			}
		})
	}
	all.Wait()
	if most.Load() != 1 || total.Load() != mounts {
		t.Errorf("%d of %d connects at a time", most.Load(), total.Load())
	}
}
