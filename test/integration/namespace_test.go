package integration

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/nfsserve"
)

// TestUnmountWithCopyInNamespace unmounts while another mount namespace has a copy of the mount, as
// the namespace of a container has. The unmount must not wait for the copy.
func TestUnmountWithCopyInNamespace(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	ended := make(chan struct{})
	t.Run("mount", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
		run(t, m.dir, "touch", "f")
		other := exec.Command("unshare", "-m", "sleep", "infinity")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "copy of the mount", func() bool { return inOtherNamespace(other.Process.Pid) })
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

// inOtherNamespace reports whether a process has another mount namespace than this one.
func inOtherNamespace(pid int) bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	other, otherErr := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	return err == nil && otherErr == nil && other != own
}
