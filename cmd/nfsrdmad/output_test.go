package main

import (
	"encoding/json"
	"reflect"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// With --output json, mount tells of the mount what list does, verbose or not, and umount nothing;
// errors stay a line of text.
func TestMountAsJSON(t *testing.T) {
	w := newWorld(t)
	dir := w.mkdir(t, "mnt")
	mount := []string{"mount", "--control-socket", w.socket, "--output", "json", "127.0.0.1:/", dir, "-o",
		w.opts(w.server.RDMAAddr)}
	var told control.MountInfo
	if out := nfsrdmad(t, mount...).succeeds(t).stdout; json.Unmarshal([]byte(out), &told) != nil ||
		told.Dir != dir || told.State != control.StateMounted {
		t.Errorf("mount says %q", out)
	}
	var listed []control.MountInfo
	out := nfsrdmad(t, "list", "--control-socket", w.socket, "--output", "json").succeeds(t).stdout
	if json.Unmarshal([]byte(out), &listed) != nil || len(listed) != 1 || !reflect.DeepEqual(listed[0], told) {
		t.Errorf("mount says %+v, list %s", told, out)
	}
	nfsrdmad(t, append(mount, "-v")...).fails(t, 32, "nfsrdma mount is there already")
	umount := []string{"umount", "--control-socket", w.socket, "--output", "json", dir}
	if out := nfsrdmad(t, umount...).succeeds(t); out.stdout+out.stderr != "" {
		t.Errorf("umount says %q, %q", out.stdout, out.stderr)
	}
	nfsrdmad(t, umount...).fails(t, 32, "no mount of this daemon")
}

func TestForegroundMountAsJSON(t *testing.T) {
	w := newWorld(t)
	dir := w.mkdir(t, "mnt")
	cmd := program(t, "nfsrdmad", "mount", "--foreground", "--output", "json", "127.0.0.1:/", dir, "-o",
		w.opts(w.server.RDMAAddr))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	told := make(chan control.MountInfo, 1)
	go func() {
		var i control.MountInfo
		_ = json.NewDecoder(stdout).Decode(&i)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		told <- i
	}()
	if i := <-told; i.Dir != dir || i.State != control.StateMounted {
		t.Errorf("says %+v", i)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
