package main

import (
	"os"
	"strings"
	"testing"
)

// TestMountSetsKernelFlags compares the mount flags in mountinfo with the options of the mount.
func TestMountSetsKernelFlags(t *testing.T) {
	w := newTestEnv(t)
	for _, tt := range []struct{ options, want string }{
		{"", "rw,nosuid,nodev,relatime"},
		{"defaults,relatime,norelatime", "rw,nosuid,nodev,relatime"},
		{"suid", "rw,nodev,relatime"},
		{"dev", "rw,nosuid,relatime"},
		{"suid,dev,noatime", "rw,noatime"},
		{"nodiratime", "rw,nosuid,nodev,nodiratime,relatime"},
		{"strictatime", "rw,nosuid,nodev"},
		{"nosuid,nodev,noexec", "rw,nosuid,nodev,noexec,relatime"},
		{"ro,nosuid,nodev,noexec,noatime,nodiratime", "ro,nosuid,nodev,noexec,noatime,nodiratime"},
	} {
		t.Run(tt.options, func(t *testing.T) {
			dir := w.mkdir(t, "flags")
			w.mountWith(t, dir, tt.options)
			w.checkMount(t, dir)
			if got := kernelFlags(t, dir); got != tt.want {
				t.Errorf("got mount flags %q, want %q", got, tt.want)
			}
			nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
		})
	}
}

// kernelFlags returns the mount options of mountinfo(5), which do not include those of the file
// system.
func kernelFlags(t *testing.T, dir string) string {
	t.Helper()
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(info)) {
		if f := strings.Fields(line); f[4] == dir {
			return f[5]
		}
	}
	t.Fatalf("%s is not mounted", dir)
	return ""
}
