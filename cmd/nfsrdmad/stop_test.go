package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// writeDirty creates a file on a mount, writes data and keeps the file open until the test ends.
// The data stays in the daemon.
func writeDirty(t *testing.T, path string, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(path)
	kit.Must(t, err)
	t.Cleanup(func() { f.Close() })
	_, err = f.Write(data)
	kit.Must(t, err)
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
// mount: for umount --force, and on SIGTERM, also after a lazy unmount.
func TestStopWritesDirtyData(t *testing.T) {
	data := kit.RandomBytes(2, 3<<20+5)
	w := newTestEnv(t)
	names := []string{"forced", "lazy", "stopped"}
	for _, name := range names { // before this process has dirty data; see umount
		w.mountWith(t, w.mkdir(t, name), "dirty_expire=0")
	}
	for i, name := range names {
		writeDirty(t, filepath.Join(w.dir, name, name), data[i:])
	}
	w.umount(t, filepath.Join(w.dir, "forced"), control.UmountForce)
	w.wantOnServer(t, "forced", data)
	w.umount(t, filepath.Join(w.dir, "lazy"), control.UmountLazy)
	w.stop(t, w.daemon) // the log is complete
	w.wantOnServer(t, "lazy", data[1:])
	w.wantOnServer(t, "stopped", data[2:])
	if strings.Contains(w.log.String(), "lost") {
		t.Errorf("got log %s, want no lost data", w.log)
	}
}

// TestStopWritesMappedData checks that the data in a shared mapping is on the server after SIGTERM.
// The server is a separate process, because a page fault blocks the runtime of this one.
func TestStopWritesMappedData(t *testing.T) {
	w := newTestEnv(t)
	server := serve(t, filepath.Join(w.dir, "export"))
	dir := w.mkdir(t, "mnt")
	w.run(t, "mount", "127.0.0.1:/", dir, "-o", server.ports(t)).succeeds(t)
	data := kit.RandomBytes(3, 300_000)
	f := writeDirty(t, filepath.Join(dir, "file"), make([]byte, len(data)))
	p, err := syscall.Mmap(int(f.Fd()), 0, len(data), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	kit.Must(t, err)
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
	w.startDaemonWith(t, "--metrics-listen", "", "--shutdown-timeout", "1s")
	server := serve(t, filepath.Join(w.dir, "export"))
	dir := w.mkdir(t, "mnt")
	w.run(t, "mount", "127.0.0.1:/", dir, "-o", server.ports(t)+",dirty_expire=0").succeeds(t)
	f := writeDirty(t, filepath.Join(dir, "file"), kit.RandomBytes(4, 100_000))
	_, err := f.WriteAt([]byte("more"), 1<<20)
	kit.Must(t, err)
	var st syscall.Stat_t
	kit.Must(t, syscall.Stat(filepath.Join(w.dir, "export", "file"), &st))
	server.pause(t)
	_ = w.daemon.Process.Signal(syscall.SIGTERM)
	_ = w.daemon.Wait()
	if code := w.daemon.ProcessState.ExitCode(); code != control.ExitMount {
		t.Errorf("exit code of the daemon: got %d, want %d", code, control.ExitMount)
	}
	server.resume()
	for _, want := range []string{"written data lost", fmt.Sprintf("fileid=%d", st.Ino), "offset=0",
		fmt.Sprintf("end=%d", 1<<20+4), "bytes=100004", "dir=" + dir} {
		if !strings.Contains(w.log.String(), want) {
			t.Errorf("got log %s, want %q", w.log, want)
		}
	}
}

// TestForegroundMountReportsLostData ends two foreground mounts while the server does not answer:
// one by umount(8) --force, the other by SIGTERM. The second is then unmounted too, so that it need
// not wait for its shutdown timeout. Each process must fail, and say how much data it lost.
func TestForegroundMountReportsLostData(t *testing.T) {
	kit.NeedsFUSE(t)
	w := &testEnv{dir: t.TempDir()}
	server := serve(t, w.mkdir(t, "export"))
	kit.Must(t, os.WriteFile(filepath.Join(w.dir, "export", "hello"), nil, 0o644)) // see startForeground
	names := []string{"unmounted", "terminated"}
	cmds, logs := make([]*exec.Cmd, len(names)), make([]bytes.Buffer, len(names))
	for i, name := range names {
		dir := w.mkdir(t, name)
		cmds[i] = program(t, "nfsrdmad", "mount", "--foreground", "127.0.0.1:/", dir, "-o",
			server.ports(t)+",dirty_expire=0")
		cmds[i].Stderr = &logs[i]
		startForeground(t, cmds[i], dir)
	}
	for _, name := range names {
		writeDirty(t, filepath.Join(w.dir, name, name), make([]byte, 100_000))
	}
	server.pause(t)
	_ = cmds[1].Process.Signal(syscall.SIGTERM)
	for _, name := range names {
		_ = syscall.Unmount(filepath.Join(w.dir, name), syscall.MNT_FORCE|syscall.MNT_DETACH)
	}
	for i, name := range names {
		_ = cmds[i].Wait()
		if code := cmds[i].ProcessState.ExitCode(); code != control.ExitMount ||
			!strings.Contains(logs[i].String(), "100000 bytes of written data lost") {
			t.Errorf("%s: got exit code %d, log %s; want %d, the lost bytes", name, code, &logs[i], control.ExitMount)
		}
	}
}
