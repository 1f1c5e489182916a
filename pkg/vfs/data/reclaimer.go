package data

import (
	"sync"
	"time"
)

// A reclaimer makes room while requests wait for buffers: it calls reclaim when the first request
// begins to wait, and then once for each bufferPollInterval. One timer serves all requests, so the
// cost does not grow with their number, and no two calls of reclaim run at the same time.
type reclaimer struct {
	mu      sync.Mutex
	reclaim func()      // of the first request that waits
	waiting int         // requests
	running bool        // the timer runs
	timer   *time.Timer // nil before the first wait
}

// begin counts a request that waits. reclaim must not block, and not call the reclaimer.
func (r *reclaimer) begin(reclaim func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting++
	if r.running {
		return
	}
	r.running, r.reclaim = true, reclaim
	reclaim()
	if r.timer == nil {
		r.timer = time.AfterFunc(bufferPollInterval, r.tick)
	} else {
		r.timer.Reset(bufferPollInterval)
	}
}

// end reverses begin.
func (r *reclaimer) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting--
}

func (r *reclaimer) tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running = r.waiting > 0; r.running {
		r.reclaim()
		r.timer.Reset(bufferPollInterval)
	}
}
