package membuf

import (
	"sync"
	"time"
)

// A Pool hands out buffers of equal size up to a hard maximum. Get waits while all buffers are in
// use. A Pool is safe for concurrent use.
type Pool struct {
	size  int
	free  chan []byte
	limit int
	ended chan struct{} // closed by Close
	file  *fileMemory   // nil: each buffer is memory of Alloc

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
	b, err := p.alloc()
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

// Put returns a buffer of Get, TryGet or Take to the pool. b may be any reslice that starts at the
// first byte.
func (p *Pool) Put(b []byte) {
	b = b[:p.size]
	p.state.Lock()
	defer p.state.Unlock()
	if p.state.closed {
		p.release(b)
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
// on. Further calls have no effect. The content of a pool's file does not change.
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
			p.release(b)
		default:
			if p.file != nil && p.state.allocated == 0 {
				p.file.close()
			}
			return
		}
	}
}

// alloc returns memory for another buffer. The caller holds state.
func (p *Pool) alloc() ([]byte, error) {
	if p.file != nil {
		return p.file.allocNext()
	}
	return Alloc(p.size)
}

// release frees a buffer of a closed pool. The caller holds state.
func (p *Pool) release(b []byte) {
	p.state.allocated--
	if p.file == nil {
		Free(b)
		return
	}
	untrack(b)
	if p.state.allocated == 0 {
		p.file.close()
	}
}
