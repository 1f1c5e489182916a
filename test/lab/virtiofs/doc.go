// Package virtiofs tests "nfsrdmad virtiofs" with QEMU's vhost-user-fs device and a guest with
// Debian's kernel.
package virtiofs
