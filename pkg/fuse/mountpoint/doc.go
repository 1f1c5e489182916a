// Package mountpoint mounts and unmounts FUSE file systems of this program.
//
// No user can redirect a mount or an unmount by replacing a directory or a symbolic link in the path:
// the package uses descriptors, and compares device numbers. It reads /proc and asks the kernel, but it
// sends no request to a mounted file system, so that a server that does not answer blocks nothing but
// umount(2).
//
// # Files
//
//	point.go  the mount point as a descriptor, fsopen(2), mount(2)
//	mount.go  unmount, abort, and mount points that other programs detached
//	device.go device numbers, the mount table
//	poll.go   poll(2) of files of a mount that the program itself serves
package mountpoint
