package bench

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Caches says how the caches of the kernel are emptied before a measurement.
type Caches struct {
	Data  string `json:"data"`  // data of files
	Names string `json:"names"` // names and attributes
}

const (
	withFadvise = "dropped with posix_fadvise(POSIX_FADV_DONTNEED)"
	withDrop    = "dropped with " + dropCaches
	notDropped  = "not dropped; run as root"

	dropCaches = "/proc/sys/vm/drop_caches"
	dropSlab   = "2" // names and inodes, see proc_sys_vm(5)
	// settle is the time for a user-space file system to learn which inodes the kernel dropped.
	settle = 20 * time.Millisecond
)

// usableCaches returns what this process may do. Any user may drop the data of a file. Only root
// may drop names, and only if /proc/sys is writable.
func usableCaches() Caches {
	c := Caches{Data: withFadvise, Names: notDropped}
	if unix.Access(dropCaches, unix.W_OK) == nil {
		c.Names = withDrop
	}
	return c
}

func (c *Caches) dropData(fd int) { _ = unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) }

func (c *Caches) dropNames() {
	if c.Names != withDrop {
		return
	}
	if err := os.WriteFile(dropCaches, []byte(dropSlab), 0); err != nil {
		c.Names = notDropped
		return
	}
	time.Sleep(settle)
}
