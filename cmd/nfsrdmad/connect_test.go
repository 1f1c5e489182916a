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

// A stock Linux server with siw loses its listener in two cases: a connection ends before the
// server has accepted it, or more than ten connections arrive at once. The tests below check that
// the client avoids both.

// quietTime is how long a peer waits to see that an unanswered connection stays open.
const quietTime = 300 * time.Millisecond

// TestInterruptedConnectStaysOpen ends the daemon or the mount command during the MPA handshake.
// The peer must not see the end of the connection before it has answered.
func TestInterruptedConnectStaysOpen(t *testing.T) {
	for _, tt := range []struct {
		name       string
		foreground bool
		end        func(w *testEnv, mount *exec.Cmd) error
	}{
		{"daemon terminated", false, terminateDaemon},
		{"daemon killed", false, killDaemon},
		{"mount command interrupted", false, interruptMount},
		{"mount command killed", false, killMount},
		{"foreground mount interrupted", true, interruptMount},
		{"foreground mount killed", true, killMount},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newTestEnv(t)
			requested, ended, readErr := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			addr := peer(t, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 1024)) // the MPA request
				close(requested)
				<-ended
				_ = c.SetReadDeadline(time.Now().Add(quietTime))
				_, err := c.Read(make([]byte, 1))
				readErr <- err
			})
			args := []string{"mount", "--control-socket", w.socket}
			if tt.foreground {
				args = append(args, "--foreground")
			}
			mount := program(t, "nfsrdmad", append(args, "127.0.0.1:/", w.mkdir(t, "mnt"), "-o", w.opts(addr))...)
			if err := mount.Start(); err != nil {
				t.Fatal(err)
			}
			<-requested
			// The request can arrive before its sender returns from the system call.
			time.Sleep(10 * time.Millisecond)
			if err := tt.end(w, mount); err != nil {
				t.Fatal(err)
			}
			_ = mount.Wait()
			close(ended)
			if err := <-readErr; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("peer read: got %v, want no end of the connection", err)
			}
		})
	}
}

func terminateDaemon(w *testEnv, _ *exec.Cmd) error { return w.daemon.Process.Signal(syscall.SIGTERM) }

func killDaemon(w *testEnv, _ *exec.Cmd) error {
	err := w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	return err
}

func interruptMount(_ *testEnv, mount *exec.Cmd) error { return mount.Process.Signal(syscall.SIGINT) }

func killMount(_ *testEnv, mount *exec.Cmd) error { return mount.Process.Kill() }

// copyPlain copies without splice(2): the runtime keeps the pipes of splice(2), which the leak
// check would report.
func copyPlain(w io.Writer, r io.Reader) {
	_, _ = io.Copy(struct{ io.Writer }{w}, struct{ io.Reader }{r})
}

func TestMountsConnectOneAtATime(t *testing.T) {
	w := newTestEnv(t)
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
			time.Sleep(10 * time.Millisecond) // time for other connections to arrive
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
	const mounts = 8
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
		t.Errorf("got %d connects, at most %d at a time; want %d, 1 at a time", total.Load(), most.Load(), mounts)
	}
}
