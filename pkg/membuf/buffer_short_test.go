package membuf

import (
	"testing"
	"time"
)

// TestBufferPoolShort has a pool whose buffers the system has no memory for, until it has.
func TestBufferPoolShort(t *testing.T) {
	p := NewPool(1<<48, 1)
	defer p.Close()
	if p.TryGet() != nil {
		t.Fatal("the system has memory without end")
	}
	got := make(chan []byte)
	go func() { got <- p.Get(nil) }()
	select {
	case <-got:
		t.Error("Get did not wait for memory")
	case <-time.After(3 * shortRetry):
	}
	p.mu.Lock()
	p.size = 4096
	p.mu.Unlock()
	select {
	case b := <-got:
		p.Put(b)
	case <-time.After(time.Minute):
		t.Error("Get waits for ever although there is memory now")
	}
}
