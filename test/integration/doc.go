// Package integration tests whole mounts. Real programs work on /dev/fuse, through every layer of
// the client and over softiwarp. The servers are NFS-Ganesha behind the relay, and the embedded
// server.
//
//	process_test.go  starts each test in its own process, several at the same time
//	stack_test.go    helpers: a server and a mount in the test process
//	serve_*_test.go  tests of "nfsrdmad serve DIR" as a process, through its ports and through mounts;
//	                 serve_process_test.go has their helpers
//	storm_test.go    verified I/O while connections break
//	power_test.go    programs that write while servers lose their power or the client ends
//	differential_test.go, matrix_test.go
//	                 comparison with a local directory, and with recorded results of the kernel's
//	                 client; package test/differential executes the operations
//
// The tests need root, /dev/fuse and the Debian packages that `make deps` installs.
package integration
