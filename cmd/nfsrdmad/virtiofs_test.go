package main

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/keep/fdstore"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestVirtiofs makes and ends shares. test/lab/virtiofs uses one in a guest.
func TestVirtiofs(t *testing.T) {
	w := newTestEnv(t)
	share := filepath.Join(w.dir, "vm.sock")
	args := []string{"--socket", share, "127.0.0.1:/", "-o", w.opts(w.server.RDMAAddr)}
	if out := w.run(t, "virtiofs", args...).succeeds(t).stdout; out != "127.0.0.1:/ is served on "+share+"\n" {
		t.Errorf("output: got %q", out)
	}
	wantText(t, "list", w.run(t, "list").succeeds(t).stdout, share)
	w.run(t, "status", share).succeeds(t)
	w.run(t, "virtiofs", args...).fails(t, 32, "in use by 127.0.0.1:/")
	vmm, err := net.Dial("unix", share)
	kit.Must(t, err)
	defer vmm.Close()
	w.run(t, "umount", share).succeeds(t)
	wantNoSocket(t, share)
	kit.Must(t, os.WriteFile(share, nil, 0o600))
	w.run(t, "virtiofs", args...).fails(t, 32, "is not a socket")

	share = filepath.Join(w.dir, "foreground")
	args[1] = share
	cmd := program(t, "nfsrdmad", append([]string{"virtiofs", "--foreground"}, args...)...)
	kit.Must(t, cmd.Start())
	var fi os.FileInfo
	kit.Eventually(t, "socket", func() bool {
		fi, err = os.Lstat(share)
		return err == nil
	})
	if fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode: got %v", fi.Mode())
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	wantNoSocket(t, share)
	args[1] = filepath.Join(w.dir, "none", "s")
	nfsrdmad(t, append([]string{"virtiofs", "--foreground"}, args...)...).fails(t, 32, "no such file or directory")
}

func wantNoSocket(t *testing.T, share string) {
	t.Helper()
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after the end of the share: %v", err)
	}
}

// wantEnd checks that a share has ended the connection of the virtual machine monitor.
func wantEnd(t *testing.T, vmm net.Conn) {
	t.Helper()
	_ = vmm.SetReadDeadline(time.Now().Add(limit))
	if n, err := vmm.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection after the end of the share: got %d bytes, %v, want its end", n, err)
	}
}

// getFeatures asks a share as a virtual machine monitor does. The reply can be read later.
func getFeatures(t *testing.T, vmm net.Conn) {
	t.Helper()
	if _, err := vmm.Write([]byte{1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}); err != nil { // VHOST_USER_GET_FEATURES
		t.Fatal(err)
	}
}

func wantFeatures(t *testing.T, vmm net.Conn) {
	t.Helper()
	_ = vmm.SetReadDeadline(time.Now().Add(limit))
	b := make([]byte, 20)
	if _, err := io.ReadFull(vmm, b); err != nil || b[0] != 1 || b[8] != 8 {
		t.Fatalf("reply to GET_FEATURES: got % x, %v", b, err)
	}
}

// TestVirtiofsContinues ends the daemon under a share: it is stopped, and then killed. The
// connection of the virtual machine monitor stays. A request that it sends meanwhile gets its reply
// from the next daemon. pkg/virtiofs tests the same with requests of a guest.
func TestVirtiofsContinues(t *testing.T) {
	w := newTestEnv(t)
	share, vmm := w.shareInUse(t)
	w.run(t, "stop", "--keep-mounts").succeeds(t)
	_ = w.daemon.Wait()
	getFeatures(t, vmm)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	// The next one connects while no daemon runs, after the first one has ended.
	w.kill()
	vmm.Close()
	vmm, err := net.Dial("unix", share)
	kit.Must(t, err)
	defer vmm.Close()
	getFeatures(t, vmm)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	wantText(t, "status", w.run(t, "status", share).succeeds(t).stdout, share, "mounted")
	w.run(t, "umount", share).succeeds(t)
	wantNoSocket(t, share)
	wantEnd(t, vmm)
	w.kill()
	w.startDaemon(t)
	if l := w.list(t); len(l) != 0 {
		t.Errorf("the next daemon has a share that was ended: %+v", l)
	}
}

// shareInUse starts a share, and connects to it as a virtual machine monitor does.
func (w *testEnv) shareInUse(t *testing.T) (share string, vmm net.Conn) {
	t.Helper()
	share = filepath.Join(w.dir, "vm.sock")
	w.run(t, "virtiofs", "--socket", share, "127.0.0.1:/", "-o", w.opts(w.server.RDMAAddr)).succeeds(t)
	vmm, err := net.Dial("unix", share)
	kit.Must(t, err)
	t.Cleanup(func() { vmm.Close() })
	getFeatures(t, vmm)
	wantFeatures(t, vmm)
	return share, vmm
}

// TestDetachedShareContinues ends the daemon after a lazy unmount. The share then ends with the
// virtual machine.
func TestDetachedShareContinues(t *testing.T) {
	w := newTestEnv(t)
	share, vmm := w.shareInUse(t)
	w.run(t, "umount", "--lazy", share).succeeds(t)
	wantNoSocket(t, share)
	w.kill()
	getFeatures(t, vmm)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	wantNoSocket(t, share)
	vmm.Close()
	kit.Eventually(t, "end of the share", func() bool { return len(w.list(t)) == 0 })
}

// TestVirtiofsWithoutServer starts a daemon that does not reach the server of a share. The share
// waits, and a forced unmount ends it.
func TestVirtiofsWithoutServer(t *testing.T) {
	w := newTestEnv(t)
	share, vmm := w.shareInUse(t)
	w.kill()
	w.server.Close()
	getFeatures(t, vmm)
	w.startDaemon(t)
	wantText(t, "list", w.run(t, "list").succeeds(t).stdout, share, "restoring")
	w.run(t, "umount", share).fails(t, 32, "waits for the server")
	w.run(t, "umount", "--force", share).succeeds(t)
	wantNoSocket(t, share)
	wantEnd(t, vmm)
}

// setShareVersion changes the format version in the state of the share, as a daemon of another
// version would have written it, and returns the old version. No daemon runs.
func (w *testEnv) setShareVersion(t *testing.T, version uint32) (old uint32) {
	t.Helper()
	const place = 8 // see package slotfile
	store, err := fdstore.Holder(fdstore.Config{Socket: w.socket + ".fds", Command: []string{"false"}})
	kit.Must(t, err)
	defer store.Close()
	for _, e := range store.Kept() {
		if strings.HasSuffix(e.Name, "/state") {
			b := make([]byte, 4)
			if _, err := e.File.ReadAt(b, place); err != nil {
				t.Fatal(err)
			}
			old = binary.NativeEndian.Uint32(b)
			if _, err := e.File.WriteAt(binary.NativeEndian.AppendUint32(nil, version), place); err != nil {
				t.Fatal(err)
			}
		}
		_ = e.File.Close()
	}
	return old
}

// TestVirtiofsOfOtherVersion starts a daemon that finds a share with a state of another version. It
// leaves the share alone until a forced unmount. Then the path can be used again.
func TestVirtiofsOfOtherVersion(t *testing.T) {
	w := newTestEnv(t)
	share, vmm := w.shareInUse(t)
	w.kill()
	version := w.setShareVersion(t, 1000)
	getFeatures(t, vmm)
	w.startDaemon(t)
	kept := func() string {
		t.Helper()
		l := w.list(t)
		if len(l) != 1 || l[0].State != control.StateKept || !strings.Contains(l[0].Reason, "1000") {
			t.Fatalf("list: got %+v, want one share in state %q", l, control.StateKept)
		}
		return l[0].Dir
	}
	w.run(t, "umount", kept()).fails(t, 32, "cannot serve the mount", "--force")
	w.kill()
	w.setShareVersion(t, version)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	w.kill()
	w.setShareVersion(t, 1000)
	w.startDaemon(t)
	w.run(t, "umount", "--force", kept()).succeeds(t)
	wantEnd(t, vmm)
	w.run(t, "virtiofs", "--socket", share, "127.0.0.1:/", "-o", w.opts(w.server.RDMAAddr)).succeeds(t)
}
