// Package acl has what a mount knows of the POSIX ACLs of its nodes, and the calls that get them
// (NFSACL). It joins calls for one node, and gets ACLs before a program asks for them.
//
// State.mu guards the ACLs of one node. Cache.calls and ahead.mu guard their fields. No lock is held
// during a call.
package acl

import (
	"context"
	"errors"
	"sync"
	"syscall"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfsacl"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// maxEntries is the maximum number of entries of ACLs that are cached. It bounds the memory that a
// server can make the client use for one node.
const maxEntries = 32

// A State is what a mount knows of the ACLs of one node. It is safe for concurrent use. The zero value
// and nil know nothing.
type State struct {
	mu    sync.Mutex
	known bool
	acls  nfsacl.ACLs
	ctime nfs.Time // of the node at that time
	// changed is the clock of the last change by this mount that may change the ACLs. Replies to
	// earlier GETACLs are outdated.
	changed uint64
}

// Keep keeps the ACLs after a reply to a change by this mount that does not change them: a new entry
// or new data.
func (s *State) Keep(ch *nfs.Change) {
	if s == nil || !ch.HasBefore || !ch.HasAfter {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctime == ch.Before.Ctime {
		s.ctime = ch.After.Ctime
	}
}

// Drop forgets the ACLs after a reply to a call that may have changed them. Replies to calls that were
// sent before now do not count.
func (s *State) Drop(clock *attr.Clock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known, s.acls, s.changed = false, nfsacl.ACLs{}, clock.Tick()
}

// A Node is what the calls need of a node. Two Nodes with the same State are the same node.
type Node struct {
	Handle nfs.Handle
	Attr   *attr.State
	State  *State
	// Update stores the attributes of a reply to a call sent at start, and reports whether it did.
	Update func(a *nfs.Attr, start uint64) bool
}

// A Cache gets the ACLs of the nodes of one mount. It is safe for concurrent use. The exported fields
// must be set before.
type Cache struct {
	Client *nfsacl.Client
	Attrs  *attr.Cache
	Busy   *nfs.BusyPolicy
	Spawn  func(func()) // runs a function on a goroutine

	calls struct { // in flight; the channel is closed when the call ends
		sync.Mutex
		byState map[*State]chan struct{}
	}
	ahead ahead
}

// Supported asks the server once whether it supports NFSACL. The error is that of the transport.
func Supported(ctx context.Context, cred []byte, client *nfsacl.Client) (bool, error) {
	err := client.Null(ctx, cred)
	var accept *sunrpc.AcceptError
	var denied *sunrpc.DeniedError
	if errors.As(err, &accept) || errors.As(err, &denied) {
		return false, nil
	}
	return err == nil, err
}

// Errno returns EOPNOTSUPP when the server has stopped to support NFSACL, and else err.
func Errno(err error) error {
	var accept *sunrpc.AcceptError
	if errors.As(err, &accept) {
		return syscall.EOPNOTSUPP
	}
	return err
}

// Get returns the ACLs of a node. An ACL that says no more than the mode is left out. Get waits for a
// call of another goroutine for the node, once. The error is EINTR if ctx ends meanwhile.
func (c *Cache) Get(ctx context.Context, cred []byte, n Node) (nfsacl.ACLs, error) {
	if acls, ok := c.known(n); ok {
		return acls, nil
	}
	done := c.begin(n.State)
	if done == nil {
		defer c.end(n.State)
		return c.Ask(ctx, cred, n)
	}
	select {
	case <-done:
	case <-ctx.Done():
		return nfsacl.ACLs{}, syscall.EINTR
	}
	if acls, ok := c.known(n); ok {
		return acls, nil
	}
	return c.Ask(ctx, cred, n) // the other call failed, or its reply is not cacheable
}

// known returns the ACLs of a node if they are known.
func (c *Cache) known(n Node) (acls nfsacl.ACLs, ok bool) {
	v := c.Attrs.View(n.Attr)
	if !v.Fresh {
		return acls, false
	}
	n.State.mu.Lock()
	defer n.State.mu.Unlock()
	return n.State.acls, n.State.known && n.State.ctime == v.Ctime
}

// begin makes the caller ask for the ACLs of a node, and returns nil. If another goroutine does that,
// begin returns a channel that is closed when it ends.
func (c *Cache) begin(s *State) <-chan struct{} {
	c.calls.Lock()
	defer c.calls.Unlock()
	if done := c.calls.byState[s]; done != nil {
		return done
	}
	if c.calls.byState == nil {
		c.calls.byState = make(map[*State]chan struct{})
	}
	c.calls.byState[s] = make(chan struct{})
	return nil
}

// end ends what begin has begun.
func (c *Cache) end(s *State) {
	c.calls.Lock()
	defer c.calls.Unlock()
	close(c.calls.byState[s])
	delete(c.calls.byState, s)
}

// Ask asks the server for the ACLs of a node.
func (c *Cache) Ask(ctx context.Context, cred []byte, n Node) (nfsacl.ACLs, error) {
	mask := uint32(nfsacl.MaskAccess | nfsacl.MaskAccessCount)
	if n.Attr.IsDir() {
		mask = nfsacl.MaskAll
	}
	for try := 0; ; try++ {
		var post nfs.PostOpAttr
		start := c.Attrs.Now()
		acls, err := c.Client.Get(ctx, cred, n.Handle, mask, &post)
		if c.Busy.Retry(ctx, err, try) {
			continue
		}
		if err != nil {
			return acls, err
		}
		if acls.Access.Minimal() {
			acls.Access = nil
		}
		if post.Present && n.Update(&post.Attr, start) && max(len(acls.Access), len(acls.Default)) <= maxEntries {
			n.State.keep(acls, post.Ctime, start)
		}
		return acls, nil
	}
}

// keep stores the ACLs of a reply to a call sent at start.
func (s *State) keep(acls nfsacl.ACLs, ctime nfs.Time, start uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if start >= s.changed {
		s.known, s.acls, s.ctime = true, acls, ctime
	}
}
