package main

import (
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A mount in the foreground that is killed at any moment is gone, and leaves nothing behind but a
// mount point that can be unmounted: it waits for no answer that only it could give.
func TestKilledWhileMounting(t *testing.T) {
	w := newWorld(t)
	dir := w.mkdir(t, "mnt")
	begin := time.Now()
	w.mount(t, dir).succeeds(t)
	typical := time.Since(begin)
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	for range 40 {
		cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir, "-o",
			w.opts(w.server.RDMAAddr))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(typical/2 + rand.N(typical))
		_ = cmd.Process.Kill()
		gone := make(chan error, 1)
		go func() { gone <- cmd.Wait() }()
		select {
		case <-gone:
		case <-time.After(limit):
			t.Errorf("process %d was killed and is not gone", cmd.Process.Pid)
			_ = unix.Unmount(dir, unix.MNT_FORCE) // answers it
			<-gone
		}
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
		}
	}
}
