package vfs

import (
	"context"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
)

// An Ended describes a request whose reply was written. Options.Ended receives it.
type Ended struct {
	Op     kernel.Op
	Owner  Owner
	Status fuse.Status // of the reply
	Calls  int         // RPCs made for the request
	Bytes  int         // file bytes that a READ returned or a WRITE accepted
	Times  ledger.Times
	Tag    any // of Options.Tag; nil for none
}

// AddCall adds an RPC with the context ctx, which has ended, to its request. It has no effect if
// ctx does not belong to a request. The goroutine that made the call must call AddCall before it
// returns to the file system.
func AddCall(ctx context.Context, rpc *ledger.Times) {
	if r := kernel.RequestOf(ctx); r != nil {
		r.AddCall(rpc)
	}
}

// TagOf returns the tag of the request that makes an RPC with the context ctx; nil if the request
// has none. ok is false if ctx does not belong to a request. Only the goroutine that makes the call
// may call TagOf.
func TagOf(ctx context.Context) (tag any, ok bool) {
	if r := kernel.RequestOf(ctx); r != nil {
		return r.Tag, true
	}
	return nil, false
}

// observe calls the observers of a request that has its reply.
func (fs *FS) observe(r *kernel.Request) {
	pid, uid := r.Caller()
	owner := Owner{PID: pid, UID: uid}
	if fs.opts.Observe != nil {
		fs.opts.Observe(Sample{Op: r.Op, Owner: owner, Bytes: r.Bytes,
			Duration: r.Times.Total() - r.Times.Spent(ledger.PhaseQueue) - r.Times.Spent(ledger.PhaseReply)})
	}
	if fs.opts.Ended != nil {
		fs.opts.Ended(Ended{Op: r.Op, Owner: owner, Status: r.Status, Calls: r.Calls, Bytes: r.Bytes, Times: r.Times,
			Tag: r.Tag})
	}
}
