package kernel

import (
	"hash/maphash"
	"sync/atomic"
)

// names keeps names of requests, so that a later request with the same name allocates no memory. It
// keeps at most nameSlots names, and is safe for concurrent use.
type names struct {
	seed  maphash.Seed
	slots [nameSlots]atomic.Pointer[string]
}

const nameSlots = 1 << 10

func newNames() *names { return &names{seed: maphash.MakeSeed()} }

// get returns b as a string.
func (n *names) get(b []byte) string {
	slot := &n.slots[maphash.Bytes(n.seed, b)%nameSlots]
	if s := slot.Load(); s != nil && *s == string(b) {
		return *s
	}
	s := string(b)
	slot.Store(&s)
	return s
}
