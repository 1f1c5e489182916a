package membuf

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func blocks(t *testing.T, fd int) int64 {
	t.Helper()
	var st unix.Stat_t
	kit.Must(t, unix.Fstat(fd, &st))
	return st.Blocks * 512
}

func TestCreateFixesSize(t *testing.T) {
	const size = 1 << 20
	fd, err := CreateFile("test", size, Sealed)
	kit.Must(t, err)
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != size {
		t.Errorf("size: got %d, %v, want %d", st.Size, err, size)
	}
	if name, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); name != "/memfd:test (deleted)" {
		t.Errorf("name: got %s, want memfd:test", name)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags of the descriptor: got %#x, %v, want FD_CLOEXEC", flags, err)
	}
	for _, n := range []int64{0, size + 1} {
		if err := unix.Ftruncate(fd, n); !errors.Is(err, unix.EPERM) {
			t.Errorf("ftruncate to %d bytes: got %v, want EPERM", n, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("add a seal: got %v, want EPERM", err)
	}
}

func TestAllocateGivesMemory(t *testing.T) {
	fd, err := CreateFile("test", 1<<20, Sealed)
	kit.Must(t, err)
	defer unix.Close(fd)
	if n := blocks(t, fd); n != 0 {
		t.Errorf("memory of a new file: got %d bytes, want 0", n)
	}
	if _, err := unix.Pwrite(fd, []byte("data"), 64<<10); err != nil {
		t.Fatal(err)
	}
	kit.Must(t, AllocateFile(fd, 64<<10, 128<<10))
	if n := blocks(t, fd); n != 128<<10 {
		t.Errorf("memory of the file: got %d bytes, want %d", n, 128<<10)
	}
	b := make([]byte, 4)
	if _, err := unix.Pread(fd, b, 64<<10); err != nil || string(b) != "data" {
		t.Errorf("content: got %q, %v, want data", b, err)
	}
	if err := AllocateFile(fd, 1<<20, 4096); !errors.Is(err, unix.EPERM) {
		t.Errorf("allocate behind the end: got %v, want EPERM", err)
	}
}

func TestCreateReportsFileSizeLimit(t *testing.T) {
	var old unix.Rlimit
	kit.Must(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 4096, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := CreateFile("test", 8192, Sealed)
	kit.Must(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &old))
	if !errors.Is(err, unix.EFBIG) {
		t.Errorf("Create above RLIMIT_FSIZE: got %v, want EFBIG", err)
	}
}
