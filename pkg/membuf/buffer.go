package membuf

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
)

// Alloc returns n bytes of zeroed anonymous memory outside the Go heap. The mapping is rounded up
// to whole pages; the slice has length n. Release it with Free.
func Alloc(n int) ([]byte, error) {
	if n <= 0 {
		return nil, fmt.Errorf("membuf: allocate buffer of %d bytes: size must be positive", n)
	}
	page := os.Getpagesize()
	size := (n + page - 1) &^ (page - 1)
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("membuf: allocate buffer of %d bytes: %w", size, err)
	}
	track(b)
	return b[:n], nil
}

// track makes an arena of a buffer, and counts it.
func track(b []byte) {
	addArena(b)
	selfcheck.Track(selfcheck.Buffer, 1)
}

// untrack reverses track.
func untrack(b []byte) {
	dropArena(b)
	selfcheck.Track(selfcheck.Buffer, -1)
}

// Free detaches every Attachment and returns the memory to the system. b must be a slice that Alloc
// returned, and no request or registration may use it. Free panics when Alloc did not return b,
// because unmapping other memory corrupts the process.
func Free(b []byte) {
	page := os.Getpagesize()
	size := (cap(b) + page - 1) &^ (page - 1)
	dropArena(b)
	if err := unix.Munmap(b[:size:size]); err != nil {
		panic(fmt.Sprintf("membuf: free buffer of %d bytes: %v", size, err))
	}
	selfcheck.Track(selfcheck.Buffer, -1)
}
