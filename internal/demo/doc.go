// Package demo is "nfsrdmad demo": the daemon and the embedded server in one process, on loopback,
// with a real mount between them, through which a real tree is copied in, read back through a cold
// cache, and compared octet by octet.
//
// It promises to leave nothing behind: all that it makes lies in one temporary directory and one
// process, and is taken down in the reverse order also after an error or an interrupt. Clean-up is
// bounded by the daemon's shutdown timeout, and nothing is deleted while a mount still lies below
// it.
//
// There are no locks of its own but a semaphore for parallel copies; progress is counted by
// atomics.
package demo
