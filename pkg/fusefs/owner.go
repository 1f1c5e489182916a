package fusefs

import "context"

// An Owner is whom an RPC is made for.
type Owner struct {
	// thread that made the call; 0 when it lives in another PID namespace, or is the kernel
	PID uint32
	UID uint32
	// WriteBack: nobody waits for it alone: dirty data goes to the server, or a name of an open
	// file that was removed. PID and UID are 0.
	WriteBack bool
}

// ownerKey asks the contexts of this package for themselves.
type ownerKey struct{}

// OwnerOf tells for whom the RPCs with the context ctx are made; ok is false for a context that
// comes from no file system. It is for those who look at a mount while it works: just when a call
// ends it may name the owner of the next one. Safe for concurrent use.
func OwnerOf(ctx context.Context) (o Owner, ok bool) {
	switch v := ctx.Value(ownerKey{}).(type) {
	case *request:
		both := v.owner.Load()
		return Owner{PID: uint32(both), UID: uint32(both >> 32)}, true
	case background:
		return Owner{WriteBack: true}, true
	}
	return Owner{}, false
}

// setOwner notes the caller of r where OwnerOf finds it: in one word, as r may be in use again
// while somebody looks.
func (r *request) setOwner(pid, uid uint32) { r.owner.Store(uint64(uid)<<32 | uint64(pid)) }

// Value is r itself for OwnerOf, nil for everybody else.
func (r *request) Value(key any) any {
	if key == (ownerKey{}) {
		return r
	}
	return nil
}

// Value is b itself for OwnerOf, nil for everybody else.
func (b background) Value(key any) any {
	if key == (ownerKey{}) {
		return b
	}
	return nil
}
