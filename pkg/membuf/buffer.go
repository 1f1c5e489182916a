package membuf

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
)

// Alloc returns n bytes of zeroed anonymous memory outside the Go heap. The mapping is rounded up
// to whole pages; the slice has length n. Release it with Free.
func Alloc(n int) ([]byte, error) {
	if n <= 0 {
		return nil, fmt.Errorf("membuf: allocate buffer of %d bytes: size must be positive", n)
	}
	page := os.Getpagesize()
	size := (n + page - 1) &^ (page - 1)
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("membuf: allocate buffer of %d bytes: %w", size, err)
	}
	addArena(b)
	leakcheck.Track(leakcheck.Buffer, 1)
	return b[:n], nil
}

// Free detaches every Attachment and returns the memory to the system. b must be a slice that Alloc
// returned, and no request or registration may use it. Free panics when Alloc did not return b,
// because unmapping other memory corrupts the process.
func Free(b []byte) {
	page := os.Getpagesize()
	size := (cap(b) + page - 1) &^ (page - 1)
	dropArena(b)
	if err := unix.Munmap(b[:size:size]); err != nil {
		panic(fmt.Sprintf("membuf: free buffer of %d bytes: %v", size, err))
	}
	leakcheck.Track(leakcheck.Buffer, -1)
}

// A Pool hands out buffers of equal size up to a hard maximum. Get waits while all buffers are in
// use. A Pool is safe for concurrent use.
type Pool struct {
	size  int
	free  chan []byte
	limit int
	ended chan struct{} // closed by Close

	state struct {
		sync.Mutex
		allocated int // buffers in the pool or in use
		closed    bool
	}
}

// NewPool makes a pool of at most limit buffers of size bytes each. The pool allocates a buffer
// when it is first needed.
func NewPool(size, limit int) *Pool {
	return &Pool{size: size, limit: limit, free: make(chan []byte, limit), ended: make(chan struct{})}
}

// Size returns the length of each buffer in bytes.
func (p *Pool) Size() int { return p.size }

// Limit returns the maximum number of buffers.
func (p *Pool) Limit() int { return p.limit }

// allocRetry is how long Get waits before it tries a failed allocation again.
const allocRetry = 50 * time.Millisecond

// TryGet returns a buffer, or nil when all buffers are in use, the system has no memory, or the
// pool is closed.
func (p *Pool) TryGet() []byte {
	b, _ := p.tryGet()
	return b
}

// tryGet also reports whether the system had no memory for a new buffer.
func (p *Pool) tryGet() (b []byte, noMemory bool) {
	select {
	case b := <-p.free:
		return b, false
	default:
	}
	p.state.Lock()
	defer p.state.Unlock()
	if p.state.closed || p.state.allocated >= p.limit {
		return nil, false
	}
	b, err := Alloc(p.size)
	if err != nil {
		return nil, true
	}
	p.state.allocated++
	return b, false
}

// Get returns a buffer. Get waits while all buffers are in use or the system has no memory. Get
// returns nil when done or the pool is closed.
func (p *Pool) Get(done <-chan struct{}) []byte {
	for {
		b, noMemory := p.tryGet()
		if b != nil {
			return b
		}
		var retry <-chan time.Time
		if noMemory { // perhaps no buffer is in use, so that no Put follows
			retry = time.After(allocRetry)
		}
		select {
		case b := <-p.free:
			return b
		case <-retry:
		case <-done:
			return nil
		case <-p.ended:
			return nil
		}
	}
}

// Put returns a buffer of Get or TryGet to the pool. b may be any reslice that starts at the first
// byte.
func (p *Pool) Put(b []byte) {
	b = b[:p.size]
	p.state.Lock()
	defer p.state.Unlock()
	if p.state.closed {
		p.state.allocated--
		Free(b)
		return
	}
	p.free <- b // never blocks: the channel has a slot for every buffer
}

// Out returns the number of buffers that are handed out.
func (p *Pool) Out() int {
	p.state.Lock()
	defer p.state.Unlock()
	return p.state.allocated - len(p.free)
}

// Close frees the buffers in the pool; Put frees the others. Get and TryGet return nil from then
// on. Further calls have no effect.
func (p *Pool) Close() {
	p.state.Lock()
	defer p.state.Unlock()
	if !p.state.closed {
		p.state.closed = true
		close(p.ended)
	}
	for {
		select {
		case b := <-p.free:
			p.state.allocated--
			Free(b)
		default:
			return
		}
	}
}
