// Package daemon is the service: its configuration, its start and stop, its notifications to
// systemd, and a mount in the foreground.
//
//	config.go   the configuration file, its keys and their flags
//	daemon.go   the parts of a daemon, started and stopped
//	metrics.go  the metrics listener
//	run.go      the service life as systemd sees it; a mount in the foreground
//	command.go  the mount command
//	pressure.go allocations that do not wait for write-back
//	doctor.go   checks of this host
//
// A daemon joins a table of mounts (package mount), the control API (package control) and the
// metrics listener (package metrics).
//
// # Promises
//
// When [Run] returns, it has removed all mounts and the control socket, and all its goroutines have
// ended. Stopping takes the shutdown timeout and a few seconds at most.
package daemon
