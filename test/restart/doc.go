// Package restart tests that mounts continue after the end of the daemon. The tests kill the
// daemon, stop it and start it again while programs work on a mount. The servers are the embedded
// server, as a process, and knfsd in a virtual machine of the lab.
//
//	restart_test.go    the tests
//	remoteports_test.go  a server with several addresses
//	knfsd_test.go      the tests with knfsd; only `make soak` runs them
//	rig_test.go        servers, daemons and mounts
//	released_test.go   checks that nothing is left of ended work
//	worker_test.go     processes that work on a mount
//	load_test.go       what the workers do with files
//	locks_test.go      what the workers do with locks
//
// A process that starts another process while it has files open on a mount without a daemon waits
// until the next daemon serves the mount: the new process closes its copies of the files before it
// executes its program. So a worker starts no process, and the test process, which starts the
// daemons, has no file open on the mount.
//
// The tests need root, /dev/fuse and the Debian packages that `make deps` installs.
package restart
