package membuf

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// childEnv makes the test binary run useLockedMemory.
const childEnv = "NFSRDMAD_MEMBUF_TEST_CHILD"

const fileSizeTest = 8192

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := useLockedMemory(); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	kit.Main(m)
}

func newPool(t *testing.T, size, limit int) *Pool {
	t.Helper()
	p, err := NewFilePool("test", size, limit)
	kit.Must(t, err)
	return p
}

// memoryOf returns the bytes of memory that a file has.
func memoryOf(t testing.TB, f *os.File) int64 {
	t.Helper()
	info, err := f.Stat()
	kit.Must(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

func TestFilePoolUsesMemoryOfFile(t *testing.T) {
	before := selfcheck.Count(selfcheck.Buffer)
	p := newPool(t, fileSizeTest, 3)
	if n := memoryOf(t, p.File()); n != 0 {
		t.Errorf("memory of a new file: got %d bytes, want 0", n)
	}
	var all [][]byte
	for i := range 3 {
		b := p.TryGet()
		if len(b) != fileSizeTest || cap(b) != fileSizeTest {
			t.Fatalf("buffer: got length %d and capacity %d, want %d", len(b), cap(b), fileSizeTest)
		}
		if n := memoryOf(t, p.File()); n != int64(i+1)*fileSizeTest {
			t.Errorf("memory of the file with %d buffers: got %d bytes", i+1, n)
		}
		if a := ArenaOf(b); a == nil || &a.Bytes()[0] != &b[0] || len(a.Bytes()) != fileSizeTest {
			t.Errorf("arena of buffer %d: got %v, want the whole buffer", i, a)
		}
		if got, ok := p.Index(b[:10]); got != i || !ok {
			t.Errorf("Index of buffer %d: got %d, %v", i, got, ok)
		}
		copy(b, fmt.Sprintf("data %d", i))
		all = append(all, b)
	}
	if p.TryGet() != nil || p.Out() != 3 {
		t.Errorf("buffers in use: got %d, want 3 and no further one", p.Out())
	}
	for i := range all {
		got := make([]byte, 6)
		_, err := p.File().ReadAt(got, int64(i)*fileSizeTest)
		kit.Must(t, err)
		if want := fmt.Sprintf("data %d", i); string(got) != want {
			t.Errorf("file at buffer %d: got %q, want %q", i, got, want)
		}
	}
	p.Put(all[1][:1])
	if b := p.Get(nil, 0); &b[0] != &all[1][0] || len(b) != fileSizeTest {
		t.Error("Get after Put: got another buffer")
	}
	if n := selfcheck.Count(selfcheck.Buffer) - before; n != 3 {
		t.Errorf("counted buffers: got %d, want 3", n)
	}
	a := ArenaOf(all[0])
	x := &attachment{}
	_, err := a.Attached("owner", func() (Attachment, error) { return x, nil })
	kit.Must(t, err)
	p.Put(all[2])
	p.Close()
	p.Put(all[0])
	if x.detached != 1 || p.file.mem == nil {
		t.Errorf("Put after Close: got %d calls of Detach and mapping %v, want 1 call and a mapping",
			x.detached, p.file.mem != nil)
	}
	p.Put(all[1])
	p.Close()
	if p.file.mem != nil || selfcheck.Count(selfcheck.Buffer) != before {
		t.Error("after the last Put: the file is mapped, or buffers are counted")
	}
	if p.TryGet() != nil {
		t.Error("TryGet after Close: got a buffer, want nil")
	}
}

func TestIndexOfOtherMemory(t *testing.T) {
	p := newPool(t, fileSizeTest, 2)
	defer p.Close()
	b := p.TryGet()
	defer p.Put(b)
	other, err := Alloc(fileSizeTest)
	kit.Must(t, err)
	defer Free(other)
	for name, wrong := range map[string][]byte{"nil": nil, "the Go heap": make([]byte, 10), "Alloc": other,
		"the middle of a buffer": b[4096:], "the second byte": b[1:], "empty end": b[len(b):]} {
		if i, ok := p.Index(wrong); ok {
			t.Errorf("Index of %s: got %d, want none", name, i)
		}
	}
	plain := NewPool(fileSizeTest, 1)
	defer plain.Close()
	if plain.File() != nil {
		t.Error("File of a pool without file: got one, want nil")
	}
	if _, ok := plain.Index(b); ok {
		t.Error("Index of a pool without file: got a number")
	}
	if _, err := plain.Take(0); err == nil {
		t.Error("Take of a pool without file: got no error")
	}
}

func TestTakeReturnsEarlierContent(t *testing.T) {
	first := newPool(t, fileSizeTest, 4)
	kept, err := unix.FcntlInt(first.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	kit.Must(t, err)
	f := os.NewFile(uintptr(kept), "kept")
	defer f.Close()
	b0, b1 := first.TryGet(), first.TryGet()
	copy(b0, "zero")
	copy(b1, "one")
	first.Put(b0)
	first.Put(b1)
	first.Close()

	p, err := OpenFilePool(f, fileSizeTest, 4)
	kit.Must(t, err)
	taken, err := p.Take(1)
	kit.Must(t, err)
	if string(taken[:3]) != "one" || len(taken) != fileSizeTest || cap(taken) != fileSizeTest || ArenaOf(taken) == nil {
		t.Errorf("buffer 1: got %q, want one in an arena", taken[:3])
	}
	hole, err := p.Take(3)
	kit.Must(t, err)
	if !bytes.Equal(hole, make([]byte, fileSizeTest)) || memoryOf(t, f) != 3*fileSizeTest {
		t.Error("buffer 3, which was not used: got data or no memory, want zeros")
	}
	for _, i := range []int{1, -1, 4, math.MaxInt} {
		if _, err := p.Take(i); err == nil {
			t.Errorf("Take(%d): got no error", i)
		}
	}
	if p.Out() != 2 {
		t.Errorf("buffers in use: got %d, want 2", p.Out())
	}
	var got []int
	for range 2 {
		b := p.TryGet()
		i, _ := p.Index(b)
		got = append(got, i)
		defer p.Put(b)
	}
	if got[0] != 0 || got[1] != 2 || p.TryGet() != nil {
		t.Errorf("buffers that are not taken: got %v, want 0 and 2", got)
	}
	if _, err := p.Take(0); err == nil || !strings.Contains(err.Error(), "pool is already in use") {
		t.Errorf("Take after Get: got error %v", err)
	}
	p.Put(taken)
	p.Put(hole)
	p.Close()
	if _, err := p.Take(0); err == nil {
		t.Error("Take after Close: got no error")
	}
}

func TestFilePoolSizes(t *testing.T) {
	for _, c := range []struct{ size, limit int }{{0, 1}, {-4096, 1}, {4095, 1}, {4096, 0}, {4096, -1},
		{4096, math.MaxInt / 4095}, {1 << 62, 1}} {
		if p, err := NewFilePool("test", c.size, c.limit); err == nil {
			p.Close()
			t.Errorf("NewFilePool of %d buffers of %d bytes: got no error", c.limit, c.size)
		}
	}
}

func TestOpenFilePoolRefusesOtherFiles(t *testing.T) {
	const size = 2 * fileSizeTest
	made := func(size int64, seals int) *os.File {
		fd, err := CreateFile("test", size, seals)
		kit.Must(t, err)
		return os.NewFile(uintptr(fd), "test")
	}
	regular, err := os.Create(t.TempDir() + "/file")
	kit.Must(t, err)
	kit.Must(t, regular.Truncate(size))
	good := made(size, Sealed)
	readOnly, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", good.Fd()))
	kit.Must(t, err)
	closed := made(size, Sealed)
	closed.Close()
	null, err := os.Open(os.DevNull)
	kit.Must(t, err)
	cases := []struct {
		name string
		file *os.File
		want string
	}{
		{"regular file", regular, ""},
		{"device", null, "not a shared memory file"},
		{"may shrink", made(size, Sealed&^unix.F_SEAL_SHRINK), "seals"},
		{"may grow", made(size, Sealed&^unix.F_SEAL_GROW), "seals"},
		{"may be sealed", made(size, Sealed&^unix.F_SEAL_SEAL), "seals"},
		{"not writable", made(size, Sealed|unix.F_SEAL_WRITE), "seals"},
		{"not writable later", made(size, Sealed|unix.F_SEAL_FUTURE_WRITE), "seals"},
		{"shorter", made(size-4096, Sealed), "size of the file is 12288 bytes, want 16384"},
		{"longer", made(size+4096, Sealed), "size of the file"},
		{"read only", readOnly, "mmap: permission denied"},
		{"closed", closed, "closed"},
	}
	for _, c := range cases {
		defer c.file.Close()
		p, err := OpenFilePool(c.file, fileSizeTest, 2)
		if err == nil {
			p.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want one that contains %q", c.name, err, c.want)
		}
	}
	p, err := OpenFilePool(good, fileSizeTest, 2)
	kit.Must(t, err)
	kit.Must(t, good.Close()) // the pool has its own descriptor
	p.Put(p.Get(nil, 0))
	p.Close()
	if _, err := OpenFilePool(readOnly, 4095, 2); err == nil {
		t.Error("size that is no multiple of the page size: got no error")
	}
}

// TestGetWaitsForMemory makes fallocate(2) fail: the descriptor is read only. Get retries until it
// has memory.
func TestGetWaitsForMemory(t *testing.T) {
	p := newPool(t, fileSizeTest, 1)
	readOnly, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", p.File().Fd()))
	kit.Must(t, err)
	defer readOnly.Close()
	good := p.file.file
	p.file.file = readOnly
	if p.TryGet() != nil || p.Out() != 0 {
		t.Fatal("TryGet without memory: got a buffer, want nil")
	}
	got := make(chan []byte, 1)
	go func() { got <- p.Get(nil, 0) }()
	time.Sleep(2 * allocRetry) // a Get that does not retry returns now
	if len(got) > 0 {
		t.Error("Get returned without memory")
	}
	p.state.Lock()
	p.file.file = good
	p.state.Unlock()
	p.Put(<-got)
	p.Close()
}

// useLockedMemory maps a file larger than a small host's memory with locked memory.
func useLockedMemory() error {
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		return err
	}
	const size, limit = 1 << 20, 1 << 10
	p, err := NewFilePool("locked", size, limit)
	if err != nil {
		return err
	}
	b := p.Get(nil, 0)
	clear(b)
	var st unix.Stat_t
	if err := unix.Fstat(int(p.File().Fd()), &st); err != nil {
		return err
	}
	if st.Blocks*512 != size {
		return fmt.Errorf("memory of the file with one buffer: got %d bytes, want %d", st.Blocks*512, size)
	}
	status, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	_, mapping, _ := strings.Cut(string(status), "memfd:locked")
	mapping, _, _ = strings.Cut(mapping, "VmFlags:")
	if !strings.Contains(mapping, "Locked:             1024 kB") {
		return fmt.Errorf("locked memory: got %s, want 1024 kB", mapping)
	}
	p.Put(b)
	p.Close()
	return nil
}

// TestFilePoolWithLockedMemory checks that mlockall(2), which the daemon calls, locks the buffers
// in use and gives no memory to the others.
func TestFilePoolWithLockedMemory(t *testing.T) {
	kit.NeedsRoot(t)
	c := exec.Command("/proc/self/exe")
	c.Env, c.Stderr = append(os.Environ(), childEnv+"=1"), os.Stderr
	kit.Must(t, c.Run())
}
