package vfs

import (
	"fmt"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// TestWaitingExpiryBoundsNames lets names expire while the kernel does not take the notifications,
// because an operation in another directory waits for the server. The names that wait count too.
func TestWaitingExpiryBoundsNames(t *testing.T) {
	const left, each = 1500, 1000
	fs := &FS{opts: DefaultOptions(), aborted: make(chan struct{})}
	dir := &inode{id: 2}
	fs.inodes.init(dir, nil)
	fs.inodes.names.Store(maxCachedNames - left)
	fs.expiry.running = true // a notification waits
	a := nfs.Attr{Type: nfs.Directory}
	for range 4 {
		a.Mtime.Sec++
		fs.updateAttr(dir, &a, fs.clock.Now()) // another client's change expires the names
		for i := range each {
			out := fuse.EntryOut{}
			out.SetEntryTimeout(time.Minute)
			fs.cacheName(dir, fmt.Sprint(i), fs.clock.Now(), &out)
		}
	}
	waiting := 0
	for _, e := range fs.expiry.queue {
		waiting += len(e.names)
	}
	if n := waiting + dir.names.len(); waiting < each || n > left {
		t.Errorf("names: got %d, of which %d wait, want %d to %d", n, waiting, each, left)
	}
	fs.sendExpiry()
	if n := fs.inodes.names.Load() - int64(dir.names.len()); n != maxCachedNames-left {
		t.Errorf("names of other directories after the notifications: got %d, want %d", n, maxCachedNames-left)
	}
}

// TestKeptNameIsOrderedWithChanges checks that no change of a directory can come between the check
// of a name from a reply and its store: the change would drop the name before the store.
func TestKeptNameIsOrderedWithChanges(t *testing.T) {
	fs := &FS{opts: DefaultOptions()}
	dir := &inode{id: 2}
	fs.inodes.init(dir, nil)
	fs.updateAttr(dir, &nfs.Attr{Type: nfs.Directory}, fs.clock.Now())
	fs.lookups.mu.Lock()
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		fs.keepLookup(dir, "name", 3, fs.clock.Now())
	}()
	ordered := 0 // consecutive times that the directory was locked
	kit.Eventually(t, "lock of the directory while a name is stored", func() bool {
		if dir.mu.TryLock() {
			dir.mu.Unlock()
			ordered = 0
			return false
		}
		ordered++
		return ordered == 20
	})
	fs.lookups.mu.Unlock()
	<-kept
	if e, ok := fs.lookups.get(nameKey{dir.id, "name"}); !ok || e.node != 3 {
		t.Errorf("stored name: got node %d, %v, want 3", e.node, ok)
	}
}
