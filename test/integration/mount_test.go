package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/mountd"
	"github.com/nfsrdmad/nfsrdmad/pkg/xprt"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/ganesha"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestGanesha runs real programs on a mount of NFS-Ganesha.
func TestGanesha(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	g := ganesha.Start(t, t.TempDir())
	front := serve(t, nfsserve.Config{Backend: g.Addr()})
	export := mountd.Args{Host: g.Host, Port: g.MountPort, Export: g.Export}
	m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
	src := filepath.Join(strings.TrimSpace(run(t, "", "go", "env", "GOROOT")), "src", "net", "http")
	run(t, "", "cp", "-a", src, m.dir)
	cold := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: export})
	run(t, "", "diff", "-r", "--no-dereference", src, filepath.Join(cold.dir, "http"))
	run(t, m.dir, "rm", "-rf", "http")
	run(t, m.dir, "sh", "-ec", `
		echo one > f; echo two >> f; test "$(cat f)" = "$(printf 'one\ntwo')"
		ln f hard; ln -s f soft; test "$(cat soft)" = "$(cat hard)"; test "$(stat -c %h f)" = 2
		mv f g; truncate -s 3 g; test "$(cat hard)" = one
		chmod 640 g; test "$(stat -c %a g)" = 640
		chown 12:34 g; test "$(stat -c %u:%g g)" = 12:34
		touch -d 2001-02-03T04:05:06Z g; test "$(stat -c %Y g)" = 981173106
		mknod p p; test -p p; mkdir d; rmdir d; df . >/dev/null
		dd if=/dev/urandom of=big bs=1M count=20 status=none conv=fsync; cp big big2; cmp big big2
		dd if=big of=big2 bs=1000001 conv=notrunc status=none; cmp big big2
		test "$(find . -type f | wc -l)" = 4; rm -rf ./*; test -z "$(ls -A)"`)
	checkTransports(t, m.tr.Stats(), cold.tr.Stats())
}

// checkTransports checks the counters of two transports without errors. One wrote, the other read.
func checkTransports(t *testing.T, wrote, read xprt.Stats) {
	t.Helper()
	for _, s := range []xprt.Stats{wrote, read} {
		if s.Connects != 1 || s.BadXIDs != 0 || s.BadReply != 0 || s.FailedMarshal != 0 ||
			s.RemoteAccessErrors != 0 || s.MRsOrphaned != 0 || s.MRsRecycled != 0 {
			t.Errorf("got counters %+v, want one connection and no errors", s)
		}
	}
	if wrote.ReadChunks == 0 || read.WriteChunks == 0 || read.RemoteInvalidations == 0 {
		t.Errorf("got %d read chunks, %d write chunks and %d remote invalidations, want some of each", wrote.ReadChunks,
			read.WriteChunks, read.RemoteInvalidations)
	}
}

// TestUnmountWithCopyInNamespace unmounts while another mount namespace has a copy of the mount, as
// the namespace of a container has. The unmount must not wait for the copy.
func TestUnmountWithCopyInNamespace(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	front := serve(t, nfsserve.Config{Dir: t.TempDir(), TCPListen: "127.0.0.1:0"})
	var other *exec.Cmd
	t.Run("mount", func(t *testing.T) {
		m := mountIt(t, mountConfig{rdma: front.RDMAAddr, export: embedded(t, front)})
		run(t, m.dir, "touch", "f")
		other = exec.Command("unshare", "-m", "sleep", "infinity")
		kit.Must(t, other.Start())
		kit.Eventually(t, "copy of the mount", func() bool { return inOtherNamespace(other.Process.Pid) })
	})
	// The clean-up of the subtest has unmounted while the copy existed.
	kit.Must(t, other.Process.Kill())
	_ = other.Wait()
}

// inOtherNamespace reports whether a process has another mount namespace than this one.
func inOtherNamespace(pid int) bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	other, otherErr := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	return err == nil && otherErr == nil && other != own
}
