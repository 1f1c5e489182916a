package main

import (
	"bytes"
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

	"github.com/nfsrdmad/nfsrdmad/internal/fdstore"
	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fusefs"
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

// TestVirtiofsContinues ends the daemon under a share. The connection of the virtual machine
// monitor stays. A request that it sends meanwhile gets its reply from the next daemon.
// pkg/virtiofs tests the same with requests of a guest.
func TestVirtiofsContinues(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *testEnv){
		"stop": func(t *testing.T, w *testEnv) {
			nfsrdmad(t, "stop", "--keep-mounts", "--control-socket", w.socket).succeeds(t)
			_ = w.daemon.Wait()
		},
		"kill": func(_ *testing.T, w *testEnv) {
			_ = w.daemon.Process.Kill()
			_ = w.daemon.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestEnv(t)
			share := filepath.Join(w.dir, "vm.sock")
			nfsrdmad(t, "virtiofs", "--control-socket", w.socket, "--socket", share, "127.0.0.1:/", "-o",
				w.opts(w.server.RDMAAddr)).succeeds(t)
			dial := func() net.Conn {
				vmm, err := net.Dial("unix", share)
				if err != nil {
					t.Fatal(err)
				}
				return vmm
			}
			vmm := dial()
			for range 3 {
				getFeatures(t, vmm)
				wantFeatures(t, vmm)
				end(t, w)
				getFeatures(t, vmm)
				w.startDaemon(t)
				wantFeatures(t, vmm)
			}
			// The next one connects while no daemon runs, after the first one has ended.
			end(t, w)
			vmm.Close()
			vmm = dial()
			defer vmm.Close()
			getFeatures(t, vmm)
			w.startDaemon(t)
			wantFeatures(t, vmm)
			o := nfsrdmad(t, "status", "--control-socket", w.socket, share).succeeds(t)
			if !strings.Contains(o.stdout, share) || !strings.Contains(o.stdout, "mounted") {
				t.Errorf("status: got %s", o.stdout)
			}
			nfsrdmad(t, "umount", "--control-socket", w.socket, share).succeeds(t)
			if _, err := os.Lstat(share); !os.IsNotExist(err) {
				t.Errorf("socket after umount: %v", err)
			}
			if n, err := vmm.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("connection after umount: got %d bytes, %v, want EOF", n, err)
			}
			end(t, w)
			w.startDaemon(t)
			out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout
			if strings.Contains(out, share) {
				t.Errorf("the next daemon has a share that was ended:\n%s", out)
			}
		})
	}
}

// shareInUse starts a share, and connects to it as a virtual machine monitor does.
func (w *testEnv) shareInUse(t *testing.T) (share string, vmm net.Conn) {
	t.Helper()
	share = filepath.Join(w.dir, "vm.sock")
	nfsrdmad(t, "virtiofs", "--control-socket", w.socket, "--socket", share, "127.0.0.1:/", "-o",
		w.opts(w.server.RDMAAddr)).succeeds(t)
	vmm, err := net.Dial("unix", share)
	if err != nil {
		t.Fatal(err)
	}
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
	nfsrdmad(t, "umount", "--lazy", "--control-socket", w.socket, share).succeeds(t)
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after a lazy umount: %v", err)
	}
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	getFeatures(t, vmm)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after a restart: %v", err)
	}
	vmm.Close()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		list, err := control.NewClient(w.socket).List(t.Context())
		if err == nil && len(list) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the share does not end with the virtual machine: %+v, %v", list, err)
		}
	}
}

// TestVirtiofsWithoutServer starts a daemon that does not reach the server of a share. The share
// waits, and a forced unmount ends it.
func TestVirtiofsWithoutServer(t *testing.T) {
	w := newTestEnv(t)
	share, vmm := w.shareInUse(t)
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	w.server.Close()
	getFeatures(t, vmm)
	w.startDaemon(t)
	out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout
	if !strings.Contains(out, share) || !strings.Contains(out, "restoring") {
		t.Errorf("list: got %s", out)
	}
	nfsrdmad(t, "umount", "--control-socket", w.socket, share).fails(t, 32, "waits for the server")
	nfsrdmad(t, "umount", "--force", "--control-socket", w.socket, share).succeeds(t)
	if _, err := os.Lstat(share); !os.IsNotExist(err) {
		t.Errorf("socket after umount: %v", err)
	}
	_ = vmm.SetReadDeadline(time.Now().Add(limit))
	if n, err := vmm.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection after umount: got %d bytes, %v, want its end", n, err)
	}
}

// setShareVersion changes the format version in the state of the share, as a daemon of another
// version would have written it, and returns the old version. No daemon runs.
func (w *testEnv) setShareVersion(t *testing.T, version uint32) (old uint32) {
	t.Helper()
	const place = 8 // see package slotfile
	store, err := fdstore.Holder(fdstore.Config{Socket: w.socket + ".fds", Command: []string{"false"}})
	if err != nil {
		t.Fatal(err)
	}
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
// leaves the share alone until a forced unmount.
func TestVirtiofsOfOtherVersion(t *testing.T) {
	w := newTestEnv(t)
	_, vmm := w.shareInUse(t)
	kill := func() {
		_ = w.daemon.Process.Kill()
		_ = w.daemon.Wait()
	}
	kept := func() (dir string) {
		t.Helper()
		list, err := control.NewClient(w.socket).List(t.Context())
		if err != nil || len(list) != 1 || list[0].State != control.StateKept ||
			!strings.Contains(list[0].Reason, "1000") {
			t.Fatalf("list: got %+v, %v, want one share in state %q", list, err, control.StateKept)
		}
		return list[0].Dir
	}
	kill()
	version := w.setShareVersion(t, 1000)
	getFeatures(t, vmm)
	w.startDaemon(t)
	nfsrdmad(t, "umount", "--control-socket", w.socket, kept()).fails(t, 32, "cannot serve the mount", "--force")
	kill()
	w.setShareVersion(t, version)
	w.startDaemon(t)
	wantFeatures(t, vmm)
	kill()
	w.setShareVersion(t, 1000)
	w.startDaemon(t)
	nfsrdmad(t, "umount", "--force", "--control-socket", w.socket, kept()).succeeds(t)
	_ = vmm.SetReadDeadline(time.Now().Add(limit))
	if n, err := vmm.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection after a forced unmount: got %d bytes, %v, want its end", n, err)
	}
	if out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout; strings.Contains(out, "kept") {
		t.Errorf("list after a forced unmount: got %s", out)
	}
}

// TestForcedUnmountOfUnknownShare starts a daemon that does not understand the description of a
// share. A forced unmount ends the connection of the virtual machine, and the path can be used
// again.
func TestForcedUnmountOfUnknownShare(t *testing.T) {
	w := newTestEnv(t)
	share := filepath.Join(w.dir, "vm.sock")
	args := []string{"virtiofs", "--control-socket", w.socket, "--socket", share, "127.0.0.1:/", "-o",
		w.opts(w.server.RDMAAddr)}
	nfsrdmad(t, args...).succeeds(t)
	vmm, err := net.Dial("unix", share)
	if err != nil {
		t.Fatal(err)
	}
	defer vmm.Close()
	getFeatures(t, vmm)
	wantFeatures(t, vmm)
	_ = w.daemon.Process.Kill()
	_ = w.daemon.Wait()
	w.changeDescription(t, `"spec":"127.0.0.1:/"`, `"spec":"127.0.0.1"`)
	w.startDaemon(t)
	if out := nfsrdmad(t, "list", "--control-socket", w.socket).succeeds(t).stdout; !strings.Contains(out, "kept") {
		t.Fatalf("list: got %s, want a share that is kept", out)
	}
	nfsrdmad(t, "umount", "--force", "--control-socket", w.socket, share).succeeds(t)
	_ = vmm.SetReadDeadline(time.Now().Add(limit))
	if n, err := vmm.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection after a forced unmount: got %d bytes, %v, want its end", n, err)
	}
	nfsrdmad(t, args...).succeeds(t)
}

// changeDescription replaces the state of the share by one with a changed description. No daemon
// runs.
func (w *testEnv) changeDescription(t *testing.T, from, to string) {
	t.Helper()
	store, err := fdstore.Holder(fdstore.Config{Socket: w.socket + ".fds", Command: []string{"false"}})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for _, e := range store.Kept() {
		if strings.HasSuffix(e.Name, "/state") {
			old, err := fusefs.OpenState(e.File)
			if err != nil {
				t.Fatal(err)
			}
			text := bytes.Replace(old.Description(), []byte(from), []byte(to), 1)
			state, err := fusefs.NewState(text, old.Buffers(), [16]byte{})
			if err != nil || bytes.Equal(text, old.Description()) {
				t.Fatalf("description %s: %v", text, err)
			}
			f, err := state.Descriptor()
			if err == nil {
				err = errors.Join(store.Put(e.Name, f), f.Close(), state.Close(), old.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		_ = e.File.Close()
	}
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
