package membuf

import (
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestPoolServesUsersInTurn lets calls wait for the one buffer of a pool. The first letter of a call
// is its user. A call that ends while it waits loses its place, and no call overtakes.
func TestPoolServesUsersInTurn(t *testing.T) {
	p := NewPool(4096, 1)
	defer p.Close()
	buf := p.TryGet()
	type result struct {
		name string
		b    []byte
	}
	got := make(chan result)
	ended := make(chan struct{})
	for i, name := range strings.Fields("a1 a2 a3 end b1 b2 a4") {
		done := make(chan struct{})
		if name == "end" {
			done = ended
		}
		go func() { got <- result{name, p.Get(done, uint32(name[0]))} }()
		kit.Eventually(t, name+" to wait", func() bool {
			p.state.Lock()
			defer p.state.Unlock()
			return p.state.waiting.Len() == i+1
		})
	}
	close(ended)
	if r := <-got; r.name != "end" || r.b != nil {
		t.Errorf("call that ends: got %s with %d bytes, want end without a buffer", r.name, len(r.b))
	}
	for _, want := range strings.Fields("a1 b1 a2 b2 a3 a4") {
		p.Put(buf)
		if p.TryGet() != nil {
			t.Fatalf("TryGet took the buffer of %s", want)
		}
		if r := <-got; r.name != want || r.b == nil {
			t.Fatalf("next call: got %s, want %s", r.name, want)
		}
	}
	p.Put(buf)
}
