// Package integration proves whole mounts: programs that people use, on /dev/fuse, through every
// layer of the client, over softiwarp, to servers that are real: NFS-Ganesha behind the RDMA front,
// and the embedded server.
package integration
