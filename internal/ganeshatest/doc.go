// Package ganeshatest runs NFS-Ganesha, an NFSv3 server that this project did not write, for the
// length of a test.
//
// [Start] exports a directory over TCP on 127.0.0.1, NFS and MOUNT on free ports. The server lives
// in a mount and a PID namespace of its own, with its own /run; the rpcbind that it must register
// with sits beside it in a network namespace of its own, so that nothing listens on port 111 of the
// host, several servers can run at once, and nothing stays behind: the namespace's first process
// ends, and takes the others with it, when the test ends or its process dies.
//
// It needs root, and from Debian the packages nfs-ganesha, nfs-ganesha-vfs and rpcbind. Where
// something is missing the test fails, it does not skip, so that a green run means what it says.
package ganeshatest
