package vfs

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/ledger"
)

// A Waiting is a request without reply.
type Waiting struct {
	Op    kernel.Op
	Owner Owner
	Age   time.Duration
}

// Oldest returns the oldest request without reply. It leaves out the waits for locks of other
// programs, which may take any time. ok is false if there is no request. Oldest may be called
// concurrently.
func (fs *FS) Oldest() (oldest Waiting, ok bool) {
	w := &fs.interrupts
	w.mu.Lock()
	defer w.mu.Unlock()
	var first *request
	for _, r := range w.active {
		if r.op != kernel.OpSetLkw && (first == nil || r.began < first.began) {
			first = r
		}
	}
	if first == nil {
		return Waiting{}, false
	}
	return Waiting{Op: first.op, Owner: first.caller(), Age: time.Duration(ledger.Now() - first.began)}, true
}

// Progress returns a number that grows whenever the server accepts written data.
func (fs *FS) Progress() uint64 { return fs.progress.Load() }
