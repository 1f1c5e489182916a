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
	if r, ok := ctx.Value(ownerKey{}).(*request); ok {
		r.calls++
		r.times.Add(rpc)
	}
}

// TagOf returns the tag of the request that makes an RPC with the context ctx; nil if the request
// has none. ok is false if ctx does not belong to a request. Only the goroutine that makes the call
// may call TagOf.
func TagOf(ctx context.Context) (tag any, ok bool) {
	if r, ok := ctx.Value(ownerKey{}).(*request); ok {
		return r.tag, true
	}
	return nil, false
}

// reportEnded calls Options.Ended for a request that has its reply.
func (fs *FS) reportEnded(unique uint64, received ledger.Time) {
	if fs.opts.Ended == nil {
		return
	}
	if e, ok := fs.interrupts.takeEnded(unique); ok {
		e.Times.Received(received)
		e.Times.Mark(ledger.PhaseReply, ledger.Now())
		fs.opts.Ended(e)
	}
}
