package main

import (
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestKillDuringForegroundMount kills a foreground mount at random moments. The process must exit
// and leave at most a mount that can be unmounted. A process that waited for a reply from its own
// file system would stay as a zombie.
func TestKillDuringForegroundMount(t *testing.T) {
	w := newTestEnv(t)
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
			t.Errorf("process %d still exists after SIGKILL", cmd.Process.Pid)
			_ = unix.Unmount(dir, unix.MNT_FORCE) // ends the wait
			<-gone
		}
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
		}
	}
}
