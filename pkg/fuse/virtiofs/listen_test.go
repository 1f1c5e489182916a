package virtiofs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listen(path)
	kit.Must(t, err)
	fi, err := os.Lstat(path)
	kit.Must(t, err)
	if got := fi.Mode(); got != os.ModeSocket|socketMode {
		t.Errorf("mode: got %v", got)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("listen on a live socket: got %v", err)
	}
	kit.Must(t, l.UnixListener.Close()) // as a process that was killed
	l, err = listen(path)
	kit.Must(t, err)
	kit.Must(t, os.Remove(path))
	kit.Must(t, os.WriteFile(path, []byte("other"), 0o600))
	kit.Must(t, l.Close())
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("file of another process: %v", err)
	}
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("listen on a file: got %v", err)
	}
	kit.Must(t, os.Remove(path))
	kit.Must(t, unix.Symlink("elsewhere", path))
	if _, err := listen(path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("listen on a symbolic link: got %v", err)
	}
	if _, err := listen("/" + strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), "longer") {
		t.Errorf("listen on a long path: got %v", err)
	}
}
