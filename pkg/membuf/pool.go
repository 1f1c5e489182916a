package membuf

import (
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
)

// A Pool hands out buffers of equal size up to a hard maximum. Get waits while all buffers are in
// use. A buffer goes to the next waiting Get, and no later call can take it: the users that wait
// have turns, and the calls of one user are first come, first served. A Pool is safe for concurrent
// use.
type Pool struct {
	size  int
	limit int
	file  *fileMemory // nil: each buffer is memory of Alloc

	state struct {
		sync.Mutex
		free      [][]byte // empty while a Get waits
		allocated int      // buffers in the pool or in use
		closed    bool
		waiting   fair.Queue[chan []byte]
		getters   []*getter   // not in use
		retry     *time.Timer // runs allocateLater; nil before the first failed allocation
	}
}

// A getter is a waiting Get. Its channel has room for the buffer, or for nil after Close.
type getter = fair.Entry[chan []byte]

// NewPool makes a pool of at most limit buffers of size bytes each. The pool allocates a buffer
// when it is first needed.
func NewPool(size, limit int) *Pool { return &Pool{size: size, limit: limit} }

// Size returns the length of each buffer in bytes.
func (p *Pool) Size() int { return p.size }

// Limit returns the maximum number of buffers.
func (p *Pool) Limit() int { return p.limit }

// allocRetry is how long a waiting Get waits before the pool tries a failed allocation again.
const allocRetry = 50 * time.Millisecond

// TryGet returns a buffer, or nil when all buffers are in use, a Get waits, the system has no
// memory, or the pool is closed.
func (p *Pool) TryGet() []byte {
	p.state.Lock()
	defer p.state.Unlock()
	if p.state.waiting.Len() > 0 {
		return nil
	}
	b, _ := p.next()
	return b
}

// next returns a buffer, or nil as TryGet. It also reports whether the system had no memory for a
// new buffer. The caller holds state.
func (p *Pool) next() (b []byte, noMemory bool) {
	s := &p.state
	if n := len(s.free); n > 0 {
		b, s.free[n-1] = s.free[n-1], nil
		s.free = s.free[:n-1]
		return b, false
	}
	if s.closed || s.allocated >= p.limit {
		return nil, false
	}
	b, err := p.alloc()
	if err != nil {
		return nil, true
	}
	s.allocated++
	return b, false
}

// Get returns a buffer for a user. Get waits while all buffers are in use or the system has no
// memory. Get returns nil when done or the pool is closed.
func (p *Pool) Get(done <-chan struct{}, user uint32) (b []byte) {
	w, b := p.wait(user)
	if w == nil {
		return b
	}
	ended := false
	select {
	case b = <-w.Value:
	case <-done:
		ended = true
	}
	p.state.Lock()
	defer p.state.Unlock()
	if ended && !w.Queued() {
		b = <-w.Value // arrived in the meantime
	}
	p.state.waiting.Remove(w)
	p.state.getters = append(p.state.getters, w)
	return b
}

// wait returns a getter that waits. It returns none if there is a buffer, or if the pool is closed.
func (p *Pool) wait(user uint32) (w *getter, b []byte) {
	s := &p.state
	s.Lock()
	defer s.Unlock()
	noMemory := false
	if s.waiting.Len() == 0 {
		b, noMemory = p.next()
	}
	if b != nil || s.closed {
		return nil, b
	}
	if n := len(s.getters); n > 0 {
		w, s.getters = s.getters[n-1], s.getters[:n-1]
	} else {
		w = &getter{Value: make(chan []byte, 1)}
	}
	s.waiting.Add(w, user)
	if noMemory { // perhaps no buffer is in use, so that no Put follows
		p.armRetry()
	}
	return w, nil
}

// armRetry runs allocateLater later. The caller holds state.
func (p *Pool) armRetry() {
	if p.state.retry == nil {
		p.state.retry = time.AfterFunc(allocRetry, p.allocateLater)
	} else {
		p.state.retry.Reset(allocRetry)
	}
}

// allocateLater allocates buffers for the calls that wait because the system had no memory.
func (p *Pool) allocateLater() {
	s := &p.state
	s.Lock()
	defer s.Unlock()
	for s.waiting.Len() > 0 {
		b, noMemory := p.next()
		if noMemory {
			p.armRetry()
		}
		if b == nil {
			return
		}
		s.waiting.Take().Value <- b
	}
}

// Put returns a buffer of Get, TryGet or Take to the pool. b may be any reslice that starts at the
// first byte.
func (p *Pool) Put(b []byte) {
	b = b[:p.size]
	s := &p.state
	s.Lock()
	defer s.Unlock()
	switch {
	case s.closed:
		p.release(b)
	case s.waiting.Len() > 0:
		s.waiting.Take().Value <- b
	default:
		s.free = append(s.free, b)
	}
}

// Out returns the number of buffers that are handed out.
func (p *Pool) Out() int {
	p.state.Lock()
	defer p.state.Unlock()
	return p.state.allocated - len(p.state.free)
}

// Close frees the buffers in the pool; Put frees the others. Get and TryGet return nil from then
// on. Further calls have no effect. The content of a pool's file does not change.
func (p *Pool) Close() {
	s := &p.state
	s.Lock()
	defer s.Unlock()
	s.closed = true
	if s.retry != nil {
		s.retry.Stop()
	}
	for s.waiting.Len() > 0 {
		s.waiting.Take().Value <- nil
	}
	for _, b := range s.free {
		p.release(b)
	}
	s.free = nil
	if p.file != nil && s.allocated == 0 {
		p.file.close()
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
