package vfs

import (
	"context"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

// An Owner is the process on whose behalf an RPC is made.
type Owner struct {
	// PID is the thread that made the system call. PID is 0 when the thread is in another PID
	// namespace or in a virtual machine, or belongs to the kernel.
	PID uint32
	UID uint32
	// WriteBack is true for background work: writing dirty data, removing the name of a removed
	// file, or revalidating the attributes of open files. PID and UID are then 0.
	WriteBack bool
}

// backgroundKey is the context key under which background returns itself.
type backgroundKey struct{}

// OwnerOf returns the owner of the RPCs that use ctx. ok is false for a context that does not come
// from this package. OwnerOf is for observers of a running mount and safe for concurrent use. At
// the moment when a call ends it may return the owner of the next call.
func OwnerOf(ctx context.Context) (o Owner, ok bool) {
	if _, ok := ctx.Value(backgroundKey{}).(background); ok {
		return Owner{WriteBack: true}, true
	}
	r := kernel.RequestOf(ctx)
	if r == nil {
		return Owner{}, false
	}
	o.PID, o.UID = r.Caller()
	return o, true
}

// Value returns b for OwnerOf and nil for other keys.
func (b background) Value(key any) any {
	if key == (backgroundKey{}) {
		return b
	}
	return nil
}
