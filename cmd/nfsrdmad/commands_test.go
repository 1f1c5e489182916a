package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// TestCommands runs mount, status, umount and a forced umount with an open file.
func TestCommands(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	if out := w.mount(t, dir).succeeds(t).stdout; !strings.Contains(out, dir) {
		t.Errorf("mount -v: got %q, want the mount point", out)
	}
	mounts, _ := os.ReadFile("/proc/mounts")
	if !strings.Contains(string(mounts), "127.0.0.1:/ "+dir+" fuse.nfsrdma ") {
		t.Error("/proc/mounts does not list the mount as fuse.nfsrdma")
	}
	if err := os.WriteFile(filepath.Join(dir, "new"), []byte("data"), 0o644); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(w.dir, "export", "new")); err != nil || string(b) != "data" {
		t.Errorf("read on the server: got %q, %v", b, err)
	}
	var statfs syscall.Statfs_t
	if err := syscall.Statfs(dir, &statfs); err != nil || statfs.Blocks == 0 {
		t.Errorf("statfs: got %d blocks, %v", statfs.Blocks, err)
	}
	var list []control.MountStatus
	out := nfsrdmad(t, "status", "--control-socket", w.socket, "--output", "json", dir).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	if s := list[0]; s.Dir != dir || s.State != control.StateMounted || s.Connects != 1 || s.RPCs["WRITE"] == 0 ||
		!strings.HasPrefix(s.XprtLine, "\txprt:\trdma 0 0 1 ") {
		t.Errorf("got status %+v", s)
	}
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).succeeds(t)
	if _, err := os.Stat(filepath.Join(dir, "hello")); err == nil {
		t.Error("the directory is still mounted")
	}
	w.mount(t, dir).succeeds(t)
	f, err := os.Open(filepath.Join(dir, "hello"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", dir).succeeds(t)
	if _, err := io.ReadAll(f); err == nil {
		t.Error("read of an open file succeeded after a forced unmount")
	}
}

// TestLazyUnmountFreesMountPoint checks that the mount point can be used again while an open file
// of the first mount still works.
func TestLazyUnmountFreesMountPoint(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	f, err := os.Open(filepath.Join(dir, "hello"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	nfsrdmad(t, "umount", "--control-socket", w.socket, "--lazy", dir).succeeds(t)
	nfsrdmad(t, "umount", "--control-socket", w.socket, dir).fails(t, control.ExitMount, dir,
		"not mounted by this daemon")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	if b, err := io.ReadAll(f); err != nil || string(b) != "world" {
		t.Errorf("read of the open file: got %q, %v", b, err)
	}
	listed := func() int {
		return strings.Count(nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout, dir+" ")
	}
	if n := listed(); n != 2 {
		t.Errorf("got %d mounts in the list, want one mounted and one unmounting", n)
	}
	f.Close()
	for deadline := time.Now().Add(limit); listed() != 1; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the list still shows the first mount")
		}
	}
	w.checkMount(t, dir)
}

func TestSystemUmountRemovesMountFromList(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	if err := syscall.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if !strings.Contains(nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout, dir) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the list still shows the mount")
		}
	}
}

// TestCommandsWithStoppedServer checks that list, status and a forced umount do not wait for a
// server that has ended.
func TestCommandsWithStoppedServer(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	w.server.Close()
	nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t)
	nfsrdmad(t, "status", "--control-socket", w.socket, dir).succeeds(t)
	nfsrdmad(t, "umount", "--control-socket", w.socket, "--force", dir).succeeds(t)
}

func TestForeground(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "fg")
	cmd := program(t, "nfsrdmad", "mount", "--foreground", "127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(dir, "hello")); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Error("the mount does not appear")
			break
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestMountHelper calls the helper with the arguments of mount(8). With -f it checks only.
func TestMountHelper(t *testing.T) {
	dir := t.TempDir()
	helper := func(args ...string) outcome { return finish(t, program(t, "/sbin/mount.nfsrdma", args...)) }
	helper("127.0.0.1:/", dir, "-fnv", "-o", "rw,soft").succeeds(t)
	helper("127.0.0.1:/", dir, "-f", "-s", "-o", "rw,frobnicate").succeeds(t)
	helper("127.0.0.1:/", dir, "-f", "-o", "rw,frobnicate").fails(t, 1, `"frobnicate"`)
	helper("127.0.0.1:/", dir+"/no", "-f").fails(t, 32, dir+"/no")
}
