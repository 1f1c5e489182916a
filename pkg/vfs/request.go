package vfs

import (
	"context"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
)

// A request is a kernel.Request, which is the context of its RPCs, and what the FS keeps with it.
type request struct {
	*kernel.Request
	begun  bool   // the FS counts and observes it
	pid    uint32 // as Caller
	cred   []byte
	state  *State        // nil if the mount is not kept
	kept   *requestState // nil if the request has no record
	target target        // of a READ
}

// begin counts a request, and finds the caller's credential.
func (fs *FS) begin(k *kernel.Request) *request {
	fs.checkFailed()
	fs.Counters.Ops[k.Op].Add(1)
	r, ok := k.FS.(*request)
	if !ok {
		r = &request{Request: k}
		k.FS = r
	}
	h := k.Header
	r.begun, r.pid, r.state = true, h.Pid, fs.state
	if !usesOpenCred(k.Op) {
		r.cred = fs.creds.of(h.Uid, h.Gid, h.Pid)
	}
	if k.Resent && fs.state != nil {
		fs.claim(r)
	}
	return r
}

// usesOpenCred reports whether the calls of a request use only the credential of the open file. The
// kernel's requests to write pages have no caller.
func usesOpenCred(op kernel.Op) bool {
	switch op {
	case kernel.OpRead, kernel.OpWrite, kernel.OpFlush, kernel.OpFsync, kernel.OpReadDir, kernel.OpReadDirPlus:
		return true
	}
	return false
}

// onNode is begin for a request that names a node. The error is ESTALE when the node is not in the
// inode table, and the error of an earlier process if that has ended the request.
func (fs *FS) onNode(k *kernel.Request) (*request, *inode, error) {
	r := fs.begin(k)
	ino := fs.inodes.get(k.Header.NodeId)
	if ino == nil {
		return r, nil, syscall.ESTALE
	}
	return r, ino, r.earlierError()
}

// end returns the status of r for the kernel.
func (fs *FS) end(r *request, err error) fuse.Status {
	status := toStatus(err)
	switch {
	case status != fuse.EINTR:
	case fs.isAborted():
		status = fuse.EIO // no signal arrived, and a retry would fail again
	case r.Err() == nil && nfs.IsBusy(err):
		status = fuse.Status(fs.opts.BusyErrno)
	}
	r.keepResult(status)
	if status != fuse.OK {
		fs.Counters.Errors[r.Op].Add(1)
	}
	return status
}

// Replied ends a request and its record: the kernel has the reply.
func (fs *FS) Replied(k *kernel.Request) {
	if r, ok := k.FS.(*request); ok && r.begun {
		if fs.opts.Observe != nil {
			fs.opts.Observe(k)
		}
		r.begun, r.cred, r.kept = false, nil, nil
		r.target.reset(fs)
	}
	fs.state.replied(k.Unique)
}

// Requests implements kernel.FileSystem.
func (fs *FS) Requests() *kernel.Requests { return &fs.requests }

// background is the context of work that serves no single request. background ends when the mount
// is aborted.
type background struct{ fs *FS }

func (background) Deadline() (time.Time, bool) { return time.Time{}, false }
func (b background) Done() <-chan struct{}     { return b.fs.aborted }
func (b background) Err() error {
	if b.fs.isAborted() {
		return context.Canceled
	}
	return nil
}
