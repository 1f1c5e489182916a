package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestCommands runs mount, list, status, umount and a forced umount with an open file.
func TestCommands(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	if out := w.run(t, "status").succeeds(t).stdout; out != "no mounts\n" {
		t.Errorf("status without mounts: got %q", out)
	}
	if out := w.mount(t, dir).succeeds(t).stdout; !strings.Contains(out, dir) {
		t.Errorf("mount -v: got %q, want the mount point", out)
	}
	mounts, _ := os.ReadFile("/proc/mounts")
	if !strings.Contains(string(mounts), "127.0.0.1:/ "+dir+" fuse.nfsrdma ") {
		t.Error("/proc/mounts does not list the mount as fuse.nfsrdma")
	}
	kit.Must(t, os.WriteFile(filepath.Join(dir, "new"), []byte("data"), 0o644))
	w.wantOnServer(t, "new", []byte("data"))
	var statfs syscall.Statfs_t
	if err := syscall.Statfs(dir, &statfs); err != nil || statfs.Blocks == 0 {
		t.Errorf("statfs: got %d blocks, %v", statfs.Blocks, err)
	}
	if out := w.run(t, "list").succeeds(t).stdout; !strings.Contains(out, dir+" ") {
		t.Errorf("list: got %s, want %s", out, dir)
	}
	var list []control.MountStatus
	out := w.run(t, "status", "--output", "json", dir).succeeds(t).stdout
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	if s := list[0]; s.Dir != dir || s.State != control.StateMounted || s.Metrics.Count("connects_total") != 1 ||
		s.RPCs["WRITE"] == 0 || !strings.HasPrefix(s.XprtLine, "\txprt:\trdma 0 0 1 ") {
		t.Errorf("got status %+v", s)
	}
	w.run(t, "umount", dir).succeeds(t)
	if _, err := os.Stat(filepath.Join(dir, "hello")); err == nil {
		t.Error("the directory is still mounted")
	}
	w.mount(t, dir).succeeds(t)
	f, err := os.Open(filepath.Join(dir, "hello"))
	kit.Must(t, err)
	defer f.Close()
	w.run(t, "umount", "--force", dir).succeeds(t)
	if _, err := io.ReadAll(f); err == nil {
		t.Error("read of an open file succeeded after a forced unmount")
	}
}

// TestLazyUnmountFreesMountPoint checks that the mount point can be used again while an open file
// of the first mount still works. umount(2) by another program removes the second one from the
// list.
func TestLazyUnmountFreesMountPoint(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mount(t, dir).succeeds(t)
	f, err := os.Open(filepath.Join(dir, "hello"))
	kit.Must(t, err)
	defer f.Close()
	w.run(t, "umount", "--lazy", dir).succeeds(t)
	w.run(t, "umount", dir).fails(t, control.ExitMount, dir, "not mounted by this daemon")
	w.mount(t, dir).succeeds(t)
	w.checkMount(t, dir)
	if b, err := io.ReadAll(f); err != nil || string(b) != "world" {
		t.Errorf("read of the open file: got %q, %v", b, err)
	}
	if l := w.list(t); len(l) != 2 {
		t.Errorf("got mounts %+v, want one mounted and one unmounting", l)
	}
	f.Close()
	kit.Eventually(t, "end of the first mount", func() bool { return len(w.list(t)) == 1 })
	w.checkMount(t, dir)
	kit.Must(t, syscall.Unmount(dir, 0))
	kit.Eventually(t, "end of the second mount", func() bool { return len(w.list(t)) == 0 })
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

// TestMountPrintsJSON checks that mount --output json prints the object that list prints. umount
// prints nothing, and errors are one line of text.
func TestMountPrintsJSON(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	mount := []string{"--output", "json", "127.0.0.1:/", dir, "-o", w.opts(w.server.RDMAAddr)}
	var printed control.MountInfo
	if out := w.run(t, "mount", mount...).succeeds(t).stdout; json.Unmarshal([]byte(out), &printed) != nil ||
		printed.Dir != dir || printed.State != control.StateMounted {
		t.Errorf("mount: got %q, want the mount as JSON", out)
	}
	var listed []control.MountInfo
	out := w.run(t, "list", "--output", "json").succeeds(t).stdout
	if json.Unmarshal([]byte(out), &listed) != nil || len(listed) != 1 || !reflect.DeepEqual(listed[0], printed) {
		t.Errorf("got %+v from mount and %s from list, want the same", printed, out)
	}
	w.run(t, "mount", append(mount, "-v")...).fails(t, 32, "already an nfsrdma mount")
	if out := w.run(t, "umount", "--output", "json", dir).succeeds(t); out.stdout+out.stderr != "" {
		t.Errorf("umount: got %q, %q, want no output", out.stdout, out.stderr)
	}
	w.run(t, "umount", "--output", "json", dir).fails(t, 32, "not mounted by this daemon")
}

// TestMountSetsKernelFlags compares the mount flags in mountinfo with the options of the mount.
func TestMountSetsKernelFlags(t *testing.T) {
	w := newTestEnv(t)
	for i, tt := range []struct{ options, want string }{
		{"defaults", "rw,nosuid,nodev,relatime"},
		{"suid", "rw,nodev,relatime"},
		{"suid,dev,noatime", "rw,noatime"},
		{"strictatime", "rw,nosuid,nodev"},
		{"ro,nosuid,nodev,noexec,noatime,nodiratime", "ro,nosuid,nodev,noexec,noatime,nodiratime"},
	} {
		dir := w.mkdir(t, "flags"+string(rune('0'+i)))
		w.mountWith(t, dir, tt.options)
		w.checkMount(t, dir)
		info, err := os.ReadFile("/proc/self/mountinfo")
		kit.Must(t, err)
		got := ""
		for line := range strings.Lines(string(info)) {
			if f := strings.Fields(line); f[4] == dir {
				got = f[5] // the mount options without those of the file system; see mountinfo(5)
			}
		}
		if got != tt.want {
			t.Errorf("options %s: got mount flags %q, want %q", tt.options, got, tt.want)
		}
	}
}
