package fusefs

import (
	"fmt"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// TestWaitingExpiryBoundsNames lets names expire while the kernel does not take the notifications,
// because an operation in another directory waits for the server. The names that wait count too.
func TestWaitingExpiryBoundsNames(t *testing.T) {
	const left, each = 1500, 1000
	fs := &FS{opts: DefaultOptions(), aborted: make(chan struct{})}
	dir := &inode{id: 2}
	fs.inodes.init(dir)
	fs.inodes.names.Store(maxCachedNames - left)
	fs.expiry.running = true // a notification waits
	a := nfs3.Attr{Type: nfs3.NF3DIR}
	for range 4 {
		a.Mtime.Sec++
		fs.updateAttr(dir, &a, fs.callStart()) // another client's change expires the names
		for i := range each {
			out := fuse.EntryOut{}
			out.SetEntryTimeout(time.Minute)
			fs.cacheName(dir, fmt.Sprint(i), fs.callStart(), &out)
		}
	}
	waiting := 0
	for _, e := range fs.expiry.queue {
		waiting += len(e.names)
	}
	if n := waiting + len(dir.names.names); waiting < each || n > left {
		t.Errorf("names: got %d, of which %d wait, want %d to %d", n, waiting, each, left)
	}
	fs.sendExpiry()
	if n := fs.inodes.names.Load() - int64(len(dir.names.names)); n != maxCachedNames-left {
		t.Errorf("names of other directories after the notifications: got %d, want %d", n, maxCachedNames-left)
	}
}
