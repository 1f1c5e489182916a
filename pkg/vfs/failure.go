package vfs

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

const (
	// failureFlushTimeout and failureStall bound the write of dirty data after a failure.
	failureFlushTimeout = 20 * time.Second
	failureStall        = 5 * time.Second
)

// errFailed ends a request of a failed FS. It is the value of a panic because a request must not
// take a lock: the request that failed may have left state that makes others wait.
var errFailed = errors.New("vfs: the file system has failed")

// Failure returns why the FS failed, and "" if it works. After a failure all requests return EIO.
func (fs *FS) Failure() string {
	if reason := fs.failure.Load(); reason != nil {
		return *reason
	}
	return ""
}

// checkFailed panics with errFailed after a failure. panicked returns EIO for this panic.
func (fs *FS) checkFailed() {
	if fs.failure.Load() != nil {
		panic(errFailed)
	}
}

// panicked is the panic handler of the connection. It runs on the goroutine of a request that panicked.
func (fs *FS) panicked(v any) fuse.Status {
	if v != errFailed {
		fs.fail(v)
	}
	return fuse.EIO
}

// spawn runs f on a goroutine that Close waits for. A panic of f fails the FS.
func (fs *FS) spawn(f func()) {
	fs.work.Go(func() {
		defer fs.recovered()
		f()
	})
}

// recovered ends a panic of a goroutine. Defer it.
func (fs *FS) recovered() {
	if v := recover(); v != nil {
		fs.fail(v)
	}
}

// fail reports a panic. The first failure ends the FS: later requests return EIO, and the data that
// the server accepts within failureFlushTimeout is written. Then all calls end.
func (fs *FS) fail(v any) {
	reason := fmt.Sprintf("panic: %v", v)
	fs.Counters.Panics.Add(1)
	if fs.opts.Failed != nil {
		fs.opts.Failed(reason, debug.Stack())
	}
	if !fs.failure.CompareAndSwap(nil, &reason) {
		return
	}
	fs.spawn(func() {
		defer fs.Abort()
		ctx, cancel := context.WithTimeout(context.Background(), failureFlushTimeout)
		defer cancel()
		fs.data.Flush(ctx, failureStall)
	})
}
