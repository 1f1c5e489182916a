package nfsd

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// An object is a file of any type that clients use, with its descriptors. Whoever got it from
// [objects.get] holds a reference; the descriptors stay open until the last reference is released.
type object struct {
	fh   nfs3.FH
	key  inodeKey
	kind uint32 // S_IFMT bits
	path int    // O_PATH descriptor
	proc string // name of path below /proc

	changes changes // calls that change the object
	syncs   syncer
	dirty   atomic.Bool // has data that no fsync covers
	setting sync.Mutex  // held by SETATTR

	open struct {
		sync.Mutex     // also held while the position of ro is in use for a directory
		ro, rw     int // -1: not open
	}
	perms struct {
		sync.Mutex
		list [permSlots]permEntry
		next int
	}

	// Guarded by objects.mu.
	refs       int
	gone       bool // not in the table any more
	used       uint32
	prev, next *object // in order of use
}

// permSlots is how many callers' permissions an object remembers.
const permSlots = 4

// A permEntry is what the kernel said about one caller's access, valid while the attributes that
// decide about it stay.
type permEntry struct {
	who      cred
	uid, gid uint32
	mode     uint32
	ctime    unix.Timespec
	bits     uint32 // permRead, permWrite, permExec
	noWrite  error  // why permWrite is missing
}

// Permission bits as access(2) names them.
const (
	permRead  = unix.R_OK
	permWrite = unix.W_OK
	permExec  = unix.X_OK
)

// objects is the table of objects by handle: bounded, least recently used out first. Idle objects
// are closed after a few seconds, so that the server does not keep removed files and mounted file
// systems busy.
type objects struct {
	max  int
	sync func(*object) error // makes an object's data stable

	mu     sync.Mutex
	table  map[nfs3.FH]*object
	inodes map[inodeKey]*object
	lru    object // ring; lru.next was used last
	clock  uint32 // in sweeps
}

// sweepEvery is the clock of the table. An object is closed after idleSweeps without use, and after
// dirtySweeps when its data must be made stable for it.
const (
	sweepEvery  = time.Second
	idleSweeps  = 2
	dirtySweeps = 30
)

func newObjects(limit int, syncData func(*object) error) *objects {
	t := &objects{max: limit, sync: syncData, table: make(map[nfs3.FH]*object), inodes: make(map[inodeKey]*object)}
	t.lru.prev, t.lru.next = &t.lru, &t.lru
	return t
}

// get returns the object of a handle, if it is in the table, with a reference.
func (t *objects) get(fh *nfs3.FH) *object {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.table[*fh]
	if o != nil {
		t.touch(o)
		o.refs++
	}
	return o
}

// add makes an object of a descriptor, which then belongs to it, and returns it with a reference.
// An object that is in the table already is returned instead, and the descriptor is closed.
func (t *objects) add(fh *nfs3.FH, fd int, st *unix.Stat_t) *object {
	t.mu.Lock()
	if o := t.table[*fh]; o != nil {
		t.touch(o)
		o.refs++
		t.mu.Unlock()
		unix.Close(fd)
		return o
	}
	o := &object{fh: *fh, key: keyOf(st), kind: st.Mode & unix.S_IFMT, path: fd, proc: procFD(fd), refs: 1}
	o.open.ro, o.open.rw = -1, -1
	t.table[o.fh] = o
	t.inodes[o.key] = o
	o.prev, o.next = &t.lru, t.lru.next
	o.prev.next, o.next.prev = o, o
	o.used = t.clock
	var out idleObjects
	for victim := t.lru.prev; len(t.table)-len(out.dirty) > t.max && victim != &t.lru; {
		older := victim.prev
		if victim.refs == 0 {
			t.take(&out, victim)
		}
		victim = older
	}
	t.mu.Unlock()
	t.closeIdle(&out)
	return o
}

// touch makes o the object used last. mu is held.
func (t *objects) touch(o *object) {
	o.used = t.clock
	if t.lru.next == o {
		return
	}
	o.prev.next, o.next.prev = o.next, o.prev
	o.prev, o.next = &t.lru, t.lru.next
	o.prev.next, o.next.prev = o, o
}

// unlink takes o out of the table. mu is held.
func (t *objects) unlink(o *object) {
	if o.gone {
		return
	}
	o.gone = true
	delete(t.table, o.fh)
	if t.inodes[o.key] == o {
		delete(t.inodes, o.key)
	}
	o.prev.next, o.next.prev = o.next, o.prev
}

// release gives a reference back.
func (t *objects) release(o *object) {
	if o == nil {
		return
	}
	t.mu.Lock()
	o.refs--
	last := o.refs == 0 && o.gone
	t.mu.Unlock()
	if last {
		t.closeAll([]*object{o})
	}
}

// forget drops the object of a file that is removed, so that its disk space is free as soon as no
// call uses it.
func (t *objects) forget(k inodeKey) {
	t.mu.Lock()
	o := t.inodes[k]
	if o == nil {
		t.mu.Unlock()
		return
	}
	t.unlink(o)
	unused := o.refs == 0
	t.mu.Unlock()
	if unused {
		t.closeAll([]*object{o})
	}
}

// sweep advances the clock and closes idle objects.
func (t *objects) sweep() {
	var out idleObjects
	t.mu.Lock()
	t.clock++
	for o := t.lru.prev; o != &t.lru; {
		older := o.prev
		idle := t.clock - o.used
		if idle <= idleSweeps {
			break
		}
		if o.refs == 0 && (!o.dirty.Load() || idle > dirtySweeps) {
			t.take(&out, o)
		}
		o = older
	}
	t.mu.Unlock()
	t.closeIdle(&out)
}

// idleObjects are objects without a reference that the table wants to close.
type idleObjects struct {
	clean []*object // out of the table
	dirty []*object // in the table with a reference, until their data is stable
}

// take adds an object without a reference to out. mu is held.
func (t *objects) take(out *idleObjects, o *object) {
	if o.dirty.Load() {
		o.refs++
		out.dirty = append(out.dirty, o)
		return
	}
	t.unlink(o)
	out.clean = append(out.clean, o)
}

// closeIdle closes objects unless a call has taken them meanwhile. An object with uncommitted data
// leaves the table after its fsync: a COMMIT that comes during the fsync shall wait for the result,
// because the kernel reports a write error once, and perhaps not to a new descriptor.
func (t *objects) closeIdle(out *idleObjects) {
	t.closeAll(out.clean)
	for _, o := range out.dirty {
		var st unix.Stat_t
		stale := o.stat(&st) != nil
		if !stale {
			_ = t.sync(o) // a failure changes the write verifier
		}
		t.mu.Lock()
		o.refs--
		if o.refs == 0 && (stale || !o.dirty.Load()) {
			t.unlink(o)
		}
		unused := o.refs == 0 && o.gone
		t.mu.Unlock()
		if unused {
			t.closeAll([]*object{o})
		}
	}
}

// closeAll closes objects that are out of the table and have no reference. Data that a client has
// not committed is made stable first: a later descriptor might not see a write error that another
// process has seen.
func (t *objects) closeAll(out []*object) {
	for _, o := range out {
		var st unix.Stat_t
		if o.dirty.Load() && o.stat(&st) == nil {
			_ = t.sync(o) // a failure changes the write verifier
		}
		o.close()
	}
}

// end empties the table. No call is running.
func (t *objects) end() {
	t.mu.Lock()
	var out []*object
	for o := t.lru.next; o != &t.lru; o = t.lru.next {
		t.unlink(o)
		out = append(out, o)
	}
	t.mu.Unlock()
	t.closeAll(out)
}

func (o *object) close() {
	for _, fd := range [...]int{o.path, o.open.ro, o.open.rw} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// stat reads the object's attributes. An object without a name is stale.
func (o *object) stat(st *unix.Stat_t) error {
	if err := retry(func() error { return unix.Fstat(o.path, st) }); err != nil {
		return err
	}
	if st.Nlink == 0 {
		return unix.ESTALE
	}
	return nil
}

// reader returns a descriptor for reading, opened by the server itself: the caller's permission is
// checked for each call.
func (o *object) reader() (int, error) {
	o.open.Lock()
	defer o.open.Unlock()
	return o.readerLocked()
}

func (o *object) readerLocked() (int, error) {
	if o.open.rw >= 0 {
		return o.open.rw, nil
	}
	if o.open.ro >= 0 {
		return o.open.ro, nil
	}
	if err := o.checkIO(); err != nil {
		return -1, err
	}
	fd, err := reopen(o.path, unix.O_RDONLY)
	if err == nil {
		o.open.ro = fd
	}
	return fd, err
}

// reopenLocked returns a new descriptor for reading. Its position is the start.
func (o *object) reopenLocked() (int, error) {
	if o.open.ro >= 0 {
		unix.Close(o.open.ro)
		o.open.ro = -1
	}
	return o.readerLocked()
}

// writer returns a descriptor for reading and writing.
func (o *object) writer() (int, error) {
	o.open.Lock()
	defer o.open.Unlock()
	if o.open.rw >= 0 {
		return o.open.rw, nil
	}
	if err := o.checkIO(); err != nil {
		return -1, err
	}
	if o.kind == unix.S_IFDIR {
		return -1, unix.EISDIR
	}
	fd, err := reopen(o.path, unix.O_RDWR)
	if err == nil {
		o.open.rw = fd
	}
	return fd, err
}

// checkIO refuses what must not be opened: pipes and devices have side effects, links would be
// followed.
func (o *object) checkIO() error {
	if o.kind != unix.S_IFREG && o.kind != unix.S_IFDIR {
		return unix.EINVAL
	}
	return nil
}

// keepWriter gives the object a descriptor for writing unless it has one.
func (o *object) keepWriter(fd int) {
	o.open.Lock()
	defer o.open.Unlock()
	if o.open.rw >= 0 {
		unix.Close(fd)
		return
	}
	o.open.rw = fd
}

// changes counts the calls that change an object, so that a reply holds attributes from before the
// call only when no other call of this server came between (RFC 1813 §2.6, wcc_data). A local
// process that changes the object at the same time is not seen.
type changes struct {
	state atomic.Uint64 // calls begun << runningBits | calls running
}

// runningBits holds the number of running calls, which slowCalls bounds.
const runningBits = 20

// begin counts a call. The result goes to end. One atomic step counts the call as begun and as
// running, so that of two concurrent calls at least one sees the other.
func (c *changes) begin() (ticket uint64, alone bool) {
	v := c.state.Add(1<<runningBits | 1)
	return v >> runningBits, v&(1<<runningBits-1) == 1
}

// end reports whether no other call ran since begin.
func (c *changes) end(ticket uint64, alone bool) bool {
	return c.state.Add(^uint64(0))>>runningBits == ticket && alone
}

// A syncer lets concurrent callers share fsyncs: each caller gets the result of a sync that began
// after its call.
type syncer struct {
	mu      sync.Mutex
	wake    *sync.Cond
	running bool
	begun   uint64 // syncs begun
	ended   uint64 // syncs ended
	failed  uint64 // number of the last sync that failed
	err     error  // its error
}

func (s *syncer) do(sync1 func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wake == nil {
		s.wake = sync.NewCond(&s.mu)
	}
	for need := s.begun + 1; ; {
		switch {
		case s.ended >= need && s.failed >= need:
			return s.err
		case s.ended >= need:
			return nil
		case s.running:
			s.wake.Wait()
		default:
			s.running = true
			s.begun++
			s.mu.Unlock()
			err := sync1()
			s.mu.Lock()
			s.running = false
			s.ended = s.begun
			if err != nil {
				s.failed, s.err = s.ended, err
			}
			s.wake.Broadcast()
		}
	}
}

// permissions returns which accesses the kernel grants the caller, by the attributes in st.
func (o *object) permissions(id *identity, who *cred, st *unix.Stat_t) (bits uint32, noWrite, err error) {
	o.perms.Lock()
	for i := range o.perms.list {
		e := &o.perms.list[i]
		if e.bits != 0 && e.ctime == st.Ctim && e.mode == st.Mode && e.uid == st.Uid && e.gid == st.Gid &&
			e.who == *who {
			bits, noWrite = e.bits, e.noWrite
			o.perms.Unlock()
			return bits &^ permKnown, noWrite, nil
		}
	}
	o.perms.Unlock()
	e := permEntry{who: *who, uid: st.Uid, gid: st.Gid, mode: st.Mode, ctime: st.Ctim, bits: permKnown}
	err = id.as(who, func() error {
		for _, bit := range [...]uint32{permRead, permWrite, permExec} {
			switch err := faccess(o.path, bit); {
			case err == nil:
				e.bits |= bit
			case bit == permWrite:
				e.noWrite = err
			}
		}
		return nil
	})
	if err != nil {
		return 0, nil, err
	}
	if permSettled(st.Ctim, time.Now()) {
		o.perms.Lock()
		o.perms.list[o.perms.next] = e
		o.perms.next = (o.perms.next + 1) % permSlots
		o.perms.Unlock()
	}
	return e.bits &^ permKnown, e.noWrite, nil
}

// permSettled reports whether a change that comes after now gets another ctime: the clock of ctime
// is coarse.
func permSettled(ctime unix.Timespec, now time.Time) bool {
	settle := permSettle
	if ctime.Nsec == 0 {
		settle = permSettleCoarse
	}
	return now.Sub(time.Unix(ctime.Unix())) > settle
}

// permKnown marks a permEntry in use.
const permKnown = 1 << 30

// permSettle is longer than the resolution of the clock that the kernel takes ctime from.
// permSettleCoarse is longer than the resolution of file systems that keep no fractions of a
// second, for example ext4 with inodes of 128 bytes.
const (
	permSettle       = 100 * time.Millisecond
	permSettleCoarse = 2100 * time.Millisecond
)
