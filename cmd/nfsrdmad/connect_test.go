package main

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// quietTime is how long a peer waits to see that an unanswered connection stays open.
const quietTime = 300 * time.Millisecond

// TestInterruptedConnectStaysOpen ends the daemon or a foreground mount during the MPA handshake. A
// stock Linux server with siw loses its listener if a connection ends before the server has
// accepted it. So the peer must not see the end of the connection before it has answered.
func TestInterruptedConnectStaysOpen(t *testing.T) {
	for name, foreground := range map[string]bool{"daemon": false, "foreground": true} {
		t.Run(name, func(t *testing.T) {
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
			args := []string{"mount", "--control-socket", w.socket, "127.0.0.1:/", w.mkdir(t, "mnt"), "-o", w.opts(addr)}
			if foreground {
				args = append(args, "--foreground")
			}
			mount := program(t, "nfsrdmad", args...)
			kit.Must(t, mount.Start())
			<-requested
			if foreground {
				_ = mount.Process.Signal(syscall.SIGINT)
			} else {
				w.stop(t, w.daemon)
			}
			_ = mount.Wait()
			close(ended)
			if err := <-readErr; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("peer read: got %v, want no end of the connection", err)
			}
		})
	}
}
