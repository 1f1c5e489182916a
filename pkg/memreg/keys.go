package memreg

import "crypto/rand"

// A keySequence yields the 8-bit keys of an MR (S4). It yields all 256 keys in an order that the
// peer cannot predict, and then all keys in another order. It never yields the same key twice in a
// row. A stale key therefore stays invalid for as long as 8 bits allow, and a guess succeeds only
// by chance.
type keySequence struct {
	order [256]uint8
	next  int
	last  uint8
}

func (s *keySequence) nextKey() uint8 {
	if s.next == len(s.order) {
		s.shuffle()
	}
	s.last = s.order[s.next]
	s.next++
	return s.last
}

func (s *keySequence) shuffle() {
	var r [2 * len(s.order)]byte
	rand.Read(r[:]) // never fails
	for i := range s.order {
		s.order[i] = uint8(i)
	}
	for i := len(s.order) - 1; i > 0; i-- {
		// 16 random bits select one of at most 256 keys, so the bias is below 1 in 256.
		j := (int(r[2*i])<<8 | int(r[2*i+1])) % (i + 1)
		s.order[i], s.order[j] = s.order[j], s.order[i]
	}
	if s.order[0] == s.last {
		n := 1 + int(r[0])%(len(s.order)-1)
		s.order[0], s.order[n] = s.order[n], s.order[0]
	}
	s.next = 0
}
