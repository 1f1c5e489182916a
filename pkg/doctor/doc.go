// Package doctor finds out why a mount does not work. It checks this host, and tries each step of a
// mount of one source in the order of a mount, with the code of the mount. It also compares the
// connection with the published attacks on remote keys, and makes archives for support.
//
//	run.go      Run: order, dependencies and times of the steps
//	report.go   Report: the result
//	host.go     steps of this host
//	server.go   steps of a mount
//	scratch.go  the scratch file of the step read-write
//	keys.go     KeyReport: sample of remote keys, and its comparison with attacks
//	bundle.go   Bundle: the archive
//	redact.go   what the archive leaves out
//
// # Promises
//
// Run returns after MaxTimeouts of Config.Timeout and a few seconds. It makes no mount. It changes
// nothing on the server, except the scratch file that Config.Write permits, and the list of mounts
// of the server, from which it removes itself. It contacts the RDMA port only by a complete
// connection attempt, because one that only probes can stop the listener of a stock siw server.
//
// A [Report] contains no name of a file except that of a scratch file that stays, no file handle,
// no data and no remote key. Host names, addresses, mount points, and paths of exports are in it.
package doctor
