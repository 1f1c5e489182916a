// Package ganesha runs NFS-Ganesha, an NFSv3 server of another project, during a test.
//
// [Start] exports a directory over TCP on 127.0.0.1, with NFS and MOUNT on free ports. The server
// runs in a new mount namespace and a new PID namespace, with an empty /run. The server must
// register with rpcbind, which runs in a new network namespace. So several servers can run at the
// same time, and the host's port 111 stays free. The first process of the namespaces ends when the
// test ends or when the test process exits, and the kernel then kills the other processes.
//
// The package needs root and the Debian packages nfs-ganesha, nfs-ganesha-vfs and rpcbind. A test
// fails when one of them is missing; it does not skip.
package ganesha
