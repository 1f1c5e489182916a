package membuf_test

import (
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/internal/testutil"
	"github.com/nfsrdmad/nfsrdmad/pkg/membuf"
)

func TestMain(m *testing.M) { testutil.Main(m) }

func TestAllocBuffer(t *testing.T) {
	page := os.Getpagesize()
	for _, n := range []int{1, page - 1, page, page + 1, 1<<20 + 3} {
		b, err := membuf.Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) != n || cap(b)%page != 0 && cap(b) < n {
			t.Errorf("Alloc(%d): length %d, capacity %d", n, len(b), cap(b))
		}
		for i := range b {
			if b[i] != 0 {
				t.Fatalf("Alloc(%d): octet %d is not zero", n, i)
			}
		}
		b[0], b[n-1] = 1, 1
		membuf.Free(b)
	}
	for _, n := range []int{0, -1} {
		if _, err := membuf.Alloc(n); err == nil || !strings.Contains(err.Error(), "positive") {
			t.Errorf("Alloc(%d): %v", n, err)
		}
	}
}

// TestFreeBufferPanics: what Alloc did not return is not unmapped.
func TestFreeBufferPanics(t *testing.T) {
	b, err := membuf.Alloc(3 * os.Getpagesize())
	if err != nil {
		t.Fatal(err)
	}
	defer membuf.Free(b)
	for name, wrong := range map[string][]byte{"the Go heap": make([]byte, 100),
		"the middle of a buffer": b[os.Getpagesize():]} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was freed", name)
				}
			}()
			membuf.Free(wrong)
		}()
	}
}

func TestBufferPool(t *testing.T) {
	const size, most = 5000, 3
	p := membuf.NewPool(size, most)
	var out [][]byte
	for range most {
		b := p.Get(nil)
		if len(b) != size {
			t.Fatalf("a buffer of %d octets", len(b))
		}
		out = append(out, b)
	}
	if p.TryGet() != nil || p.Out() != most {
		t.Errorf("more than %d buffers, or %d are out", most, p.Out())
	}
	done := make(chan struct{})
	close(done)
	if p.Get(done) != nil {
		t.Error("Get gave a buffer although all are out")
	}
	waiting := make(chan []byte)
	go func() { waiting <- p.Get(nil) }()
	p.Put(out[0][:10]) // a reslice from the first octet on
	if b := <-waiting; &b[0] != &out[0][0] || len(b) != size {
		t.Error("the waiter got another buffer, or a short one")
	}

	// Close with buffers out and somebody waiting: the waiter is let go, the buffers are freed as
	// they come back.
	go func() { waiting <- p.Get(nil) }()
	time.Sleep(5 * time.Millisecond)
	p.Close()
	p.Close()
	select {
	case b := <-waiting:
		if b != nil {
			t.Error("a closed pool gave a buffer")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Get waits for a closed pool")
	}
	if p.TryGet() != nil || p.Get(nil) != nil {
		t.Error("a closed pool gave a buffer")
	}
	before := leakcheck.Count(leakcheck.Buffer)
	for _, b := range out {
		p.Put(b)
	}
	if n := before - leakcheck.Count(leakcheck.Buffer); n != most || p.Out() != 0 {
		t.Errorf("%d buffers freed after Close, %d out", n, p.Out())
	}
}

// TestBufferPoolConcurrently: never more than the maximum, and no buffer is given to two.
func TestBufferPoolConcurrently(t *testing.T) {
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
				b := p.Get(nil)
				mu.Lock()
				if held[&b[0]] || len(held) >= most {
					t.Error("a buffer was given out twice, or too many were")
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
