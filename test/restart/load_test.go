package restart

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// pause is the pause after each round of a task. It leaves time for the other tasks and the daemon.
const pause = 2 * time.Millisecond

// A load runs tasks at the same time until the test ends it.
type load struct {
	dir    string // the mount
	served string // the same directory on the server
	stop   atomic.Bool
	tasks  sync.WaitGroup

	mu     sync.Mutex // guards the fields below
	rounds map[string]int
	sums   map[string]string
	errs   []error
}

// A task works until more returns false. It returns the first error.
type task func(*load, string, *rand.Rand) error

var tasks = map[string]task{
	"tree": (*load).tree, "append": (*load).appends, "mkdir": (*load).directories, "rename": (*load).renames,
	"unlinked": (*load).unlinked, "list": (*load).listing, "sync": (*load).syncs, "mmap": (*load).mapped,
	"flock": (*load).flocks, "probe": (*load).probe,
}

// startLoad starts tasks. Each works in a directory DIR/TASK of the mount.
func startLoad(seed uint64, mnt, served string, names []string) *load {
	l := &load{dir: mnt, served: served, rounds: make(map[string]int), sums: make(map[string]string)}
	for i, name := range names {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		l.tasks.Go(func() {
			dir := filepath.Join(mnt, name)
			err := os.MkdirAll(dir, 0o777)
			if err == nil {
				err = tasks[name](l, dir, rng)
			}
			if err != nil {
				l.fail(name, err)
			}
		})
	}
	return l
}

func (l *load) fail(name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, fmt.Errorf("%s at %s, round %d: %w", name, time.Now().Format("15:04:05.000"),
		l.rounds[name], err))
	l.stop.Store(true)
}

// minRounds is how often each task runs at least.
const minRounds = 3

// each returns the numbers of the rounds of a task, until the load ends.
func (l *load) each(name string) func(func(int) bool) {
	return func(round func(int) bool) {
		for k := 0; !l.stop.Load() || k < minRounds && l.error() == nil; k++ {
			if !round(k) {
				return
			}
			l.mu.Lock()
			l.rounds[name]++
			l.mu.Unlock()
			time.Sleep(pause)
		}
	}
}

// keep records the content that a file must have at the end.
func (l *load) keep(path string, data []byte) error {
	rel, err := filepath.Rel(l.dir, path)
	sum := sha256.Sum256(data)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sums[rel] = hex.EncodeToString(sum[:])
	return err
}

// error returns the errors of the tasks.
func (l *load) error() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := errors.Join(l.errs...); err != nil {
		return fmt.Errorf("errors: %w", err)
	}
	return nil
}

// total returns the number of rounds of all tasks.
func (l *load) total() (n int, err error) {
	err = l.error()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, rounds := range l.rounds {
		n += rounds
	}
	return n, err
}

// end ends the tasks. It returns the checksums of the files that remain, by path, in JSON.
func (l *load) end() (string, error) {
	l.stop.Store(true)
	l.tasks.Wait()
	if err := l.error(); err != nil {
		return "", err
	}
	b, err := json.Marshal(l.sums)
	return string(b), err
}

// tree makes a tree, and then copies the last tree in each round: write, rename, compare, remove.
func (l *load) tree(dir string, rng *rand.Rand) error {
	files := make(map[string][]byte)
	for i := range 12 {
		name := fmt.Sprintf("d%d/e%d/file%d", i%3, i%2, i)
		files[name] = kit.RandomBytes(rng.Uint64(), rng.IntN([]int{100, 20_000, 200_000}[i%3]))
	}
	old := ""
	for k := range l.each("tree") {
		root := filepath.Join(dir, fmt.Sprint("tree", k))
		for _, name := range slices.Sorted(maps.Keys(files)) {
			data := files[name]
			if old != "" {
				var err error
				if data, err = os.ReadFile(filepath.Join(old, name)); err != nil {
					return err
				}
			}
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(path+".tmp", data, 0o644); err != nil {
				return err
			}
			if err := os.Rename(path+".tmp", path); err != nil {
				return err
			}
		}
		for name, data := range files {
			if err := compare(filepath.Join(root, name), data); err != nil {
				return err
			}
		}
		if old != "" {
			if err := os.RemoveAll(old); err != nil {
				return err
			}
		}
		old = root
	}
	for name, data := range files {
		if err := l.keep(filepath.Join(old, name), data); err != nil {
			return err
		}
	}
	return nil
}

// appends lets three writers append to one file, each with its own open file. At the end each
// record is there once, and those of a writer are in their order.
func (l *load) appends(dir string, rng *rand.Rand) error {
	const writers = 3
	path := filepath.Join(dir, "file")
	errs := make([]error, writers)
	var counts [writers]int
	var group sync.WaitGroup
	for w := range writers {
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		group.Go(func() {
			counts[w], errs[w] = l.appender(path, w, rng)
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var next [writers]int
	for i, line := range strings.Split(strings.TrimSuffix(string(data), "\n"), "\n") {
		var w, k, n int
		if _, err := fmt.Sscanf(line, "%d %d %d ", &w, &k, &n); err != nil || w >= writers || k != next[w] ||
			len(line) != len(fmt.Sprintf("%d %d %d ", w, k, n))+n {
			return fmt.Errorf("line %d is %.40q, after %v records of the writers", i, line, next)
		}
		next[w]++
	}
	if next != counts {
		return fmt.Errorf("file has %v records, but %v were written", next, counts)
	}
	return l.keep(path, data)
}

func (l *load) appender(path string, w int, rng *rand.Rand) (count int, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for k := range l.each("append") {
		n := rng.IntN([]int{50, 6000}[rng.IntN(8)/7])
		line := fmt.Sprintf("%d %d %d %s\n", w, k, n, strings.Repeat(string(rune('a'+w)), n))
		if _, err := io.WriteString(f, line); err != nil {
			return count, err
		}
		count++
		if k%20 == 0 {
			if err := f.Sync(); err != nil {
				return count, err
			}
		}
	}
	return count, f.Close()
}

// directories calls the operations that fail when they are executed twice.
func (l *load) directories(dir string, _ *rand.Rand) error {
	d := filepath.Join(dir, "d")
	a, b := filepath.Join(d, "a"), filepath.Join(d, "b")
	for range l.each("mkdir") {
		for _, step := range []func() error{
			func() error { return os.Mkdir(d, 0o755) },
			func() error { return os.Symlink("target", a) },
			func() error { return os.Link(a, b) },
			func() error { return os.Remove(a) },
			func() error { return os.Rename(b, a) },
			func() error {
				if s, err := os.Readlink(a); err != nil || s != "target" {
					return fmt.Errorf("readlink: got %q, %w", s, err)
				}
				return nil
			},
			func() error { return os.Remove(a) },
			func() error { return unix.Mknod(b, unix.S_IFIFO|0o600, 0) },
			func() error { return os.Remove(b) },
			func() error { return os.Remove(d) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			return fmt.Errorf("directory has %v, %w", left, err)
		}
	}
	return nil
}

// renames replaces files that are open. Their data must stay readable and writable.
func (l *load) renames(dir string, rng *rand.Rand) error {
	path := filepath.Join(dir, "file")
	data := kit.RandomBytes(rng.Uint64(), 10_000)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		return err
	}
	for range l.each("rename") {
		if err := l.replace(path, data, rng); err != nil {
			return err
		}
		data = kit.RandomBytes(rng.Uint64(), 10_000)
		if err := os.WriteFile(path+".new", data, 0o644); err != nil {
			return err
		}
		if err := os.Rename(path+".new", path); err != nil {
			return err
		}
	}
	return l.keep(path, data)
}

// replace opens the file at path, which has data, and replaces its name by another file.
func (l *load) replace(path string, data []byte, rng *rand.Rand) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	data = bytes.Clone(data)
	copy(data[100:], kit.RandomBytes(rng.Uint64(), 5000))
	if _, err := f.WriteAt(data[100:5100], 100); err != nil {
		return err
	}
	other := kit.RandomBytes(rng.Uint64(), 300)
	if err := os.WriteFile(path+".new", other, 0o600); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	got := make([]byte, len(data))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
		return fmt.Errorf("replaced file: other data, %w", err)
	}
	if err := compare(path, other); err != nil {
		return err
	}
	return f.Close()
}

// unlinked writes to and reads from files without a name, which stay open for some rounds.
func (l *load) unlinked(dir string, rng *rand.Rand) error {
	const size = 100_000
	var f *os.File
	defer func() { f.Close() }()
	data := make([]byte, size)
	got := make([]byte, size)
	for k := range l.each("unlinked") {
		if k%50 == 0 {
			f.Close()
			path := filepath.Join(dir, fmt.Sprint("file", k))
			var err error
			if f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600); err != nil {
				return err
			}
			clear(data)
			if _, err := f.Write(data); err != nil {
				return err
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
		off, n := rng.IntN(size-5000), rng.IntN(5000)
		copy(data[off:], kit.RandomBytes(rng.Uint64(), n))
		if _, err := f.WriteAt(data[off:off+n], int64(off)); err != nil {
			return err
		}
		if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
			return fmt.Errorf("file without name: other data, %w", err)
		}
	}
	return nil
}

// listed is the number of files in the directory of listing.
const listed = 500

// listing lists a large directory in small parts.
func (l *load) listing(dir string, _ *rand.Rand) error {
	for i := range listed {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("a-name-that-is-a-little-longer-%d", i)))
		if err != nil {
			return err
		}
		if err := errors.Join(f.Close(), l.keep(f.Name(), nil)); err != nil {
			return err
		}
	}
	for range l.each("list") {
		d, err := os.Open(dir)
		if err != nil {
			return err
		}
		seen := make(map[string]int)
		for {
			part, err := d.Readdirnames(50) // the next READDIR is at a later part
			for _, name := range part {
				seen[name]++
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			time.Sleep(5 * time.Millisecond)
		}
		if err := d.Close(); err != nil {
			return err
		}
		for name, n := range seen {
			if n != 1 {
				return fmt.Errorf("directory has %s %d times", name, n)
			}
		}
		if len(seen) != listed {
			return fmt.Errorf("directory has %d names, want %d", len(seen), listed)
		}
	}
	return nil
}

// syncs compares the file on the server after each fsync.
func (l *load) syncs(dir string, rng *rand.Rand) error {
	const size = 300_000
	path := filepath.Join(dir, "file")
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	data := make([]byte, size)
	if _, err := f.Write(data); err != nil {
		return err
	}
	for range l.each("sync") {
		for range 1 + rng.IntN(5) {
			off, n := rng.IntN(size-20_000), rng.IntN(20_000)
			copy(data[off:], kit.RandomBytes(rng.Uint64(), n))
			if _, err := f.WriteAt(data[off:off+n], int64(off)); err != nil {
				return err
			}
		}
		if err := f.Sync(); err != nil {
			return err
		}
		if err := compareDirect(filepath.Join(l.served, "sync", "file"), data); err != nil {
			return fmt.Errorf("after fsync: %w", err)
		}
	}
	return errors.Join(f.Close(), l.keep(path, data))
}

// mapped writes to a shared mapping. A page fault that waits for the daemon stops the collection of
// garbage of the whole process, so this task has a worker for itself.
func (l *load) mapped(dir string, rng *rand.Rand) error {
	const size = 256 << 10
	path := filepath.Join(dir, "file")
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return err
	}
	data := make([]byte, size)
	for k := range l.each("mmap") {
		mem, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		for range 5 {
			off, n := rng.IntN(size-5000), rng.IntN(5000)
			copy(data[off:], kit.RandomBytes(rng.Uint64(), n))
			copy(mem[off:], data[off:off+n])
		}
		if k%2 == 0 {
			if _, _, e := unix.Syscall(unix.SYS_MSYNC, uintptr(unsafe.Pointer(&mem[0])), size, unix.MS_SYNC); e != 0 {
				return fmt.Errorf("msync: %w", e)
			}
			if err := compareDirect(filepath.Join(l.served, "mmap", "file"), data); err != nil {
				return fmt.Errorf("after msync: %w", err)
			}
		}
		if !bytes.Equal(mem, data) {
			return errors.New("mapping has other data")
		}
		if err := unix.Munmap(mem); err != nil {
			return err
		}
	}
	return errors.Join(f.Close(), compare(path, data), l.keep(path, data))
}
