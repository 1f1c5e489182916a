// Package daemon is the service: its configuration, its start and stop, its notifications to
// systemd, and a mount in the foreground.
//
//	config.go   the configuration file, its keys and their flags
//	daemon.go   the parts of a daemon, started and stopped
//	metrics.go  the metrics listener
//	scrapers.go its connections, shared by the users of this host and remote addresses
//	sockuser.go the user of a local TCP connection (sock_diag(7))
//	hosts.go    the host names that requests to it may use
//	run.go      the service life as systemd sees it; a mount in the foreground
//	keep.go     mounts that stay for the next daemon: the store, and the end without unmounting
//	job.go      the question to systemd whether a stop belongs to a restart
//	command.go  the mount command
//	pressure.go allocations that do not wait for write-back
//	runtime.go  the settings of the Go runtime
//
// A daemon joins a table of mounts (package mount), the control API (package control) and the
// metrics listener (package metrics).
//
// # Promises
//
// When [Run] returns, it has removed the control socket. It has also removed all mounts, and ended
// all its goroutines, unless the mounts stay for the next daemon. Stopping takes the shutdown
// timeout and a few seconds at most, and up to 10 s more when systemd does not answer.
package daemon
