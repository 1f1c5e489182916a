package selfcheck

import (
	"fmt"
	"strings"
	"sync/atomic"
)

// Kind is a kind of resource that must not leak.
type Kind uint8

// Kinds of tracked resources.
const (
	Buffer Kind = iota
	PD
	MR
	CQ
	QP
	ConnID
	Listener
	Slot
	numKinds
)

var kindNames = [numKinds]string{"buffer", "PD", "MR", "CQ", "QP", "connection", "listener", "slot"}

var counts [numKinds]atomic.Int64

// Track counts delta resources of kind k as created, or as released when delta is negative.
// Providers and pools call it, never on a data path. Track is safe for concurrent use.
func Track(k Kind, delta int64) { counts[k].Add(delta) }

// Count returns the number of resources of kind k that exist in this process.
func Count(k Kind) int64 { return counts[k].Load() }

// Leaks lists the number of resources of every kind that has any, or returns "" without resources.
func Leaks() string {
	var parts []string
	for k := range counts {
		if n := counts[k].Load(); n != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, kindNames[k]))
		}
	}
	return strings.Join(parts, ", ")
}
