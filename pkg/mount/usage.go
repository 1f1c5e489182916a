package mount

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
)

const (
	// maxConsumers bounds the processes and the users of one mount that a usage counts. A full
	// table drops the half that made no request for the longest time.
	maxConsumers = 1024
	maxThreads   = 4 * maxConsumers // a full cache is cleared
	// threadAge is how long a usage remembers the process of a thread. A new thread can get the
	// number of one that has ended.
	threadAge = 10 * time.Second
	// processAge is the time after its latest request for which a process is shown. Most processes
	// have ended then.
	processAge = 10 * time.Minute
)

// A usage counts the requests of one mount by process and by user. The zero value is empty. All
// methods may be called concurrently.
type usage struct {
	mu        sync.Mutex
	threads   map[callerID]thread
	processes map[processID]*consumer
	users     map[uint32]*consumer // by UID
}

// A callerID is what the kernel says about the caller of a request.
type callerID struct{ tid, uid uint32 }

// A processID includes the name, because a number can be used again.
type processID struct {
	pid, uid uint32
	command  string
}

// A thread is a cached caller.
type thread struct {
	process, user *consumer
	expires       time.Time
}

// A consumer is a process or a user.
type consumer struct {
	control.Usage
	last time.Time // of its latest request
}

// observe counts a request that took d. The first request of a thread reads its name from /proc.
func (u *usage) observe(r *kernel.Request, d time.Duration) {
	now := time.Now()
	id := callerID{r.Header.Pid, r.Header.Uid}
	u.mu.Lock()
	t, ok := u.threads[id]
	if !ok || now.After(t.expires) {
		u.mu.Unlock()
		t = u.find(id, now)
		u.mu.Lock()
	}
	for _, c := range [...]*consumer{t.process, t.user} {
		c.count(r, d)
		c.last = now
	}
	u.mu.Unlock()
}

func (c *consumer) count(r *kernel.Request, d time.Duration) {
	c.Requests++
	c.Seconds += d.Seconds()
	switch r.Op {
	case kernel.OpRead:
		c.ReadBytes += uint64(r.Bytes)
	case kernel.OpWrite:
		c.WrittenBytes += uint64(r.Bytes)
	}
}

// find returns the process and the user of a caller, and remembers them.
func (u *usage) find(id callerID, now time.Time) thread {
	p := processID{uid: id.uid}
	if id.tid != 0 { // 0: the kernel, or a process of another PID namespace
		p.pid, p.command = process(id.tid)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.threads == nil {
		u.threads = make(map[callerID]thread)
		u.processes, u.users = make(map[processID]*consumer), make(map[uint32]*consumer)
	}
	if len(u.threads) >= maxThreads || full(u.processes, p) || full(u.users, id.uid) {
		clear(u.threads) // also because consumerOf may drop consumers
	}
	t := thread{process: consumerOf(u.processes, p), user: consumerOf(u.users, id.uid), expires: now.Add(threadAge)}
	t.process.PID, t.process.Command, t.process.UID = p.pid, p.command, id.uid
	t.user.UID = id.uid
	u.threads[id] = t
	return t
}

// full reports whether m has no room for a new consumer with the key k.
func full[K comparable](m map[K]*consumer, k K) bool { return m[k] == nil && len(m) >= maxConsumers }

// consumerOf returns the consumer with a key. It makes room for a new one first.
func consumerOf[K comparable](m map[K]*consumer, k K) *consumer {
	if c := m[k]; c != nil {
		return c
	}
	if full(m, k) {
		keys := slices.SortedFunc(maps.Keys(m), func(a, b K) int { return m[a].last.Compare(m[b].last) })
		for _, old := range keys[:len(keys)/2] {
			delete(m, old)
		}
	}
	c := &consumer{last: time.Now()}
	m[k] = c
	return c
}

// usages returns the users, and the processes that made a request lately. Those with the most time
// are first.
func (u *usage) usages() (processes, users []control.Usage) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return sortedUsages(u.processes, time.Now().Add(-processAge)), sortedUsages(u.users, time.Time{})
}

// sortedUsages returns the consumers with a request after since.
func sortedUsages[K comparable](m map[K]*consumer, since time.Time) []control.Usage {
	l := make([]control.Usage, 0, len(m))
	for _, c := range m {
		if c.last.After(since) {
			l = append(l, c.Usage)
		}
	}
	slices.SortFunc(l, func(a, b control.Usage) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.PID, b.PID), cmp.Compare(a.UID, b.UID))
	})
	return l
}
