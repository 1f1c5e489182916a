package integration

import (
	"os/exec"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
)

// TestUnmountWithACopyElsewhere: a container that was started while the mount was there keeps a
// copy of it, which must not keep the unmount waiting.
func TestUnmountWithACopyElsewhere(t *testing.T) {
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	ended := make(chan struct{})
	t.Run("mount", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
		run(t, m.dir, "touch", "f")
		other := exec.Command("unshare", "-m", "sleep", "60")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond) // until the copy is made
		go func() {
			<-ended
			other.Process.Kill()
			other.Wait()
			close(ended)
		}()
	})
	ended <- struct{}{} // the subtest's clean-up unmounted, while the copy was still there
	<-ended
}
