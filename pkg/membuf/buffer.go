package membuf

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
)

// Alloc returns n octets, rounded up to whole pages, of zeroed anonymous memory outside the Go
// heap. The slice has length n. Free it with Free.
func Alloc(n int) ([]byte, error) {
	if n <= 0 {
		return nil, fmt.Errorf("membuf: allocate buffer of %d octets: size must be positive", n)
	}
	page := os.Getpagesize()
	size := (n + page - 1) &^ (page - 1)
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("membuf: allocate buffer of %d octets: %w", size, err)
	}
	addArena(b)
	leakcheck.Track(leakcheck.Buffer, 1)
	return b[:n], nil
}

// Free returns memory to the system, after every provider has let go of it (Attachment). b must be
// a slice that Alloc returned, and no request or registration may be using it. It panics when it is
// not such a slice: that is memory corruption in the making.
func Free(b []byte) {
	page := os.Getpagesize()
	size := (cap(b) + page - 1) &^ (page - 1)
	dropArena(b)
	if err := unix.Munmap(b[:size:size]); err != nil {
		panic(fmt.Sprintf("membuf: free buffer of %d octets: %v", size, err))
	}
	leakcheck.Track(leakcheck.Buffer, -1)
}

// A Pool hands out equal buffers of Alloc up to a hard maximum.
// Get waits when all are out. Safe for concurrent use.
type Pool struct {
	size  int
	free  chan []byte
	ended chan struct{} // closed by Close

	mu     sync.Mutex
	made   int // guarded by mu
	max    int
	closed bool // guarded by mu
}

// NewPool makes a pool of at most max buffers of size octets each. Buffers are made when first
// needed.
func NewPool(size, max int) *Pool {
	return &Pool{size: size, max: max, free: make(chan []byte, max), ended: make(chan struct{})}
}

// Size is the length of each buffer in octets.
func (p *Pool) Size() int { return p.size }

// shortRetry is how long Get waits before it asks the system for memory again.
const shortRetry = 50 * time.Millisecond

// TryGet returns a buffer, or nil when all are out or memory is short.
func (p *Pool) TryGet() []byte {
	b, _ := p.tryGet()
	return b
}

// tryGet also reports whether the system had no memory for a buffer that may be made.
func (p *Pool) tryGet() (b []byte, short bool) {
	select {
	case b := <-p.free:
		return b, false
	default:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.made >= p.max {
		return nil, false
	}
	b, err := Alloc(p.size)
	if err != nil {
		return nil, true
	}
	p.made++
	return b, false
}

// Get returns a buffer, waiting for one, or for memory, until done or the pool is closed, when it
// returns nil.
func (p *Pool) Get(done <-chan struct{}) []byte {
	for {
		b, short := p.tryGet()
		if b != nil {
			return b
		}
		var again <-chan time.Time
		if short { // nobody may be there to Put one
			again = time.After(shortRetry)
		}
		select {
		case b := <-p.free:
			return b
		case <-again:
		case <-done:
			return nil
		case <-p.ended:
			return nil
		}
	}
}

// Put gives back a buffer that Get or TryGet returned (any reslice that starts at its first octet).
func (p *Pool) Put(b []byte) {
	b = b[:p.size]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		p.made--
		Free(b)
		return
	}
	p.free <- b // never blocks: the channel holds all that were made
}

// Out is the number of buffers that are handed out now.
func (p *Pool) Out() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.made - len(p.free)
}

// Close frees the buffers that are in the pool, and each other one when it is Put. Nobody gets a
// buffer any more. Idempotent.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.closed = true
		close(p.ended)
	}
	for {
		select {
		case b := <-p.free:
			p.made--
			Free(b)
		default:
			return
		}
	}
}
