package main

import (
	"encoding/json"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

func TestForegroundMountPrintsJSON(t *testing.T) {
	w := newTestEnv(t)
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
	printed := make(chan control.MountInfo, 1)
	go func() {
		var i control.MountInfo
		_ = json.NewDecoder(stdout).Decode(&i)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		printed <- i
	}()
	if i := <-printed; i.Dir != dir || i.State != control.StateMounted {
		t.Errorf("got %+v, want the mount", i)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
