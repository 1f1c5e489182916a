package fair

// A Queue holds entries of several classes; a class is a user ID. Each class has the next turn, one
// after the other, and the entries of one class are first come, first served. A user with one entry
// therefore waits for at most one entry of each other user, however many they have.
//
// The zero value is an empty queue.
// A Queue has no lock: the caller must not use it concurrently. Its methods take the same time for
// any number of entries.
type Queue[T any] struct {
	classes map[uint32]*class[T] // those with entries
	next    *class[T]            // whose turn it is; a ring
	n       int
	unused  []*class[T] // kept, so that a waiting call need not allocate
}

// maxUnused bounds the classes that a Queue keeps without entries.
const maxUnused = 64

// A class is a list of the entries of one user, oldest first.
type class[T any] struct {
	id          uint32
	first, last *Entry[T]
	prev, next  *class[T] // in the ring
}

// An Entry is one waiting party. It is in at most one queue.
type Entry[T any] struct {
	Value      T
	class      *class[T] // nil while the entry is in no queue
	prev, next *Entry[T]
}

// Queued reports whether e is in a queue.
func (e *Entry[T]) Queued() bool { return e.class != nil }

// Len returns the number of entries.
func (q *Queue[T]) Len() int { return q.n }

// Add appends e, which must be in no queue, to the entries of a user. The turn of a user without
// other entries comes after those of all users who wait.
func (q *Queue[T]) Add(e *Entry[T], user uint32) {
	c := q.classes[user]
	if c == nil {
		c = q.addClass(user)
	}
	e.class, e.prev = c, c.last
	if c.last == nil {
		c.first = e
	} else {
		c.last.next = e
	}
	c.last = e
	q.n++
}

// First returns the entry whose turn it is, or nil. It stays in the queue.
func (q *Queue[T]) First() *Entry[T] {
	if q.next == nil {
		return nil
	}
	return q.next.first
}

// Take removes and returns the entry whose turn it is, or nil. The next turn is that of another
// user, if there is one.
func (q *Queue[T]) Take() *Entry[T] { return q.TakeIf(func(T) bool { return true }) }

// TakeIf is Take, and passes over users whose first entry is not ok. It takes time for each of
// them.
func (q *Queue[T]) TakeIf(ok func(T) bool) *Entry[T] {
	c := q.next
	for range len(q.classes) {
		if e := c.first; ok(e.Value) {
			q.next = c.next
			q.Remove(e)
			return e
		}
		c = c.next
	}
	return nil
}

// Remove removes e. It does nothing if e is in no queue. The order of the others stays the same.
func (q *Queue[T]) Remove(e *Entry[T]) {
	c := e.class
	if c == nil {
		return
	}
	if e.prev == nil {
		c.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		c.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.class, e.prev, e.next = nil, nil, nil
	q.n--
	if c.first == nil {
		q.removeClass(c)
	}
}

// addClass adds a class before the one whose turn it is, which is the end of the ring.
func (q *Queue[T]) addClass(user uint32) *class[T] {
	var c *class[T]
	if n := len(q.unused); n > 0 {
		c, q.unused = q.unused[n-1], q.unused[:n-1]
	} else {
		c = &class[T]{}
	}
	c.id = user
	if q.next == nil {
		c.prev, c.next, q.next = c, c, c
	} else {
		c.prev, c.next = q.next.prev, q.next
		c.prev.next, c.next.prev = c, c
	}
	if q.classes == nil {
		q.classes = make(map[uint32]*class[T])
	}
	q.classes[user] = c
	return c
}

func (q *Queue[T]) removeClass(c *class[T]) {
	delete(q.classes, c.id)
	if c.next == c {
		q.next = nil
	} else {
		c.prev.next, c.next.prev = c.next, c.prev
		if q.next == c {
			q.next = c.next
		}
	}
	c.prev, c.next = nil, nil
	if len(q.unused) < maxUnused {
		q.unused = append(q.unused, c)
	}
}
