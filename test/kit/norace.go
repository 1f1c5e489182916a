//go:build !race

package kit

// Race reports whether the race detector is on. It supports some thousand goroutines only.
const Race = false
