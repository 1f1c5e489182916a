package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestVirtiofs makes and ends shares. test/lab/virtiofs uses one in a guest.
func TestVirtiofs(t *testing.T) {
	w := newTestEnv(t)
	opts := w.opts(w.server.RDMAAddr)
	share := filepath.Join(w.dir, "vm.sock")
	args := []string{"virtiofs", "--control-socket", w.socket, "--socket", share, "127.0.0.1:/", "-o", opts}
	if out := nfsrdmad(t, args...).succeeds(t).stdout; out != "127.0.0.1:/ is served on "+share+"\n" {
		t.Errorf("output: got %q", out)
	}
	if out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout; !strings.Contains(out, share) {
		t.Errorf("list has no %s:\n%s", share, out)
	}
	nfsrdmad(t, "status", "--control-socket", w.socket, share).succeeds(t)
	nfsrdmad(t, args...).fails(t, 32, "in use by 127.0.0.1:/")
	vmm, err := net.Dial("unix", share)
	if err != nil {
		t.Fatal(err)
	}
	defer vmm.Close()
	nfsrdmad(t, "umount", "--control-socket", w.socket, share).succeeds(t)
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after umount: %v", err)
	}
	if err := os.WriteFile(share, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	nfsrdmad(t, args...).fails(t, 32, "is not a socket")
	nfsrdmad(t, "virtiofs", "127.0.0.1:/").fails(t, 1, "--socket is missing")
}

func TestVirtiofsForeground(t *testing.T) {
	w := newTestEnv(t)
	share := filepath.Join(w.dir, "vm.sock")
	cmd := program(t, "nfsrdmad", "virtiofs", "--foreground", "--socket", share, "127.0.0.1:/", "-o",
		w.opts(w.server.RDMAAddr))
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		if fi, err := os.Lstat(share); err == nil {
			if fi.Mode() != os.ModeSocket|0o600 {
				t.Errorf("mode: got %v", fi.Mode())
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no socket")
		}
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after the end: %v", err)
	}
	nfsrdmad(t, "virtiofs", "--foreground", "--socket", filepath.Join(w.dir, "none", "s"), "127.0.0.1:/", "-o",
		w.opts(w.server.RDMAAddr)).fails(t, 32, "no such file or directory")
	nfsrdmad(t, "virtiofs", "--foreground", "--socket", share, "127.0.0.1:/", "-o",
		"mountport=1").fails(t, 32, "connection refused")
}
