package name

import (
	"sync"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// An Expiry tells the kernel which names to look up again. One goroutine does so for each mount: the
// kernel locks the directory, and waits for requests that the file system is handling. It is safe for
// concurrent use. The exported fields must be set before.
type Expiry struct {
	Table *Table
	// Spawn runs a function on a goroutine.
	Spawn func(func())
	// Expire makes the kernel look a name in the directory with a node number up again. node is the
	// number of the node that the kernel knows by the name, or 0.
	Expire func(dir uint64, name string, node uint64)

	mu      sync.Mutex
	running bool
	queue   []expired
}

type expired struct {
	dir   uint64 // node number
	names map[string]entry
}

// Begin makes the kernel look all names up again that it may have cached of a directory with a node
// number. It must be called after an epoch of the directory has begun. It returns the number of names.
func (x *Expiry) Begin(d *Dir, dir uint64) int {
	names := x.Table.take(d)
	if len(names) == 0 {
		return 0
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.queue = append(x.queue, expired{dir, names})
	if !x.running {
		x.running = true
		x.Spawn(x.run)
	}
	return len(names)
}

// take removes all names of a directory, whose answers are outdated. It returns those that the kernel
// may have. They count in t until run has handled them.
func (t *Table) take(d *Dir) map[string]entry {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil || d.entries.names == nil {
		return nil
	}
	names, at := d.entries.names, attr.Now()
	latest := d.entries.kernel
	d.entries.kernel = 0
	t.dropNames(d)
	before := len(names)
	if at >= latest {
		clear(names)
	}
	for name, e := range names {
		if at >= e.kernel {
			delete(names, name)
		}
	}
	t.count.Add(int64(len(names) - before))
	return names
}

// run sends the queued notifications.
func (x *Expiry) run() {
	for {
		x.mu.Lock()
		if len(x.queue) == 0 {
			x.running = false
			x.mu.Unlock()
			return
		}
		next := x.queue[0]
		x.queue = x.queue[1:]
		x.mu.Unlock()
		at := attr.Now()
		for name, e := range next.names {
			if at < e.kernel {
				x.Expire(next.dir, name, e.node)
			}
		}
		x.Table.count.Add(-int64(len(next.names)))
	}
}

// Running reports whether notifications wait.
func (x *Expiry) Running() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.running
}
