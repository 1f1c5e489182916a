package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// Requests of autofs, from include/uapi/linux/auto_fs.h.
const (
	autofsReady         = 0x9360 // _IO(0x93, 0x60)
	autofsCatatonic     = 0x9362
	autofsMissingDirect = 5
	autofsTokenOffset   = 8
)

// An automounter is the side of autofs that systemd has for x-systemd.automount. This process group
// is that of the automounter.
type automounter struct {
	dir      string
	root     *os.File // of autofs
	requests *os.File // of the kernel
}

func newAutomounter(t *testing.T, dir string) *automounter {
	t.Helper()
	kit.NeedsRoot(t)
	_ = exec.Command("modprobe", "autofs4").Run() // the kernel may have it built in, or not at all
	list, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(strings.Fields(string(list)), "autofs") {
		t.Skip("this kernel has no autofs; the lab tests x-systemd.automount")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	// autofs(5), "Mounting an autofs filesystem": without pgrp=, this process group is that of the
	// automounter.
	options := fmt.Sprintf("fd=%d,minproto=5,maxproto=5,direct", w.Fd())
	if err := syscall.Mount("test", dir, "autofs", 0, options); err != nil {
		t.Fatalf("mount autofs: %v; run as root", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	a := &automounter{dir: dir, root: root, requests: r}
	t.Cleanup(func() {
		_ = unix.IoctlSetInt(int(root.Fd()), autofsCatatonic, 0) // processes at dir stop waiting
		if err := errors.Join(root.Close(), r.Close(), w.Close()); err != nil {
			t.Error(err)
		}
	})
	return a
}

// access starts a process outside the process group that reads a file below dir, and returns when
// the kernel requests the mount. done ends the request and returns what the process has read.
func (a *automounter) access(t *testing.T, name string) (done func() string) {
	t.Helper()
	var out strings.Builder
	cat := exec.Command("cat", filepath.Join(a.dir, name))
	cat.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cat.Stdout, cat.Stderr = &out, &out
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	packet := make([]byte, 512)
	n, err := a.requests.Read(packet)
	if err != nil || n < autofsTokenOffset+8 || binary.NativeEndian.Uint32(packet[4:]) != autofsMissingDirect {
		t.Fatalf("request of the kernel: got %d bytes %x and error %v, want a missing mount", n, packet[:n], err)
	}
	token := binary.NativeEndian.Uint64(packet[autofsTokenOffset:])
	return func() string {
		t.Helper()
		if err := unix.IoctlSetInt(int(a.root.Fd()), autofsReady, int(token)); err != nil {
			t.Errorf("end the request: %v", err)
		}
		if err := cat.Wait(); err != nil {
			t.Errorf("cat: %v: %s", err, &out)
		}
		return out.String()
	}
}

// TestMountForAutomounter mounts for an automounter while a process waits for the mount. The daemon
// is outside the process group of the automounter, so it could not open the directory.
func TestMountForAutomounter(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.ownGroup = true
	w.startDaemon(t)
	a := newAutomounter(t, w.mkdir(t, "auto"))
	for round := range 2 {
		done := a.access(t, "hello")
		w.mount(t, a.dir).succeeds(t)
		if got := done(); got != "world" {
			t.Errorf("round %d: read of the waiting process: got %q, want %q", round, got, "world")
		}
		w.checkMount(t, a.dir)
		nfsrdmad(t, "umount", "--control-socket", w.socket, a.dir).succeeds(t)
	}
	// A mount by hand needs no request.
	w.mount(t, a.dir).succeeds(t)
	w.checkMount(t, a.dir)
	w.mount(t, a.dir).fails(t, 32, "already an nfsrdma mount")
	nfsrdmad(t, "umount", "--control-socket", w.socket, a.dir).succeeds(t)
}
