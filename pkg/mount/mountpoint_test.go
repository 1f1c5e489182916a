package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// hasFileSystem reports whether the kernel has a type of file systems (proc_filesystems(5)).
func hasFileSystem(t *testing.T, name string) bool {
	t.Helper()
	list, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	return slices.Contains(strings.Fields(string(list)), name)
}

func TestMountedFileSystemIsRefused(t *testing.T) {
	if err := mountedError("/mnt", ""); err != nil {
		t.Errorf("no file system: got %v, want no error", err)
	}
	for fsType, want := range map[string]string{
		"ext4":      "mount point /mnt: already a mount of type ext4; unmount it first",
		nfsrdmaType: "mount point /mnt: already an nfsrdma mount; unmount it first",
		autofsType:  "remove x-systemd.automount from fstab(5)",
	} {
		isError(t, mountedError("/mnt", fsType), control.CodeMount, want)
	}
}

// TestCheckMountPointRefusesAutofs needs a kernel with autofs. On every kernel,
// TestMountedFileSystemIsRefused checks the error.
func TestCheckMountPointRefusesAutofs(t *testing.T) {
	testutil.NeedsRoot(t)
	dir := t.TempDir()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	// autofs(5), "Mounting an autofs filesystem": this process group acts as the automounter.
	options := fmt.Sprintf("fd=%d,pgrp=%d,minproto=5,maxproto=5,direct", w.Fd(), syscall.Getpgrp())
	switch err := syscall.Mount("none", dir, autofsType, 0, options); {
	case errors.Is(err, syscall.ENODEV) && !hasFileSystem(t, autofsType):
		t.Skip("this kernel has no autofs")
	case err != nil:
		t.Fatalf("mount autofs: %v; run as root", err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	_, err = CheckMountPoint(context.Background(), dir)
	isError(t, err, control.CodeMount, "x-systemd.automount")
}
