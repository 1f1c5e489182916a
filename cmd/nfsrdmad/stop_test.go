package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// writeDirty creates a file on a mount, writes data and keeps the file open until the test ends.
// The data stays in the daemon.
func writeDirty(t *testing.T, path string, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	return f
}

// umount unmounts dir without a new process. The exec of a process closes the inherited files, and
// each close writes their data.
func (w *testEnv) umount(t *testing.T, dir string, mode control.UmountMode) {
	t.Helper()
	if err := control.NewClient(w.socket).Umount(t.Context(), control.UmountRequest{Dir: dir, Mode: mode}); err != nil {
		t.Error(err)
	}
}

// wantOnServer checks the content of a file of the export.
func (w *testEnv) wantOnServer(t *testing.T, name string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(w.dir, "export", name))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s on the server: got %d bytes, %v; want the %d bytes that were written", name, len(got), err,
			len(want))
	}
}

// TestStopWritesDirtyData checks that the daemon writes the data of open files before it ends a
// mount: on SIGTERM, and for umount --force.
func TestStopWritesDirtyData(t *testing.T) {
	data := noise("dirty", 3<<20+5)
	for name, stop := range map[string]func(*testing.T, *testEnv, string){
		"SIGTERM": func(*testing.T, *testEnv, string) {}, // at the end of each case
		"SIGTERM after lazy unmount": func(t *testing.T, w *testEnv, dir string) {
			w.umount(t, dir, control.UmountLazy)
		},
		"umount --force": func(t *testing.T, w *testEnv, dir string) {
			w.umount(t, dir, control.UmountForce)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestEnv(t)
			dir := w.mkdir(t, "mnt")
			w.mountWith(t, dir, "dirty_expire=0")
			for i := range 3 {
				writeDirty(t, filepath.Join(dir, fmt.Sprint("file", i)), data[i:])
			}
			stop(t, w, dir)
			w.stop(t, w.daemon) // the log is complete
			for i := range 3 {
				w.wantOnServer(t, fmt.Sprint("file", i), data[i:])
			}
			if strings.Contains(w.log.String(), "lost") {
				t.Errorf("got log %s, want no lost data", w.log)
			}
		})
	}
}

// TestOpenFileReachesServer checks that the data of an open file is on the server after
// dirty_expire, without an fsync or a close.
func TestOpenFileReachesServer(t *testing.T) {
	w := newTestEnv(t)
	dir := w.mkdir(t, "mnt")
	w.mountWith(t, dir, "dirty_expire=1")
	data := noise("dirty", 100_000)
	writeDirty(t, filepath.Join(dir, "file"), data)
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if got, _ := os.ReadFile(filepath.Join(w.dir, "export", "file")); len(got) == len(data) {
			break
		}
	}
	w.wantOnServer(t, "file", data)
}

// TestStopWritesMappedData checks that the data in a shared mapping is on the server after SIGTERM.
// The server is a separate process, because a page fault blocks the runtime of this one.
func TestStopWritesMappedData(t *testing.T) {
	w := newTestEnv(t)
	server := servePausable(t, filepath.Join(w.dir, "export"), "--no-root-squash")
	dir := w.mkdir(t, "mnt")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o",
		ports(t, server.rdma, server.tcp)).succeeds(t)
	data := noise("mapped", 300_000)
	f := writeDirty(t, filepath.Join(dir, "file"), make([]byte, len(data)))
	p, err := syscall.Mmap(int(f.Fd()), 0, len(data), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(p) })
	copy(p, data)
	_ = w.daemon.Process.Signal(syscall.SIGTERM)
	w.stop(t, w.daemon)
	w.wantOnServer(t, "file", data)
}

// TestStopReportsLostData stops a server that has not received the data of an open file. The daemon
// must end after its shutdown timeout, log the file and the number of bytes, and fail.
func TestStopReportsLostData(t *testing.T) {
	w := newTestEnv(t)
	w.stop(t, w.daemon)
	w.startDaemonWith(t, "--metrics-listen", "", "--shutdown-timeout", "2s")
	server := servePausable(t, filepath.Join(w.dir, "export"), "--no-root-squash")
	dir := w.mkdir(t, "mnt")
	nfsrdmad(t, "mount", "--control-socket", w.socket, "127.0.0.1:/", dir, "-o",
		ports(t, server.rdma, server.tcp)+",dirty_expire=0").succeeds(t)
	f := writeDirty(t, filepath.Join(dir, "file"), noise("dirty", 100_000))
	if _, err := f.WriteAt([]byte("more"), 1<<20); err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(w.dir, "export", "file"), &st); err != nil {
		t.Fatal(err)
	}
	server.pause(t)
	_ = w.daemon.Process.Signal(syscall.SIGTERM)
	_ = w.daemon.Wait()
	if code := w.daemon.ProcessState.ExitCode(); code != control.ExitMount {
		t.Errorf("exit code of the daemon: got %d, want %d", code, control.ExitMount)
	}
	server.resume(t)
	for _, want := range []string{"written data lost", fmt.Sprintf("fileid=%d", st.Ino), "offset=0",
		fmt.Sprintf("end=%d", 1<<20+4), "bytes=100004", "dir=" + dir} {
		if !strings.Contains(w.log.String(), want) {
			t.Errorf("got log %s, want %q", w.log, want)
		}
	}
}

// TestForegroundReportsLostData ends a foreground mount from outside while its server is stopped.
// The data of an open file is lost then, so the command must fail.
func TestForegroundReportsLostData(t *testing.T) {
	w := newTestEnv(t)
	server := servePausable(t, filepath.Join(w.dir, "export"), "--no-root-squash")
	dir := w.mkdir(t, "mnt")
	cmd := program(t, "nfsrdmad", "mount", "--control-socket", w.socket, "--foreground", "127.0.0.1:/", dir, "-o",
		ports(t, server.rdma, server.tcp)+",dirty_expire=0")
	w.startForeground(t, cmd, dir)
	writeDirty(t, filepath.Join(dir, "file"), noise("dirty", 100_000))
	server.pause(t)
	if err := syscall.Unmount(dir, syscall.MNT_FORCE|syscall.MNT_DETACH); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	server.resume(t)
	if code := cmd.ProcessState.ExitCode(); code != control.ExitMount {
		t.Errorf("exit code: got %d, want %d", code, control.ExitMount)
	}
}
