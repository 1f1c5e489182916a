package mount

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// hasFileSystem reports whether the kernel has a type of file systems (proc_filesystems(5)).
func hasFileSystem(t *testing.T, name string) bool {
	t.Helper()
	list, err := os.ReadFile("/proc/filesystems")
	kit.Must(t, err)
	return slices.Contains(strings.Fields(string(list)), name)
}

func TestMountedFileSystemIsRefused(t *testing.T) {
	if err := mountedError("/mnt", ""); err != nil {
		t.Errorf("no file system: got %v, want no error", err)
	}
	for fsType, want := range map[string]string{
		"ext4":     "mount point /mnt: already a mount of type ext4; unmount it first",
		FSType:     "mount point /mnt: already an nfsrdma mount; unmount it first",
		autofsType: "mount point /mnt: managed by autofs, and the client did not open it",
	} {
		isError(t, mountedError("/mnt", fsType), control.CodeMount, want)
	}
}

// TestCheckMountPointAtAutofs needs a kernel with autofs. On every kernel,
// TestMountedFileSystemIsRefused checks the error.
func TestCheckMountPointAtAutofs(t *testing.T) {
	kit.NeedsRoot(t)
	dir := t.TempDir()
	r, w, err := os.Pipe()
	kit.Must(t, err)
	defer r.Close()
	defer w.Close()
	// autofs(5), "Mounting an autofs filesystem": without pgrp=, this process group acts as the
	// automounter.
	options := fmt.Sprintf("fd=%d,minproto=5,maxproto=5,direct", w.Fd())
	switch err := syscall.Mount("none", dir, autofsType, 0, options); {
	case errors.Is(err, syscall.ENODEV) && !hasFileSystem(t, autofsType):
		t.Skip("this kernel has no autofs")
	case err != nil:
		t.Fatalf("mount autofs: %v; run as root", err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	request := control.MountRequest{Dir: dir}
	_, err = CheckMountPoint(t.Context(), request)
	isError(t, err, control.CodeMount, "did not open it")

	f, err := OpenAutomount(t.Context(), dir)
	if err != nil || f == nil {
		t.Fatalf("open: got %v and error %v, want the directory", f, err)
	}
	defer f.Close()
	request.DirFD, request.Process = int(f.Fd()), os.Getpid()
	p, err := CheckMountPoint(t.Context(), request)
	kit.Must(t, err)
	p.Close()

	// A descriptor of another directory is not a way to mount there.
	other, err := os.Open(t.TempDir())
	kit.Must(t, err)
	defer other.Close()
	request.DirFD = int(other.Fd())
	_, err = CheckMountPoint(t.Context(), request)
	isError(t, err, control.CodeMount, "its path changed")
	if f, err := OpenAutomount(t.Context(), other.Name()); f != nil || err != nil {
		t.Errorf("open of a directory without autofs: got %v and error %v, want neither", f, err)
	}
}
