package memreg

import (
	"crypto/rand"
	"encoding/binary"
	"slices"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// keyChoices is the number of least recently used keys among which a keyHistory chooses. All other
// 8-bit keys were used later. At least 256 - keyChoices registrations therefore lie between two
// uses of a key.
const keyChoices = 128

// maxRetired is the largest number of key histories of destroyed MRs that a pool keeps.
const maxRetired = 1024

// A keyHistory chooses the 8-bit keys of one STag index (S4). Each key is a random one of the
// keyChoices least recently used keys. A stale key therefore stays invalid for many registrations,
// and the peer cannot predict the next key. The kernel's client increments the key instead: its
// distance is 256 registrations, and the peer knows the next key.
type keyHistory struct {
	order   [256]uint8 // all keys, least recently used first
	current uint8      // of the MR: as allocated, or of the last registration
	random  [64]uint8
	unused  int // bytes of random that were not used
}

// newKeyHistory returns the history of an index whose keys were never used.
func newKeyHistory() *keyHistory {
	h := &keyHistory{}
	var r [2 * len(h.order)]byte
	rand.Read(r[:]) // never fails
	for i := range h.order {
		// 16 random bits select one of at most 256 places, so the bias is below 1 in 256.
		j := int(binary.NativeEndian.Uint16(r[2*i:])) % (i + 1)
		h.order[i], h.order[j] = h.order[j], uint8(i)
	}
	return h
}

// next chooses the key of the next registration. It differs from the current key, because a memory
// window needs another key for each bind.
func (h *keyHistory) next() uint8 {
	for {
		if h.unused == 0 {
			rand.Read(h.random[:]) // never fails
			h.unused = len(h.random)
		}
		h.unused--
		i := h.random[h.unused] % keyChoices
		if key := h.order[i]; key != h.current {
			copy(h.order[i:], h.order[i+1:])
			h.order[len(h.order)-1], h.current = key, key
			return key
		}
	}
}

// A retiredIndex is an index that no MR of the pool has. The device may give it to another MR.
type retiredIndex struct {
	index uint32
	keys  *keyHistory
}

// index returns the part of a key that the device chooses.
func index(key verbs.RKey) uint32 { return uint32(key.WithKey(0)) }

// keysOf returns the history of the index of vmr, which was just allocated.
func (p *Pool) keysOf(vmr verbs.MR) *keyHistory {
	p.mrs.Lock()
	defer p.mrs.Unlock()
	var h *keyHistory
	for i, r := range slices.Backward(p.mrs.retired) {
		if r.index == index(vmr.RKey()) {
			h, p.mrs.retired = r.keys, slices.Delete(p.mrs.retired, i, i+1)
			break
		}
	}
	if h == nil {
		h = newKeyHistory()
	}
	h.current = vmr.RKey().Key()
	return h
}

// retireKeys keeps the history of an MR whose index the device may use again. The pool forgets the
// oldest history if there are too many. Each of the MRs that were destroyed later was registered at
// least once, so the forgotten keys are old.
func (p *Pool) retireKeys(m *MR) {
	if m.keys == nil {
		return
	}
	p.mrs.Lock()
	defer p.mrs.Unlock()
	if len(p.mrs.retired) == maxRetired {
		p.mrs.retired = slices.Delete(p.mrs.retired, 0, 1)
	}
	p.mrs.retired = append(p.mrs.retired, retiredIndex{index(m.vmr.RKey()), m.keys})
	m.keys = nil
}
