package name

import (
	"fmt"
	"testing"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs"
	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// newTable returns a Table, and the State of a directory with attributes.
func newTable() (*Table, *attr.State) {
	t := &Table{Attrs: &attr.Cache{}, Answers: true, Missing: true}
	t.Attrs.DirMin, t.Attrs.DirMax = time.Minute, time.Minute
	a := new(attr.State)
	t.Attrs.Update(a, &nfs.Attr{Type: nfs.Directory}, t.Attrs.Now())
	return t, a
}

// TestWaitingExpiryBoundsNames lets names expire while the kernel does not take the notifications,
// because an operation in another directory waits for the server. The names that wait count too.
func TestWaitingExpiryBoundsNames(t *testing.T) {
	const left, each = 1500, 1000
	table, a := newTable()
	table.count.Store(maxNames - left)
	sent := 0
	var d Dir
	var run func()
	x := Expiry{Table: table, Spawn: func(f func()) { run = f }, Expire: func(uint64, string, uint64) { sent++ }}
	attrs := nfs.Attr{Type: nfs.Directory}
	begun := 0
	for range 4 {
		attrs.Mtime.Sec++
		if _, foreign := table.Attrs.Update(a, &attrs, table.Attrs.Now()); !foreign {
			t.Fatal("the change of another client is not seen")
		}
		begun += x.Begin(&d, 2)
		for i := range each {
			table.CacheInKernel(&d, a, fmt.Sprint(i), 3, table.Attrs.Now(), time.Minute)
		}
	}
	if n := begun + len(d.entries.names); begun < each || n > left {
		t.Errorf("names: got %d, of which %d wait, want %d to %d", n, begun, each, left)
	}
	run()
	if sent != begun {
		t.Errorf("notifications: got %d, want %d", sent, begun)
	}
	if n := table.count.Load() - int64(len(d.entries.names)); n != maxNames-left {
		t.Errorf("names of other directories after the notifications: got %d, want %d", n, maxNames-left)
	}
}

// TestNamesOfReplies checks which replies say what a name stands for.
func TestNamesOfReplies(t *testing.T) {
	table, a := newTable()
	var d Dir
	find := func(name string) (uint64, bool) {
		v := table.Attrs.View(a)
		return table.Find(&d, name, &v, true)
	}
	start := table.Attrs.Now()
	table.Keep(&d, a, "file", 3, start, time.Minute)
	table.Keep(&d, a, "missing", 0, start, time.Minute)
	if node, ok := find("file"); node != 3 || !ok {
		t.Errorf("known name: got %d, %v, want 3, true", node, ok)
	}
	if node, ok := find("missing"); node != 0 || !ok {
		t.Errorf("missing name: got %d, %v, want 0, true", node, ok)
	}
	v := table.Attrs.View(a)
	if _, ok := table.Find(&d, "file", &v, false); ok {
		t.Error("name for a user without the right to search: got an answer")
	}
	table.Attrs.Mark(&table.Attrs.Lock)
	if _, ok := find("missing"); ok {
		t.Error("missing name after a lock: got an answer")
	}
	if node, known := table.Changed(&d, "file"); node != 3 || !known {
		t.Errorf("node of a changed name: got %d, %v, want 3, true", node, known)
	}
	table.Keep(&d, a, "file", 3, start, time.Minute) // the reply is from before the change
	if _, ok := find("file"); ok {
		t.Error("name from a reply before its change: got an answer")
	}
	before := table.Attrs.Now()
	table.Keep(&d, a, "file", 3, before, time.Minute)
	table.Attrs.NewEpoch(a)
	if _, ok := find("file"); ok {
		t.Error("name from before a change by another client: got an answer")
	}
	table.Keep(&d, a, "file", 3, before, time.Minute)
	if _, ok := find("file"); ok {
		t.Error("name from a reply before a change by another client: got an answer")
	}
	if got := table.CacheInKernel(&d, a, "file", 3, before, time.Minute); got != 0 {
		t.Errorf("time in the kernel of a name from before the change: got %v, want 0", got)
	}
	table.Keep(&d, a, "file", 4, table.Attrs.Now(), time.Minute)
	if node, ok := find("file"); node != 4 || !ok {
		t.Errorf("name after the changes: got %d, %v, want 4, true", node, ok)
	}
	table.ForgetAnswers()
	if _, ok := find("file"); ok {
		t.Error("forgotten name: got an answer")
	}
}

// TestFullTableLosesNames checks that a table stays within its bound, and that names enter a full table
// in place of others which the kernel does not have.
func TestFullTableLosesNames(t *testing.T) {
	const room = 100
	table, a := newTable()
	table.count.Store(maxAnswers - room)
	dirs := make([]Dir, 10)
	for i := range room / 2 { // the kernel must be told before these names are forgotten
		table.CacheInKernel(&dirs[i%len(dirs)], a, fmt.Sprint("kernel", i), 3, table.Attrs.Now(), time.Minute)
	}
	for i := range 5 * room {
		d, name := &dirs[i%len(dirs)], fmt.Sprint(i)
		table.Keep(d, a, name, uint64(i), table.Attrs.Now(), time.Minute)
		if v := table.Attrs.View(a); i > 0 {
			if node, _ := table.Find(d, name, &v, true); node != uint64(i) {
				t.Fatalf("new name %s: got node %d, want %d", name, node, i)
			}
		}
		if n := table.count.Load(); n > maxAnswers {
			t.Fatalf("names: got %d, want at most %d", n, maxAnswers)
		}
	}
	for i := range room / 2 {
		if _, ok := dirs[i%len(dirs)].entries.names[fmt.Sprint("kernel", i)]; !ok {
			t.Errorf("name %d that the kernel has is forgotten", i)
		}
	}
	table.Sweep(attr.Now().Add(2 * time.Minute))
	for i := range dirs {
		table.Forget(&dirs[i])
	}
	if n := table.count.Load(); n != maxAnswers-room || len(table.dirs) > 0 {
		t.Errorf("after all names have expired: got %d names and %d directories", n-maxAnswers+room, len(table.dirs))
	}
}

// TestKeptNameIsOrderedWithChanges checks that a name from a reply is stored while the directory is
// locked: a change of the directory comes before the check of the reply, or forgets the name.
func TestKeptNameIsOrderedWithChanges(t *testing.T) {
	table, a := newTable()
	var d Dir
	table.mu.Lock()
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		table.Keep(&d, a, "name", 3, table.Attrs.Now(), time.Minute)
	}()
	ordered := 0 // consecutive times that the directory was locked
	kit.Eventually(t, "lock of the directory while a name is stored", func() bool {
		if d.mu.TryLock() {
			d.mu.Unlock()
			ordered = 0
			return false
		}
		ordered++
		return ordered == 20
	})
	table.mu.Unlock()
	<-kept
	if node := d.Last("name"); node != 3 {
		t.Errorf("stored name: got node %d, want 3", node)
	}
}
