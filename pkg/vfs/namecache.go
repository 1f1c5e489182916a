package vfs

import (
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"github.com/nfsrdmad/nfsrdmad/pkg/vfs/attr"
)

// The kernel caches names for the time that the file system gives. When another client changes a
// directory, the names in it expire at once: the kernel then repeats the LOOKUP of each name that
// it uses, as Linux's NFS client does. Changes by this mount do not expire names.

const (
	// maxCachedNames bounds the names of one FS that are remembered. Other names expire after
	// forgottenNameTime.
	maxCachedNames    = 1 << 20
	forgottenNameTime = time.Second
	// minNameSweep is the number of names of a directory from which expired names are removed.
	minNameSweep = 1024
)

// A nameCache holds the names in a directory that the kernel may have cached.
type nameCache struct {
	names   map[string]cachedName
	expires attr.Instant // the latest of the names
	sweepAt int          // number of names at which expired ones are removed
}

type cachedName struct {
	expires attr.Instant
	dir     bool
}

// cacheName remembers a name that the kernel will cache for the time in out. start is FS.clock at
// the call that returned the name. The kernel must not cache a name from before a change of the
// directory by another client.
func (fs *FS) cacheName(dir *inode, name string, start uint64, out *fuse.EntryOut) {
	timeout := out.EntryTimeout()
	if timeout <= 0 {
		return
	}
	at := attr.Now()
	dir.mu.Lock()
	defer dir.mu.Unlock()
	if start < dir.lookups.epochClock {
		out.SetEntryTimeout(0)
		return
	}
	if dir.names == nil {
		dir.names = new(nameCache)
	}
	c := dir.names
	before := len(c.names)
	if before > 0 && (at > c.expires || before >= max(c.sweepAt, minNameSweep)) {
		c.sweep(at)
	}
	if _, known := c.names[name]; !known && fs.inodes.names.Load() >= maxCachedNames {
		out.SetEntryTimeout(min(timeout, forgottenNameTime))
		return
	}
	if c.names == nil {
		c.names = make(map[string]cachedName)
	}
	n := cachedName{at.Add(timeout), out.NodeId != 0 && out.Attr.Mode&syscall.S_IFMT == syscall.S_IFDIR}
	c.names[name] = n
	if before == 0 || n.expires > c.expires {
		c.expires = n.expires
	}
	fs.inodes.names.Add(int64(len(c.names) - before))
}

func (c *nameCache) len() int {
	if c == nil {
		return 0
	}
	return len(c.names)
}

// sweep removes expired names.
func (c *nameCache) sweep(at attr.Instant) {
	before := len(c.names)
	if at > c.expires {
		c.names = nil
	}
	for name, n := range c.names {
		if at > n.expires {
			delete(c.names, name)
		}
	}
	if len(c.names) < before/shrinkBelow {
		c.names = smaller(c.names)
	}
	c.sweepAt = 2 * len(c.names)
}

// takeNamesLocked removes and returns the names of a directory after a new epoch began. The names
// count in inodeTable.names until sendExpiry has handled them. The caller holds dir.mu.
func (dir *inode) takeNamesLocked() map[string]cachedName {
	if dir.names == nil {
		return nil
	}
	names := dir.names.names
	dir.names = nil
	return names
}

// A nameExpiry tells the kernel which names to look up again. One goroutine does so for each FS:
// the kernel locks the directory, and waits for requests that the file system is handling.
type nameExpiry struct {
	mu      sync.Mutex
	running bool
	queue   []expiredNames
}

type expiredNames struct {
	dir   uint64
	names map[string]cachedName
}

// expireNames makes the kernel look names of a directory up again.
func (fs *FS) expireNames(dir *inode, names map[string]cachedName) {
	if len(names) == 0 {
		return
	}
	fs.Counters.NameDrops.Add(uint64(len(names)))
	e := &fs.expiry
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queue = append(e.queue, expiredNames{dir.id, names})
	if !e.running {
		e.running = true
		fs.spawn(fs.sendExpiry)
	}
}

// sendExpiry sends the queued notifications.
func (fs *FS) sendExpiry() {
	e := &fs.expiry
	d := fs.device.Load()
	for {
		e.mu.Lock()
		if len(e.queue) == 0 {
			e.running = false
			e.mu.Unlock()
			return
		}
		next := e.queue[0]
		e.queue = e.queue[1:]
		e.mu.Unlock()
		at := attr.Now()
		for name, n := range next.names {
			// A kernel that cannot expire a name removes the name instead. A process in the
			// directory could then not determine its path.
			if d != nil && at < n.expires && (fs.expireOnly.Load() || !n.dir) && !fs.isAborted() {
				_ = d.ExpireEntry(next.dir, name)
			}
		}
		fs.inodes.names.Add(-int64(len(next.names)))
	}
}
