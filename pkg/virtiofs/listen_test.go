package virtiofs

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listen(path)
	must(t, err)
	fi, err := os.Lstat(path)
	must(t, err)
	if got := fi.Mode(); got != os.ModeSocket|socketMode {
		t.Errorf("mode: got %v", got)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("listen on a live socket: got %v", err)
	}
	must(t, l.UnixListener.Close()) // as a process that was killed
	l, err = listen(path)
	must(t, err)
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, []byte("other"), 0o600))
	must(t, l.Close())
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("file of another process: %v", err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("listen on a file: got %v", err)
	}
	must(t, os.Remove(path))
	must(t, unix.Symlink("elsewhere", path))
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("listen on a symbolic link: got %v", err)
	}
	if _, err := listen("/" + strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), "longer") {
		t.Errorf("listen on a long path: got %v", err)
	}
}

// TestStopListeningAfterEnd ends a Server, and calls its methods again.
func TestStopListeningAfterEnd(t *testing.T) {
	d := newDevice(t)
	var calls sync.WaitGroup
	for range 8 {
		calls.Go(func() {
			if err := d.server.StopListening(); err != nil {
				t.Errorf("concurrent StopListening: %v", err)
			}
		})
	}
	calls.Wait()
	d.server.Wait()
	if err := d.server.StopListening(); err != nil {
		t.Errorf("StopListening after the end: %v", err)
	}
	if err := d.server.Close(); err != nil {
		t.Errorf("Close after the end: %v", err)
	}
}
