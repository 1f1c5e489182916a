package vfs

import (
	"strconv"
	"sync"
	"syscall"
)

// A server answers NFS3ERR_JUKEBOX when a call for one object would take long, for example while
// a tape is loaded (RFC 1813 §2.6). The calls for this object are repeated. During the delays they
// hold nothing that calls for other objects need: no slot of the transport, no slot for WRITE
// calls, no buffer of a read, and no place among the kernel's background requests.

// pauseRead is Retry for a call with cred that reads into t, of which done bytes are read. It
// gives a buffer of the pool back during the delay, and sets *err to nil when the call must be
// repeated. It returns the bytes that are still in t. After an error t may have no memory.
func (fs *FS) pauseRead(r *request, cred []byte, err *error, t *target, done, try int) int {
	pooled := t.buf != nil
	keeps := fs.busyReads.begin(pooled && done > 0, fs.buffers.Limit())
	if pooled && !keeps {
		t.dropBuffer(fs)
		done = 0
	}
	retry := fs.busy.Retry(r, *err, try)
	fs.busyReads.end(keeps)
	if !retry {
		return done
	}
	if len(t.all) == 0 {
		buf := fs.data.Buffer(r, cred)
		if buf == nil {
			*err = syscall.EINTR
			return 0
		}
		t.useBuffer(buf)
	}
	*err = nil
	return done
}

const (
	// busyReadStep is the unit by which the bound of background requests changes.
	busyReadStep = 64
	// maxBusyReads bounds how far the bound of background requests grows.
	maxBusyReads = 8192
	// keepShare is the fraction of the buffers that delayed reads may keep: 1/4.
	keepShare = 4
)

// busyReads counts the reads that are delayed because the server is busy, and the buffered reads
// that wait for a buffer. The kernel bounds the number of its background requests (read-ahead and
// other buffered reads) in flight, and those of all users wait for it in one queue. It gets a higher
// bound while reads are delayed, so that the requests for other files and of other users proceed.
type busyReads struct {
	mu    sync.Mutex
	n     int         // delayed reads
	kept  int         // reads of a busy server that keep their buffers
	raise int         // current addition to maxBackground
	apply func(n int) // sets the kernel's bound; nil while not mounted
}

// begin counts a delayed read. keeps tells whether the read may keep its buffer, because it has
// data and few delayed reads keep theirs. Otherwise the read starts again after the delay.
func (b *busyReads) begin(hasData bool, buffers int) (keeps bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	b.adjust()
	keeps = hasData && b.kept < buffers/keepShare
	if keeps {
		b.kept++
	}
	return keeps
}

// end reverses begin.
func (b *busyReads) end(keeps bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n--
	if keeps {
		b.kept--
	}
	b.adjust()
}

// adjust changes the kernel's bound in steps, so that few reads cause a change. The caller holds
// mu.
func (b *busyReads) adjust() {
	steps := (b.n + busyReadStep/2) / busyReadStep
	raise := min((steps+1)*busyReadStep, maxBusyReads)
	if b.n < busyReadStep/4 {
		raise = 0
	}
	if b.apply != nil && (raise > b.raise || raise < b.raise-busyReadStep || raise == 0 && b.raise > 0) {
		b.raise = raise
		b.apply(maxBackground + raise)
	}
}

// watchBusyReads lets the FS adjust the kernel's bound of background requests.
func (s *Server) watchBusyReads() {
	b := &s.fs.busyReads
	b.mu.Lock()
	defer b.mu.Unlock()
	b.apply = func(n int) { s.mount.Control("max_background", strconv.Itoa(n)) }
}
