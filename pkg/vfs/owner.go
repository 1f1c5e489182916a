package vfs

import "context"

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

// ownerKey is the context key under which the contexts of this package return themselves.
type ownerKey struct{}

// OwnerOf returns the owner of the RPCs that use ctx. ok is false for a context that does not come
// from this package. OwnerOf is for observers of a running mount and safe for concurrent use. At
// the moment when a call ends it may return the owner of the next call.
func OwnerOf(ctx context.Context) (o Owner, ok bool) {
	switch v := ctx.Value(ownerKey{}).(type) {
	case *request:
		return v.caller(), true
	case background:
		return Owner{WriteBack: true}, true
	}
	return Owner{}, false
}

// setOwner stores the caller of r for OwnerOf. PID and UID share one word because r may be reused
// while OwnerOf reads it.
func (r *request) setOwner(pid, uid uint32) { r.owner.Store(uint64(uid)<<32 | uint64(pid)) }

func (r *request) caller() Owner {
	both := r.owner.Load()
	return Owner{PID: uint32(both), UID: uint32(both >> 32)}
}

// Value returns r for OwnerOf and nil for other keys.
func (r *request) Value(key any) any {
	if key == (ownerKey{}) {
		return r
	}
	return nil
}

// Value returns b for OwnerOf and nil for other keys.
func (b background) Value(key any) any {
	if key == (ownerKey{}) {
		return b
	}
	return nil
}
