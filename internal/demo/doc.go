// Package demo implements "nfsrdmad demo". The command runs the daemon and the embedded server in
// one process, on loopback, and mounts the server. It copies a source tree to the mount, reads the
// tree back through empty caches, and compares every byte.
//
// The demo leaves nothing behind. Everything is in one temporary directory and in one process. The
// demo removes it in reverse order, also after an error or an interrupt. The daemon's shutdown
// timeout bounds the removal. The demo deletes no directory that has a mount below it.
//
// A fixed number of workers copies files in parallel and counts progress with atomics. The screen
// has a lock, so that logs and progress do not mix.
package demo
