package kit

import (
	"os"

	"golang.org/x/sys/unix"
)

// DropNames makes the kernel forget the names and files of the FUSE mount at dir that no process
// uses, as when memory is short. A remount has this effect. The file /proc/sys/vm/drop_caches has
// it on all mounts of the host, where other tests count what the kernel asks for again.
func DropNames(dir string) error {
	return os.NewSyscallError("remount", unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV, ""))
}
