package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// A directory that an automounter watches is told from one where something is mounted that could be
// unmounted first.
func TestAutomountPoint(t *testing.T) {
	dir := t.TempDir()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	// autofs(5), "Mounting an autofs filesystem": this process group is the automounter.
	options := fmt.Sprintf("fd=%d,pgrp=%d,minproto=5,maxproto=5,direct", w.Fd(), syscall.Getpgrp())
	switch err := syscall.Mount("none", dir, autofsType, 0, options); {
	case errors.Is(err, syscall.ENODEV):
		t.Skip("this kernel has no autofs, and so no automounter")
	case err != nil:
		t.Fatalf("mount autofs, which needs root: %v", err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	_, err = CheckMountPoint(context.Background(), dir)
	isError(t, err, control.CodeMount, "x-systemd.automount")
}
