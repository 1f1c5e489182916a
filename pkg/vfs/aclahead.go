package vfs

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
	// aclAheadCalls is the number of GETACLs in flight.
	aclAheadCalls = 8
	// aclAheadMax bounds the nodes whose ACLs will be fetched.
	aclAheadMax = 4096
	// aclAheadTimeout bounds one call. The mount option timeo, which ends a connection, is longer.
	aclAheadTimeout = 2 * time.Second
)

// aclCalls are the nodes whose ACLs are being fetched. The channel is closed when the call ends.
type aclCalls struct {
	sync.Mutex
	byNode map[*inode]chan struct{}
}

// begin makes the caller fetch the ACLs of ino, and returns nil. If another goroutine does that,
// begin returns a channel that is closed when it ends.
func (c *aclCalls) begin(ino *inode) <-chan struct{} {
	c.Lock()
	defer c.Unlock()
	if done := c.byNode[ino]; done != nil {
		return done
	}
	if c.byNode == nil {
		c.byNode = make(map[*inode]chan struct{})
	}
	c.byNode[ino] = make(chan struct{})
	return nil
}

// end ends what begin has begun.
func (c *aclCalls) end(ino *inode) {
	c.Lock()
	defer c.Unlock()
	close(c.byNode[ino])
	delete(c.byNode, ino)
}

// countACL records a request for the ACL of ino at the directory that listed ino.
func (fs *FS) countACL(ino *inode, cred []byte) {
	if dir := fs.inodes.get(ino.dir.Place().Dir); dir != nil {
		dir.dir.CountACL(cred)
	}
}

// wantsACLs reports whether a program with the credential cred asks for the ACLs of the entries of
// dir.
func (fs *FS) wantsACLs(dir *inode, cred []byte) bool {
	return fs.acl != nil && !fs.opts.NoAC && dir.dir.WantsACLs(cred)
}

// An aclsAhead fetches ACLs before a program asks for them.
type aclsAhead struct {
	sync.Mutex
	queue   []aclWanted
	calls   int             // goroutines that take from queue
	ctx     context.Context // of the calls; nil before the first one
	cancel  context.CancelFunc
	stopped bool
}

type aclWanted struct {
	ino  *inode
	cred []byte
}

// fetchACLs fetches the ACLs of nodes in the background. It skips those for which there is no room.
func (fs *FS) fetchACLs(cred []byte, nodes []*inode) {
	a := &fs.aclsAhead
	a.Lock()
	defer a.Unlock()
	if a.stopped {
		return
	}
	if a.ctx == nil {
		a.ctx, a.cancel = context.WithCancel(context.Background())
	}
	for _, ino := range nodes[:min(len(nodes), aclAheadMax-len(a.queue))] {
		a.queue = append(a.queue, aclWanted{ino, cred})
	}
	for range min(aclAheadCalls-a.calls, len(a.queue)) {
		a.calls++
		fs.spawn(fs.fetchQueuedACLs)
	}
}

// stop ends the calls. Later calls of fetchACLs have no effect.
func (a *aclsAhead) stop() {
	a.Lock()
	defer a.Unlock()
	a.stopped, a.queue = true, nil
	if a.cancel != nil {
		a.cancel()
	}
}

// fetchQueuedACLs fetches ACLs until the queue is empty. It ignores errors, which the requests for
// the ACLs will report. When the server does not answer, it empties the queue.
func (fs *FS) fetchQueuedACLs() {
	a := &fs.aclsAhead
	for next, ok := a.next(true); ok; {
		ctx, cancel := context.WithTimeout(a.ctx, aclAheadTimeout)
		_, err := fs.sharedACLs(ctx, next.cred, next.ino)
		cancel()
		var status *nfsacl.Error
		next, ok = a.next(err == nil || errors.As(err, &status))
	}
}

// next takes the next node from the queue. more is false to empty the queue instead. ok is false
// when the queue is empty, and the caller then ends.
func (a *aclsAhead) next(more bool) (w aclWanted, ok bool) {
	a.Lock()
	defer a.Unlock()
	if !more || len(a.queue) == 0 {
		a.queue = nil
		a.calls--
		return w, false
	}
	w = a.queue[0]
	a.queue = a.queue[1:]
	return w, true
}
