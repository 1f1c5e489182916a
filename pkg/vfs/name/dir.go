package name

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

const (
	// maxAge bounds the age of the attributes that show that a directory did not change. It is short,
	// because the kernel cannot ask for a fresh answer: a program that waits for another client to
	// remove a lock file would otherwise wait until its name expires.
	maxAge = 3 * time.Second
	// maxAnswers bounds the names of a mount from which lookups are answered, and maxNames those that
	// the kernel may have. A full table loses old names. The kernel then gets other names for
	// forgottenTime only. A name needs about 150 bytes.
	maxAnswers    = 1 << 16
	maxNames      = 1 << 20
	forgottenTime = time.Second
	// minSweep is the number of names of a directory from which expired names are removed.
	minSweep = 1024
	// sweepDirs bounds the directories that a full table searches for names to lose.
	sweepDirs = 16
)

// A Table is what the names of one mount share. It is safe for concurrent use. The exported fields
// must be set before.
type Table struct {
	Attrs *attr.Cache
	// Answers is set when the file system answers lookups, and Missing when it also does so for names
	// that do not exist.
	Answers, Missing bool

	forgotten attr.Moment  // when all answers were forgotten
	count     atomic.Int64 // names of all directories, and those that wait for a notification
	mu        sync.Mutex
	dirs      map[*Dir]struct{} // that have names
}

// A Dir is what a mount knows of the names in one directory, and for any object where a listing found
// it. It is safe for concurrent use. The zero value knows nothing.
type Dir struct {
	mu      sync.Mutex
	place   Place
	entries *entries // nil: none
	listing *listing // nil before a listing
}

type entries struct {
	found  Found
	names  map[string]entry
	kernel attr.Instant // no name is longer in the kernel
	// changed is the clock after the last change of a name by this mount. Replies to earlier calls
	// say nothing.
	changed uint64
	sweepAt int // number of names at which expired ones are removed
}

// An entry is what a name stands for.
type entry struct {
	node    uint64 // 0: the name does not exist; also with an expired answer
	start   uint64 // clock when the call was sent that told so
	expires attr.Instant
	kernel  attr.Instant // until when the kernel may cache the name
}

// A Found is the name by which the kernel found a directory last.
type Found struct {
	Dir  uint64 // node number of the parent
	Name string
}

// SetFound records the name of a directory.
func (d *Dir) SetFound(f Found) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.make().found = f
}

// Found returns the name of SetFound.
func (d *Dir) Found() Found {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil {
		return Found{}
	}
	return d.entries.found
}

// make returns the entries of a directory. The caller holds mu.
func (d *Dir) make() *entries {
	if d.entries == nil {
		d.entries = new(entries)
	}
	return d.entries
}

// Find returns what a name in a directory stands for: a node, or 0 if it does not exist. allowed tells
// whether the caller may search the directory, with the View v. ok is false when the server must be
// asked.
func (t *Table) Find(d *Dir, name string, v *attr.View, allowed bool) (node uint64, ok bool) {
	if !t.Answers || !allowed || !v.Valid || v.Age >= maxAge {
		return 0, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil {
		return 0, false
	}
	e, ok := d.entries.names[name]
	if !ok || attr.Now() >= e.expires || e.start < max(v.EpochStart, t.forgotten.At()) ||
		e.node == 0 && e.start < t.Attrs.Lock.At() {
		return 0, false
	}
	return e.node, true
}

// Last returns the node that a name stood for when this mount heard of it last, or 0.
func (d *Dir) Last(name string) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil {
		return 0
	}
	if e := d.entries.names[name]; e.expires != 0 {
		return e.node
	}
	return 0
}

// Keep stores for the time ttl what a name stands for, from the reply to a call sent at start. Node 0
// stores that the name does not exist. a is the State of the directory.
func (t *Table) Keep(d *Dir, a *attr.State, name string, node, start uint64, ttl time.Duration) {
	if !t.Answers || node == 0 && !t.Missing {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	es := d.make()
	if start < max(a.EpochStart(), es.changed) {
		return
	}
	e, known := es.names[name]
	if !known && !t.room(d, maxAnswers) {
		return
	}
	e.node, e.start, e.expires = node, start, attr.Now().Add(ttl)
	t.put(d, name, e)
}

// CacheInKernel records that the kernel will cache a name of a node for a time. It returns the time for
// which the kernel may cache it: not at all when the reply to the call sent at start is from before a
// change of the directory by another client. a is the State of the directory.
func (t *Table) CacheInKernel(d *Dir, a *attr.State, name string, node, start uint64,
	timeout time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if start < a.EpochStart() {
		return 0
	}
	es := d.make()
	e, known := es.names[name]
	if !known && !t.room(d, maxNames) {
		return min(timeout, forgottenTime)
	}
	e.kernel = attr.Now().Add(timeout)
	if e.expires == 0 {
		e.node = node // for the notification
	}
	es.kernel = max(es.kernel, e.kernel)
	t.put(d, name, e)
	return timeout
}

// put stores an entry. The caller holds d.mu.
func (t *Table) put(d *Dir, name string, e entry) {
	es := d.entries
	if es.names == nil {
		es.names = make(map[string]entry)
		t.mu.Lock()
		if t.dirs == nil {
			t.dirs = make(map[*Dir]struct{})
		}
		t.dirs[d] = struct{}{}
		t.mu.Unlock()
	}
	before := len(es.names)
	es.names[name] = e
	t.count.Add(int64(len(es.names) - before))
}

// Changed records that this mount may have changed a name, and returns the node that the name stood
// for before. known is false when that node is unknown; node is 0 when there was none.
func (t *Table) Changed(d *Dir, name string) (node uint64, known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	es := d.make()
	es.changed = t.Attrs.Tick()
	e, known := es.names[name]
	if !known || e.expires == 0 || e.start < t.forgotten.At() {
		return 0, false
	}
	node = e.node
	e.start, e.expires = 0, 0
	es.names[name] = e
	if attr.Now() >= e.kernel {
		t.remove(d, name)
	}
	return node, true
}

// remove removes a name. The caller holds d.mu.
func (t *Table) remove(d *Dir, name string) {
	delete(d.entries.names, name)
	t.count.Add(-1)
	if len(d.entries.names) == 0 {
		t.dropNames(d)
	}
}

// dropNames forgets the names of a directory. The caller holds d.mu and has counted them.
func (t *Table) dropNames(d *Dir) {
	d.entries.names, d.entries.sweepAt = nil, 0
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.dirs, d)
}

// ForgetAnswers makes Find return nothing that was kept before.
func (t *Table) ForgetAnswers() { t.Attrs.Mark(&t.forgotten) }

// Forget forgets all that is known of an object. The kernel has forgotten it too.
func (t *Table) Forget(d *Dir) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries != nil && d.entries.names != nil {
		t.count.Add(-int64(len(d.entries.names)))
		t.dropNames(d)
	}
	d.entries, d.listing = nil, nil
}
