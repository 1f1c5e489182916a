package membuf_test

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/internal/selfcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

func TestAllocReturnsZeroedPages(t *testing.T) {
	page := os.Getpagesize()
	for _, n := range []int{1, page - 1, page, page + 1, 1<<20 + 3} {
		b, err := membuf.Alloc(n)
		kit.Must(t, err)
		if len(b) != n || cap(b)%page != 0 && cap(b) < n {
			t.Errorf("Alloc(%d): got length %d and capacity %d, want length %d in whole pages", n, len(b), cap(b), n)
		}
		for i := range b {
			if b[i] != 0 {
				t.Fatalf("Alloc(%d): byte %d: got %#x, want 0", n, i, b[i])
			}
		}
		b[0], b[n-1] = 1, 1
		membuf.Free(b)
	}
	for _, n := range []int{0, -1} {
		if _, err := membuf.Alloc(n); err == nil || !strings.Contains(err.Error(), "positive") {
			t.Errorf("Alloc(%d): got error %v, want an error that contains \"positive\"", n, err)
		}
	}
}

func TestFreePanicsOnForeignMemory(t *testing.T) {
	b, err := membuf.Alloc(3 * os.Getpagesize())
	kit.Must(t, err)
	defer membuf.Free(b)
	for name, wrong := range map[string][]byte{"the Go heap": make([]byte, 100),
		"the middle of a buffer": b[os.Getpagesize():]} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Free of %s: got no panic", name)
				}
			}()
			membuf.Free(wrong)
		}()
	}
}

func TestPoolLimitsBuffers(t *testing.T) {
	const size, most = 5000, 3
	p := membuf.NewPool(size, most)
	var out [][]byte
	for range most {
		b := p.Get(nil, 0)
		if len(b) != size {
			t.Fatalf("length of a buffer: got %d, want %d", len(b), size)
		}
		out = append(out, b)
	}
	if p.TryGet() != nil || p.Out() != most {
		t.Errorf("buffers in use: got %d, want %d and no further one", p.Out(), most)
	}
	done := make(chan struct{})
	close(done)
	if p.Get(done, 0) != nil {
		t.Error("Get with all buffers in use: got a buffer, want nil")
	}
	waiting := make(chan []byte)
	go func() { waiting <- p.Get(nil, 0) }()
	p.Put(out[0][:10]) // a reslice from the first byte on
	if b := <-waiting; &b[0] != &out[0][0] || len(b) != size {
		t.Errorf("waiting Get: got another buffer or %d bytes, want the buffer of Put with %d bytes", len(b), size)
	}

	// Close wakes a waiting Get, and Put frees the buffers that were in use.
	go func() { waiting <- p.Get(nil, 0) }()
	p.Close()
	p.Close()
	if b := <-waiting; b != nil {
		t.Error("waiting Get after Close: got a buffer, want nil")
	}
	if p.TryGet() != nil || p.Get(nil, 0) != nil {
		t.Error("Get of a closed pool: got a buffer, want nil")
	}
	before := selfcheck.Count(selfcheck.Buffer)
	for _, b := range out {
		p.Put(b)
	}
	if n := before - selfcheck.Count(selfcheck.Buffer); n != most || p.Out() != 0 {
		t.Errorf("after Close: %d buffers freed, %d in use; want %d and 0", n, p.Out(), most)
	}
}

func TestPoolGivesBufferToOneUserAtATime(t *testing.T) {
	const most = 4
	p := membuf.NewPool(64, most)
	var wg sync.WaitGroup
	var mu sync.Mutex
	held := make(map[*byte]bool)
	for range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 200 {
				b := p.Get(nil, 0)
				mu.Lock()
				if held[&b[0]] || len(held) >= most {
					t.Errorf("Get: got a buffer in use, or more than %d buffers are in use", most)
				}
				held[&b[0]] = true
				mu.Unlock()
				mu.Lock()
				delete(held, &b[0])
				mu.Unlock()
				p.Put(b)
			}
		}()
	}
	wg.Wait()
	p.Close()
}
