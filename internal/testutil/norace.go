//go:build !race

package testutil

// Race reports whether the race detector is on. It supports some thousand goroutines only.
const Race = false
