package fusefs

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// readWhole uses a descriptor as a program does that just opened a file: what it opened must stay usable.
func readWhole(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	buf := make([]byte, st.Size+1)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	return buf[:n], nil
}

// TestOpenRemoveRace opens a file while the same mount replaces it and removes it, in turns. An open succeeds, or finds no file when there may be
// none; what was opened is one of the versions, whole.
func TestOpenRemoveRace(t *testing.T) {
	const rounds, openers = 200, 3
	e := startExport(t)
	for _, c := range []struct {
		name   string
		remove bool // the name is missing at times
		opts   Options
	}{{"rename", false, Options{}}, {"unlink", true, Options{}}, {"rename, no attribute cache", false, Options{NoAC: true}}} {
		t.Run(c.name, func(t *testing.T) {
			m := e.mount(t, mountConfig{opts: c.opts})
			dir := subdir(t, m)
			path, tmp := filepath.Join(dir, "file"), filepath.Join(dir, "tmp")
			version := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i%26)}, 100) }
			must(t, os.WriteFile(path, version(0), 0o644))
			over := make(chan struct{})
			var opened, missing, keptOpen int
			var mu sync.Mutex
			var wg sync.WaitGroup
			for range openers {
				wg.Go(func() {
					for {
						select {
						case <-over:
							return
						default:
						}
						fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
						mu.Lock()
						if err == nil {
							opened++
						} else if err == syscall.ENOENT && c.remove {
							missing++
						} else {
							t.Errorf("open: %v", err)
						}
						mu.Unlock()
						if err != nil {
							continue
						}
						got, err := readWhole(fd)
						if err != nil || len(got) != 100 || !bytes.Equal(got, bytes.Repeat(got[:1], 100)) {
							t.Errorf("an open file became unusable: %q, %v", got, err)
						}
						_ = unix.Close(fd)
					}
				})
			}
			for i := range rounds {
				must(t, os.WriteFile(tmp, version(i), 0o644))
				if c.remove {
					must(t, os.Remove(path))
				}
				must(t, os.Rename(tmp, path))
			}
			close(over)
			wg.Wait()
			keptOpen = int(m.fs.Counters.SillyRenames.Load())
			t.Logf("%d opens, %d found no file, %d files hidden while open, %d found stale", opened, missing, keptOpen, m.fs.Counters.Stale.Load())
			if opened == 0 || keptOpen == 0 {
				t.Error("nothing raced: the test tests nothing")
			}
		})
	}
}
