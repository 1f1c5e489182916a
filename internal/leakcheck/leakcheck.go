// Package leakcheck counts the resources of this process that must be released:
// buffers, protection domains, memory regions, queue pairs and others. The test
// mains call [Report] and fail when anything is left.
package leakcheck

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

var live [numKinds]atomic.Int64

// Track counts a resource made (delta 1) or released (-1). Providers and pools call it; test mains
// fail when anything is left (Report). It is never called on a data path.
func Track(k Kind, delta int64) { live[k].Add(delta) }

// Count is the number of resources of kind k that exist in this process now.
func Count(k Kind) int64 { return live[k].Load() }

// Report names every kind of which something exists, or returns "".
func Report() string {
	var parts []string
	for k := range live {
		if n := live[k].Load(); n != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, kindNames[k]))
		}
	}
	return strings.Join(parts, ", ")
}
