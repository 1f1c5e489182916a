package integration

import (
	"os/exec"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
)

// TestUnmountWithCopyInNamespace unmounts while another mount namespace has a copy of the mount, as
// the namespace of a container has. The unmount must not wait for the copy.
func TestUnmountWithCopyInNamespace(t *testing.T) {
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	ended := make(chan struct{})
	t.Run("mount", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
		run(t, m.dir, "touch", "f")
		other := exec.Command("unshare", "-m", "sleep", "60")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond) // until unshare has copied the mount
		go func() {
			<-ended
			other.Process.Kill()
			other.Wait()
			close(ended)
		}()
	})
	ended <- struct{}{} // the clean-up of the subtest has unmounted while the copy existed
	<-ended
}
