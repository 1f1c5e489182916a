// Package programs runs real programs on a mount for minutes, with the checks of these programs:
// databases, git, a compiler, and programs that test file systems. The client and the embedded
// server are processes, as on a user's machine. The tests that matter most also run on NFS-Ganesha.
//
//	servers_test.go  the servers, and the mounts of them
//	one file for each kind of program
//
// `make test-programs` installs the programs and runs the tests. Otherwise no test of this package
// runs, because they take about an hour.
package programs
