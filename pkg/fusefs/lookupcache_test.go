package fusefs

import (
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs3"
)

// TestKeptNameIsOrderedWithChanges checks that no change of a directory can come between the check
// of a name from a reply and its store: the change would drop the name before the store.
func TestKeptNameIsOrderedWithChanges(t *testing.T) {
	fs := &FS{opts: DefaultOptions()}
	dir := &inode{id: 2}
	fs.inodes.init(dir, nil)
	fs.updateAttr(dir, &nfs3.Attr{Type: nfs3.NF3DIR}, fs.callStart())
	fs.lookups.mu.Lock()
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		fs.keepLookup(dir, "name", 3, fs.callStart())
	}()
	ordered := 0 // consecutive times that the directory was locked
	for range 1000 {
		if time.Sleep(time.Millisecond); dir.mu.TryLock() {
			dir.mu.Unlock()
			ordered = 0
		} else if ordered++; ordered == 20 {
			break
		}
	}
	fs.lookups.mu.Unlock()
	<-kept
	if ordered < 20 {
		t.Error("the directory can change while a name is stored")
	}
	if e, ok := fs.lookups.get(nameKey{dir.id, "name"}); !ok || e.node != 3 {
		t.Errorf("stored name: got node %d, %v, want 3", e.node, ok)
	}
}
