package vfs

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/server/nfsserve"
)

// BenchmarkMount measures calls on a mount of this project's server, which is in the same process.
func BenchmarkMount(b *testing.B) {
	e := startExportOf(b, nfsserve.Config{NoRootSquash: true})
	must(b, os.WriteFile(e.dir+"/data", make([]byte, 64<<20), 0o644))
	m := e.mount(b, mountConfig{buffers: 128})
	benchmarkCalls(b, m)
}

func benchmarkCalls(b *testing.B, m *testMount) {
	b.Run("stat", func(b *testing.B) {
		var st unix.Stat_t
		for i := 0; b.Loop(); i++ { // the client has no reply for a new name
			_ = unix.Stat(m.path(strconv.Itoa(i)), &st)
		}
	})
	b.Run("create", func(b *testing.B) {
		for b.Loop() {
			fd, err := unix.Open(m.path("new"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
			must(b, err)
			must(b, unix.Close(fd))
			must(b, unix.Unlink(m.path("new")))
		}
	})
	open := func(b *testing.B, flags int) int {
		fd, err := unix.Open(m.path("data"), flags|unix.O_CLOEXEC, 0)
		must(b, err)
		b.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	for _, size := range []int{4 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("read-%dk", size>>10), func(b *testing.B) {
			fd := open(b, unix.O_RDONLY|unix.O_DIRECT)
			b.SetBytes(int64(size))
			buf := make([]byte, size)
			for i := 0; b.Loop(); i++ {
				_, err := unix.Pread(fd, buf, int64(i*7%64)<<20)
				must(b, err)
			}
		})
	}
	b.Run("read-4k-4", func(b *testing.B) {
		fd := open(b, unix.O_RDONLY|unix.O_DIRECT)
		b.SetParallelism(2) // times two processors
		b.RunParallel(func(pb *testing.PB) {
			buf := make([]byte, 4<<10)
			for i := 0; pb.Next(); i++ {
				if _, err := unix.Pread(fd, buf, int64(i*7%64)<<20); err != nil {
					b.Error(err)
				}
			}
		})
	})
	for _, size := range []int{4 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("write-%dk", size>>10), func(b *testing.B) {
			fd := open(b, unix.O_WRONLY)
			b.SetBytes(int64(size))
			buf := make([]byte, size)
			for i := 0; b.Loop(); i++ {
				_, err := unix.Pwrite(fd, buf, int64(i)*int64(size)%(64<<20))
				must(b, err)
			}
			must(b, unix.Fsync(fd))
		})
	}
}
