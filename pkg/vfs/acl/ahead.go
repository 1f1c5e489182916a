package acl

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
)

// A program such as ls -l lists a part of a directory, then asks for the ACL of each listed file,
// and so on. Each ACL is one GETACL, because READDIRPLUS returns no ACLs. While a program asks for
// the ACLs of the entries of a directory, a READDIRPLUS request therefore also starts GETACLs for
// the entries that it returns, several at a time. A request for an ACL that is being fetched waits
// for this call instead of making another one.
const (
	// AheadCalls is the number of GETACLs in flight.
	AheadCalls = 8
	// aheadMax bounds the nodes whose ACLs will be fetched.
	aheadMax = 4096
	// aheadTimeout bounds one call. The mount option timeo, which ends a connection, is longer.
	aheadTimeout = 2 * time.Second
)

// An ahead holds the nodes whose ACLs will be fetched.
type ahead struct {
	mu      sync.Mutex
	queue   []wanted
	calls   int             // goroutines that take from queue
	ctx     context.Context // of the calls; nil before the first one
	cancel  context.CancelFunc
	stopped bool
}

type wanted struct {
	node Node
	cred []byte
}

// Fetch gets the ACLs of nodes in the background. It skips those for which there is no room.
func (c *Cache) Fetch(cred []byte, nodes []Node) {
	a := &c.ahead
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopped {
		return
	}
	if a.ctx == nil {
		a.ctx, a.cancel = context.WithCancel(context.Background())
	}
	for _, n := range nodes[:min(len(nodes), aheadMax-len(a.queue))] {
		a.queue = append(a.queue, wanted{n, cred})
	}
	for range min(AheadCalls-a.calls, len(a.queue)) {
		a.calls++
		c.Spawn(c.fetchQueued)
	}
}

// Stop ends the calls of Fetch. Later calls of Fetch have no effect.
func (c *Cache) Stop() {
	a := &c.ahead
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopped, a.queue = true, nil
	if a.cancel != nil {
		a.cancel()
	}
}

// fetchQueued fetches ACLs until the queue is empty. It ignores errors, which the requests for the ACLs
// will report. When the server does not answer, it empties the queue.
func (c *Cache) fetchQueued() {
	a := &c.ahead
	for next, ok := a.next(true); ok; {
		ctx, cancel := context.WithTimeout(a.ctx, aheadTimeout)
		_, err := c.Get(ctx, next.cred, next.node)
		cancel()
		var status *nfsacl.Error
		next, ok = a.next(err == nil || errors.As(err, &status))
	}
}

// next takes the next node from the queue. more is false to empty the queue instead. ok is false
// when the queue is empty, and the caller then ends.
func (a *ahead) next(more bool) (w wanted, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !more || len(a.queue) == 0 {
		a.queue = nil
		a.calls--
		return w, false
	}
	w = a.queue[0]
	a.queue = a.queue[1:]
	return w, true
}
