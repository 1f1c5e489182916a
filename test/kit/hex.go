package kit

import (
	"encoding/hex"
	"strings"
)

// Unhex decodes hexadecimal digits, with spaces anywhere. It panics if s is invalid.
func Unhex(s string) []byte {
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		panic(err)
	}
	return b
}
