package membuf

import (
	"testing"
	"time"
)

// TestGetRetriesFailedAllocation uses a size that the system cannot allocate, and then a small one.
func TestGetRetriesFailedAllocation(t *testing.T) {
	p := NewPool(1<<48, 1)
	defer p.Close()
	if p.TryGet() != nil {
		t.Fatal("TryGet of 1<<48 bytes: got a buffer, want nil")
	}
	got := make(chan []byte)
	go func() { got <- p.Get(nil) }()
	select {
	case <-got:
		t.Error("Get returned while the system had no memory")
	case <-time.After(3 * allocRetry):
	}
	p.state.Lock()
	p.size = 4096
	p.state.Unlock()
	select {
	case b := <-got:
		p.Put(b)
	case <-time.After(time.Minute):
		t.Error("Get did not return although the system has memory")
	}
}
