package svcrdma

import (
	"context"
	"net/netip"
	"testing"
)

// A client address that keeps all the message memory that it can get leaves memory to others.
func TestMessageMemoryIsShared(t *testing.T) {
	const buffers = 8
	m := newMemBudget(buffers)
	one, two := &conn{addr: netip.MustParseAddr("192.0.2.1")}, &conn{addr: netip.MustParseAddr("192.0.2.2")}
	for _, c := range [...]*conn{one, two} {
		m.join(c)
		defer m.leave(c)
	}
	expired, cancel := context.WithCancel(context.Background())
	cancel()
	took := 0
	for range buffers {
		if m.take(expired, one, 1) == nil {
			took++
		}
	}
	if took != buffers/2 {
		t.Errorf("buffers of one client: got %d, want %d", took, buffers/2)
	}
	if err := m.take(expired, two, 2); err != nil {
		t.Errorf("buffers of another client: got %v, want success", err)
	}
	m.give(one, took)
	m.give(two, 2)
}
