package lab_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/lab"
)

// TestHostRoot runs the host's programs in the guest, on the guest's kernel and devices.
func TestHostRoot(t *testing.T) {
	for _, kernel := range lab.Tested() {
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
				if got := g.MustRun("chroot /host " + name + " '" + strings.Join(args, "' '") + "'"); got != string(
					want) {
					t.Errorf("%s says %q in the guest, %q on the host", name, got, want)
				}
			}
			same("git", "--version")
			same("perl", "-e", "print $^V")
			same("rsync", "--version")
			if got := strings.TrimSpace(g.MustRun("chroot /host uname -r")); got != g.Release {
				t.Errorf("a program of the host sees kernel %s, the guest's is %s", got, g.Release)
			}

			// Devices: the guest's own tool in the host's root finds them by the host's libibverbs
			// and its drivers.
			g.MustRun("chroot /host test -c /dev/fuse && chroot /host test -c /dev/infiniband/rdma_cm")
			if out := g.MustRun("cp /usr/bin/ibv_devices /host/tmp/ && chroot /host /tmp/ibv_devices 2>&1"); !strings.Contains(out, "siw0") || !strings.Contains(out, "rxe0") {
				t.Errorf("devices that the host's libraries find in the guest: %s", out)
			}
			g.MustRun("chroot /host mount -t tmpfs x /tmp && chroot /host umount /tmp")

			// The shared directory has the host's name for it, both ways.
			if err := os.WriteFile(filepath.Join(share, "from-host"), []byte("one"), 0o600); err != nil {
				t.Fatal(err)
			}
			if out := g.MustRun("chroot /host cat " + share + "/from-host && cat /share/from-host"); out != "oneone" {
				t.Errorf("the shared file holds %q", out)
			}
			g.MustRun("chroot /host sh -c 'echo two >" + share + "/from-guest'")
			if b, err := os.ReadFile(filepath.Join(share, "from-guest")); string(b) != "two\n" {
				t.Errorf("the guest's file holds %q (%v)", b, err)
			}

			// Nothing else of the host can be changed: its root not at all, and what is memory in
			// the guest is not the host's.
			name := strings.ReplaceAll(t.Name(), "/", "-")
			if out, err := g.Run("chroot /host touch /" + name); err == nil {
				t.Errorf("the guest can write to the host's root: %s", out)
			}
			for _, dir := range []string{"/tmp", "/var/tmp", "/run"} {
				file := filepath.Join(dir, name)
				g.MustRun("chroot /host touch " + file)
				if _, err := os.Stat(file); err == nil {
					os.Remove(file)
					t.Errorf("the guest made the host's %s", file)
				}
			}
		})
	}
}
