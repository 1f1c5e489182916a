package fusefs

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestReadNothing reads at the end of a file, where the kernel asks although there is nothing, with a single buffer: each read gives it back.
func TestReadNothing(t *testing.T) {
	m := startExport(t).mount(t, mountConfig{buffers: 1})
	for name, flags := range map[string]int{"direct": unix.O_DIRECT, "append": unix.O_APPEND} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Open(m.path(name), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|flags, 0o644)
			must(t, err)
			defer unix.Close(fd)
			for range 3 {
				n, err := unix.Pread(fd, make([]byte, 4096), 0)
				if n != 0 || err != nil {
					t.Fatalf("%d octets, %v", n, err)
				}
				if out := m.fs.buffers.Out(); out != 0 {
					t.Fatalf("%d buffers are out", out)
				}
			}
		})
	}
}
