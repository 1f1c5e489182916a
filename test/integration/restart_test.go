package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// TestServeRestart kills the server while programs have a file, a removed file and a directory
// open, and starts it again. All three continue to work, also when the path of the file changes
// while no server runs. TestPowerFailure restarts servers during I/O.
func TestServeRestart(t *testing.T) {
	if !mounts.InOwnProcess(t) {
		return
	}
	const listed = 1000
	served := mounts.OpenTempDir(t)
	want := make([]string, listed)
	kit.Must(t, os.Mkdir(filepath.Join(served, "list"), 0o777))
	for i := range want {
		want[i] = fmt.Sprintf("a-name-that-is-longer-%04d", i)
		kit.Must(t, os.WriteFile(filepath.Join(served, "list", want[i]), nil, 0o644))
	}
	s := mounts.ServeDir(t, served, "--no-root-squash")
	mnt := mounts.MountServed(t, s)
	kit.Must(t, os.Mkdir(filepath.Join(mnt, "dir"), 0o777))
	open := func(name string, flags int) *os.File {
		f, err := os.OpenFile(filepath.Join(mnt, name), flags, 0o644)
		kit.Must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	file, removed := open("dir/open", os.O_RDWR|os.O_CREATE), open("removed", os.O_RDWR|os.O_CREATE)
	dir := open("list", os.O_RDONLY)
	for _, f := range []*os.File{file, removed} {
		_, err := f.WriteString(f.Name())
		kit.Must(t, err)
	}
	kit.Must(t, os.Remove(removed.Name()))
	names, err := dir.Readdirnames(10)
	kit.Must(t, err)

	s.Restart(t, syscall.SIGKILL, func() {
		kit.Must(t, os.Rename(filepath.Join(served, "dir"), filepath.Join(served, "moved")))
	})

	for _, f := range []*os.File{file, removed} {
		got := make([]byte, len(f.Name()))
		if _, err := f.ReadAt(got, 0); err != nil || string(got) != f.Name() {
			t.Errorf("read of %s: got %q, %v", f.Name(), got, err)
		}
		if _, err := f.WriteAt([]byte("after"), 5000); err != nil {
			t.Errorf("write of %s: %v", f.Name(), err)
		}
		if err := f.Sync(); err != nil {
			t.Errorf("sync of %s: %v", f.Name(), err)
		}
	}
	rest, err := dir.Readdirnames(-1)
	kit.Must(t, err)
	names = append(names, rest...)
	if slices.Sort(names); !slices.Equal(names, want) {
		t.Errorf("open directory: got %d names, want each of %d once", len(names), listed)
	}
	st, err := os.Stat(filepath.Join(served, "moved", "open"))
	if err != nil || st.Size() != 5005 {
		t.Errorf("moved file on the server: got %+v, %v, want 5005 bytes", st, err)
	}
}
