package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
	"github.com/nfsrdmad/nfsrdmad/test/kit/mounts"
)

// A load is work on a mount that goes on while the server restarts. Any error is a failure.
type load struct {
	stop atomic.Bool
	jobs []*job
	wg   sync.WaitGroup
}

type job struct {
	name  string
	steps atomic.Int64
	ended atomic.Bool
	err   error // after load.wait
}

// start runs step until stop, and then finish.
func (l *load) start(name string, step func(i int) error, finish func() error) {
	j := &job{name: name}
	l.jobs = append(l.jobs, j)
	l.wg.Go(func() {
		defer j.ended.Store(true)
		for i := 0; !l.stop.Load() && j.err == nil; i++ {
			j.err = step(i)
			j.steps.Add(1)
		}
		if j.err == nil {
			j.err = finish()
		}
	})
}

// progress waits until every job has made n more steps. It fails the test when a job ended.
func (l *load) progress(t *testing.T, n int64) {
	t.Helper()
	deadline := time.Now().Add(2 * mounts.ProcessTimeout)
	for _, j := range l.jobs {
		for want := j.steps.Load() + n; j.steps.Load() < want && !t.Failed(); time.Sleep(5 * time.Millisecond) {
			if j.ended.Load() {
				t.Errorf("%s ended", j.name)
			} else if time.Now().After(deadline) {
				t.Errorf("%s made no progress for %v", j.name, 2*mounts.ProcessTimeout)
			}
		}
		if t.Failed() {
			return
		}
	}
}

func (l *load) wait(t *testing.T) {
	t.Helper()
	l.stop.Store(true)
	l.wg.Wait()
	for _, j := range l.jobs {
		if j.err != nil {
			t.Errorf("%s, after %d steps: %v", j.name, j.steps.Load(), j.err)
		}
	}
}

// verified keeps a file and its shadow in step, with random reads and writes.
func (l *load) verified(name, path string, flags int, seed uint64) error {
	const size = 192 << 10
	rng := rand.New(rand.NewPCG(seed, 1))
	shadow, got := make([]byte, size), make([]byte, size)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|flags, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.Write(shadow); err != nil {
		return errors.Join(err, f.Close())
	}
	compare := func(off, n int) error {
		if _, err := f.ReadAt(got[:n], int64(off)); err != nil {
			return err
		}
		if !bytes.Equal(got[:n], shadow[off:off+n]) {
			return fmt.Errorf("%d bytes at offset %d differ from what was written", n, off)
		}
		return nil
	}
	l.start(name, func(i int) error {
		off := rng.IntN(size)
		n := 1 + rng.IntN(min(size-off, []int{100, 5000, size}[rng.IntN(3)]))
		switch i % 8 {
		case 0, 2, 4:
			for k := range n {
				shadow[off+k] = byte(rng.Uint32())
			}
			_, err := f.WriteAt(shadow[off:off+n], int64(off))
			return err
		case 7:
			return f.Sync()
		}
		return compare(off, n)
	}, func() error {
		return errors.Join(f.Sync(), compare(0, size), f.Close())
	})
	return nil
}

// renames makes, renames and removes names. A server that was killed between a change and its reply
// makes the same change fail the second time: NFSv3 has no protection against that across a
// restart.
func (l *load) renames(name, dir string) {
	ignore := func(err error, expected error) error {
		if errors.Is(err, expected) {
			return nil
		}
		return err
	}
	l.start(name, func(i int) error {
		d := filepath.Join(dir, fmt.Sprintf("%s.%d", name, i))
		if err := ignore(os.Mkdir(d, 0o755), os.ErrExist); err != nil {
			return err
		}
		a, b := filepath.Join(d, "a"), filepath.Join(d, "b")
		if err := os.WriteFile(a, []byte("content"), 0o644); err != nil {
			return err
		}
		err := os.Rename(a, b)
		if err := ignore(err, os.ErrNotExist); err != nil {
			return err
		}
		// After a rename that failed the second time, the kernel may still remember that b was not
		// there.
		if got, readErr := os.ReadFile(b); err == nil && (readErr != nil || string(got) != "content") {
			return fmt.Errorf("read of a renamed file: got %q, %w", got, readErr)
		}
		if err := ignore(os.Remove(b), os.ErrNotExist); err != nil {
			return err
		}
		return os.RemoveAll(d)
	}, func() error { return nil })
}

// listings reads a directory of makeEntries again and again, one small buffer at a time.
func (l *load) listings(name, dir string, n int) {
	l.start(name, func(int) error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		names := []string{".", ".."} // os.File does not return them
		for {
			part, err := f.Readdirnames(50)
			names = append(names, part...)
			switch {
			case err == io.EOF:
				return checkListing(names, n)
			case err != nil:
				return err
			}
			time.Sleep(time.Millisecond) // so that a restart happens within a listing
		}
	}, func() error { return nil })
}

// TestServeRestart kills the server under a mount with open files and running I/O, and starts it
// again, several times.
func TestServeRestart(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	for _, d := range []string{"list", "dir", "names"} {
		if err := os.Mkdir(filepath.Join(served, d), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	makeEntries(t, filepath.Join(served, "list"), 500)
	writeFiles(t, served, map[string]string{"dir/open": "open file", "cwd/x": "relative"})
	s := mounts.ServeDir(t, served, "--no-root-squash")
	mnt := mounts.MountServed(t, s)

	held := holdFiles(t, mnt)
	var l load
	for w := range 3 {
		for kind, flags := range map[string]int{"direct": syscall.O_DIRECT, "buffered": 0} {
			name := fmt.Sprintf("%s%d", kind, w)
			if err := l.verified(name, filepath.Join(mnt, name), flags, uint64(w)); err != nil {
				t.Fatal(err)
			}
		}
	}
	l.renames("renames", filepath.Join(mnt, "names"))
	l.listings("listings", filepath.Join(mnt, "list"), 500)
	for i := range 4 {
		l.progress(t, 5)
		if t.Failed() {
			break
		}
		sig := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[i%2]
		s.Restart(t, sig, func() {
			if i == 1 { // the path of an open file changes while no server runs
				if err := os.Rename(filepath.Join(served, "dir"), filepath.Join(served, "moved")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	l.progress(t, 5)
	l.wait(t)
	held(t)
	compareLoad(t, served, mnt)
}

// holdFiles opens a file, a file that it then removes, and a directory. The function that it
// returns checks that all three still work.
func holdFiles(t *testing.T, mnt string) (check func(t *testing.T)) {
	t.Helper()
	open := func(name string, flags int) *os.File {
		f, err := os.OpenFile(filepath.Join(mnt, name), flags, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	file, removed, dir := open("dir/open", os.O_RDWR), open("removed", os.O_RDWR|os.O_CREATE), open("list", os.O_RDONLY)
	if _, err := removed.WriteString("removed file"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(mnt, "removed")); err != nil {
		t.Fatal(err)
	}
	return func(t *testing.T) {
		t.Helper()
		for f, want := range map[*os.File]string{file: "open file", removed: "removed file"} {
			got := make([]byte, len(want))
			if _, err := f.ReadAt(got, 0); err != nil || string(got) != want {
				t.Errorf("read of %s after restarts: got %q, %v, want %q", f.Name(), got, err, want)
			}
			if _, err := f.WriteAt([]byte("after"), 100); err != nil {
				t.Errorf("write of %s after restarts: %v", f.Name(), err)
			}
			if err := f.Sync(); err != nil {
				t.Errorf("sync of %s after restarts: %v", f.Name(), err)
			}
		}
		if names, err := dir.Readdirnames(-1); err != nil || len(names) != 500 {
			t.Errorf("listing of an open directory after restarts: got %d names, %v, want 500", len(names), err)
		}
	}
}

// compareLoad compares what the workers left, on the mount and in the served directory.
func compareLoad(t *testing.T, served, mnt string) {
	t.Helper()
	for w := range 3 {
		for _, kind := range []string{"direct", "buffered"} {
			name := fmt.Sprintf("%s%d", kind, w)
			a, errA := os.ReadFile(filepath.Join(served, name))
			b, errB := os.ReadFile(filepath.Join(mnt, name))
			if errA != nil || errB != nil || !bytes.Equal(a, b) {
				t.Errorf("%s differs between the directory and the mount: %v, %v", name, errA, errB)
			}
		}
	}
}

// TestServeHandlesAfterRestart presents every kind of handle to a new server process.
func TestServeHandlesAfterRestart(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	served := mounts.OpenTempDir(t)
	runScript(t, served, "r mkdir d 0755; r put d/f x; r symlink t l; r mknod p fifo 0644; r mknod s sock 0644;"+
		"r mknod c chr 0600 1 3; r put old y")
	s := mounts.ServeDir(t, served, "--no-root-squash")
	before := mustDial(t, s)
	d := before.mustLookup("d")
	f, err := before.lookup(credential(0, 0), d, "f")
	if err != nil {
		t.Fatal(err)
	}
	old := map[string]nfs3.FH{}
	for _, name := range []string{"d", "l", "p", "s", "c", "old"} {
		old[name] = before.mustLookup(name)
	}
	s.Restart(t, syscall.SIGKILL, func() {
		// Names change, and an old inode number may be used again.
		runScript(t, served, "r rename d e; r link e/f hard; r unlink e/f; r unlink old; r put new z")
	})
	after := mustDial(t, s)
	if after.root != before.root {
		t.Error("the root handle changed")
	}
	for name, now := range map[string]string{"d": "e", "l": "l", "p": "p", "s": "s", "c": "c"} {
		if got := after.mustLookup(now); got != old[name] {
			t.Errorf("handle of %s: got %v after the restart, want %v", name, got, old[name])
		}
		var attr nfs3.Attr
		if err := after.GetAttr(after.ctx, credential(0, 0), old[name], &attr); err != nil {
			t.Errorf("GETATTR with the old handle of %s: %v", name, err)
		}
	}
	if got, err := after.read(credential(0, 0), old["old"]); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("read of a removed file by its old handle: got %q, %v, want ESTALE", got, err)
	}
	if got, err := after.read(credential(0, 0), f); err != nil || got != "x" {
		t.Errorf("read of a renamed file by its old handle: got %q, %v", got, err)
	}
	if got := after.mustLookup("hard"); got != f {
		t.Error("handle of a hard link differs from that of the file")
	}
}
