package lab_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// TestHostRootRunsHostPrograms runs programs of the host on the guest's kernel and devices.
func TestHostRootRunsHostPrograms(t *testing.T) {
	for _, kernel := range lab.TestedKernels() {
		t.Run(kernel, func(t *testing.T) {
			share := t.TempDir()
			g := lab.Start(t, lab.Options{Kernel: kernel, HostRoot: true, Share: share, Provider: lab.Both,
				MemoryMiB: 512})
			same := func(name string, args ...string) {
				t.Helper()
				want, err := exec.Command(name, args...).Output()
				if err != nil {
					t.Fatal(err)
				}
				command := "chroot /host " + name + " '" + strings.Join(args, "' '") + "'"
				if got := g.MustRun(command); got != string(want) {
					t.Errorf("%s: got output %q in the guest, want %q", name, got, want)
				}
			}
			same("git", "--version")
			same("perl", "-e", "print $^V")
			same("rsync", "--version")
			if got := strings.TrimSpace(g.MustRun("chroot /host uname -r")); got != g.Release {
				t.Errorf("got kernel %s in the chroot, want %s", got, g.Release)
			}

			// The guest's ibv_devices, in the host's root, uses the host's libibverbs and drivers.
			g.MustRun("chroot /host test -c /dev/fuse && chroot /host test -c /dev/infiniband/rdma_cm")
			out := g.MustRun("cp /usr/bin/ibv_devices /host/tmp/ && chroot /host /tmp/ibv_devices 2>&1")
			if !strings.Contains(out, "siw0") || !strings.Contains(out, "rxe0") {
				t.Errorf("got devices %s, want siw0 and rxe0", out)
			}
			g.MustRun("chroot /host mount -t tmpfs x /tmp && chroot /host umount /tmp")

			// The shared directory has its host path in the chroot.
			if err := os.WriteFile(filepath.Join(share, "from-host"), []byte("one"), 0o600); err != nil {
				t.Fatal(err)
			}
			if out := g.MustRun("chroot /host cat " + share + "/from-host && cat /share/from-host"); out != "oneone" {
				t.Errorf("got shared file %q, want oneone", out)
			}
			g.MustRun("chroot /host sh -c 'echo two >" + share + "/from-guest'")
			if b, err := os.ReadFile(filepath.Join(share, "from-guest")); string(b) != "two\n" {
				t.Errorf("got the guest's file %q, error %v, want \"two\\n\"", b, err)
			}

			// The guest cannot change other files of the host: the root is read-only, and the
			// writable directories are in the guest's memory.
			name := strings.ReplaceAll(t.Name(), "/", "-")
			if out, err := g.Run("chroot /host touch /" + name); err == nil {
				t.Errorf("got a writable host root, want read-only: %s", out)
			}
			for _, dir := range []string{"/tmp", "/var/tmp", "/run"} {
				file := filepath.Join(dir, name)
				g.MustRun("chroot /host touch " + file)
				if _, err := os.Stat(file); err == nil {
					os.Remove(file)
					t.Errorf("the guest created %s on the host", file)
				}
			}
		})
	}
}
