// Package integration tests whole mounts. Real programs work on /dev/fuse, through every layer of
// the client and over softiwarp. The servers are NFS-Ganesha behind the relay, and the embedded
// server. Each test starts itself in its own process, several at the same time.
//
//	stack_test.go    helpers: a server and a mount in the test process
//	mount_test.go    real programs on a mount
//	locks_*_test.go  locks between clients; lockprocess_test.go has the processes that lock
//	battery_test.go  scripts of file system calls, whose outcomes are those of a local directory;
//	                 script_test.go executes them
//	restart_test.go  restarts of "nfsrdmad serve DIR"
//	storm_test.go    verified I/O while connections break
//	power_test.go    programs that write while servers lose their power or the client ends
//	differential_test.go, matrix_test.go
//	                 comparison with a local directory, and with recorded results of the kernel's
//	                 client; package test/differential executes the operations
//
// The tests need root, /dev/fuse and the Debian packages that `make deps` installs.
package integration
