// Package data has the data that programs wrote and that is not known to be on stable storage of the
// server. It sends WRITE and COMMIT, and it bounds the age and the size of the data.
//
// # Files
//
//	store.go     Store, File, and the errors that open files report
//	write.go     extents, WRITE
//	commit.go    COMMIT, write verifiers, replay (RFC 1813 §3.3.7, §3.3.21, §4.8)
//	overlay.go   reads and sizes that include data that the server may have lost
//	dirty.go     bounds of the age and the size of written data
//	buffers.go   the shares of reads and written data in the buffer pool
//	reclaimer.go writes back files while requests wait for buffers
//	busy.go      files with which the server is busy
//	droppages.go the kernel's pages of rejected data, and of data written past them
//	loss.go      data that is discarded, and the write of all data
//	pieces.go    data of a READ or WRITE in several pieces
//
// # Promises
//
// Data is sent UNSTABLE and kept until a COMMIT returns the verifier of every WRITE. When the
// server restarts in between, the data is sent again in order. Reads, sizes and appends include the
// data that is not committed, so that programs do not see this loss.
//
// Data is made stable when it is Config.Expire old. When the server rejects data, the open files
// report the error, and the kernel drops the data from its pages.
//
// The buffer pool bounds the memory for data. Readers and writers share it. While requests wait for
// a buffer, other files are written back. The users whose requests wait have turns. A pool with a
// single buffer is slow but correct. Config.Limit and Config.Total bound the data that is not stable.
// A mount whose server does not answer holds no more than its own bound.
//
// # Locks
//
// File.mu guards the extents and errors of one file. Store.dirty guards the set of files, the waiting
// writers, and the counts of a file that say so. reclaimer.mu guards its fields, and is held while
// reclaim takes Store.dirty. Total.mu guards the bytes of several Stores. Lock File.mu before
// Store.dirty and attr.State, and Store.dirty before Total.mu. No lock is held during an RPC.
package data
