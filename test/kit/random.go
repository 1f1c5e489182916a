package kit

import (
	"encoding/binary"
	"math/rand/v2"
)

// RandomBytes returns n bytes, the same for the same seed.
func RandomBytes(seed uint64, n int) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(key).Read(b) // never fails
	return b
}
