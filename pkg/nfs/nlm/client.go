package nlm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/nfsrdmad/nfsrdmad/internal/fair"
	"github.com/nfsrdmad/nfsrdmad/internal/pace"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/rangelock"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// An OwnerKind separates the owners of fcntl(2) and flock(2) locks.
type OwnerKind uint8

// Kinds of owners.
const (
	Posix OwnerKind = iota + 1 // fcntl(2): a process, or an open file description
	Flock                      // flock(2): an open file description
)

// An Owner is a lock owner of this mount. Locks of one owner do not conflict.
type Owner struct {
	Kind OwnerKind
	ID   uint64
}

// maxOffset is the last byte of a lock.
const maxOffset = rangelock.MaxOffset

// A Lock is a lock of a byte range of one file.
type Lock = rangelock.Lock[Owner]

// Config configures a Client. Host and Caller are necessary.
type Config struct {
	Host   string // address of the server
	Caller string // name of this host
	Port   int    // TCP port of NLM; 0 asks the port mapper and then tries MountPort
	// MountPort is the TCP port of MOUNT, 0 if unknown. MountPortFirst tries it before the port
	// mapper.
	MountPort      int
	MountPortFirst bool
	// AnySourcePort connects from a port that the kernel chooses. By default the client uses a
	// reserved port if it may bind one: Linux servers require it unless the export is insecure.
	AnySourcePort bool
	// GiveUp, if not 0, bounds the wait of a soft mount for replies. A request then returns
	// GiveUpErr. It does not bound the wait for a lock.
	GiveUp    time.Duration
	GiveUpErr syscall.Errno
	// Service receives the calls of servers; nil for none. Without it the client polls.
	Service *Service
	// Lost, if not nil, is called after locks of an owner were lost. With a State it may be called
	// before New returns.
	Lost func(fh nfs3.FH, owner Owner)
	// State keeps the locks for the next process; nil for none. New restores the locks in it. Host
	// must be that of the earlier process; New takes Caller from the State.
	State  *State
	Logger hclog.Logger

	times func(*Client) // for tests: changes the times and the connections
}

// Times of a Client. Tests change them.
type clientTimes struct {
	// between polls for a lock that the server reported as blocked: of a server that calls back,
	// and of another one
	called, silent pollTimes
	grace          time.Duration // between attempts during the grace period of the server
	keepAlive      time.Duration // between NULL calls while locks are held
	release        time.Duration // for the release of all locks in Close
	settle         time.Duration // between attempts to settle a recorded request
}

// pollTimes are the first and the longest time between polls.
type pollTimes struct{ first, longest time.Duration }

var defaultTimes = clientTimes{called: pollTimes{2 * time.Second, 30 * time.Second},
	silent: pollTimes{500 * time.Millisecond, 4 * time.Second}, grace: 2 * time.Second,
	keepAlive: time.Minute, release: 3 * time.Second, settle: 30 * time.Second}

// CloseTimeout bounds Client.Close and Service.Close.
const CloseTimeout = 6 * time.Second

// Limits of one mount. A user gets at most half: see fair.Limit.
const (
	maxLocks   = 1 << 16
	maxWaiters = 1 << 13 // requests that wait
)

// A Client holds the locks of one mount. Its methods may be called concurrently, except Close,
// which comes last. ReleaseStale also needs a
// single caller. Errors are syscall.Errno.
type Client struct {
	// Counters is safe to read at any time.
	Counters Counters

	cfg      Config
	log      hclog.Logger
	link     *link
	times    clientTimes
	addr     netip.Addr
	instance [8]byte // makes the owner handles of this client unique
	cookie   atomic.Uint64
	logged   atomic.Bool // the missing service was logged
	called   atomic.Bool // the server has called back

	stateLogged atomic.Bool // a failed record was logged
	limits      logLimits

	locks   *fair.Limit // held locks, and those that are requested now, by user
	waiting *fair.Limit // requests that wait, by user
	graph   waitGraph

	attempts atomic.Uint64 // of all requests to lock; for tests

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup
	restart chan restart // capacity 1
	// connected has capacity 1: the link has a new connection
	connected chan struct{}
	mapper    int // port of the port mapper of the server, for tests; 0 means 111
	// reclaimed is the number of lost connections before the last recovery that reclaimed all
	// locks. Only run uses it.
	reclaimed uint64
	// interrupted files have requests of an earlier process. Only New and run use it.
	interrupted map[*file]*interrupted
	restored    bool                 // New restored locks or requests
	restoring   sync.WaitGroup       // the work that New started to restore them
	kept        map[openKey]struct{} // open files of the restored locks, until ReleaseStale

	mu struct {
		sync.Mutex
		files   map[nfs3.FH]*file
		owners  map[Owner]*owner
		svids   map[uint32]struct{}   // in use by owners
		pending map[*request]struct{} // may wait for GRANTED
		lost    map[nfs3.FH][]uint64  // open files with lost locks
		state   serverState
		closed  bool
	}
}

// logLimits bound the messages whose number the server controls. Metrics count each event.
type logLimits struct{ unlock, noService, reclaim, lost pace.Limiter }

// A lockKey names an owner of locks and their file.
type lockKey struct {
	fh nfs3.FH
	id Owner
}

// An openKey names an open file.
type openKey struct {
	fh   nfs3.FH
	open uint64
}

// A file holds the locks of one file. turn serializes the calls to the server about this file and
// guards the tables.
type file struct {
	fh      nfs3.FH
	turn    turn
	waiters waiters

	locks rangelock.Table[Owner] // changes also need waiters.mu
	lost  rangelock.Table[Owner] // locks that the server no longer has; until their owner unlocks
	creds map[Owner][]byte
	// late, if not nil, is closed when the last call has ended, whose caller did not wait for it
	late <-chan struct{}

	users int // guarded by Client.mu: goroutines that use the file
}

// An owner is the identity of a lock owner in the protocol. Client.mu guards it.
type owner struct {
	svid  uint32
	oh    []byte
	users int    // goroutines that use the owner, and files where it has locks
	held  int    // locks
	uid   uint32 // of the user whose share has the locks: that of the first one; undefined without locks
}

// New returns a Client. It contacts the server when the first lock is requested. With a State that
// has locks it restores them before it returns, and reclaims them in the background.
func New(cfg Config) *Client {
	if cfg.Logger == nil {
		cfg.Logger = hclog.NewNullLogger()
	}
	c := &Client{cfg: cfg, log: cfg.Logger, times: defaultTimes, restart: make(chan restart, 1),
		connected: make(chan struct{}, 1)}
	c.link = newLink(&c.cfg, c.connectionLost)
	c.link.made = c.connectionMade
	c.addr, _ = netip.ParseAddr(cfg.Host)
	c.addr = c.addr.Unmap().WithZone("") // as the service sees it
	_, _ = rand.Read(c.instance[:])      // never fails
	c.mu.files, c.mu.owners = make(map[nfs3.FH]*file), make(map[Owner]*owner)
	c.mu.svids = make(map[uint32]struct{})
	c.mu.pending, c.mu.lost = make(map[*request]struct{}), make(map[nfs3.FH][]uint64)
	c.locks, c.waiting = fair.NewLimit("locks", maxLocks), fair.NewLimit("requests that wait for locks", maxWaiters)
	c.locks.Warn, c.waiting.Warn = c.warn, c.warn
	c.interrupted, c.kept = make(map[*file]*interrupted), make(map[openKey]struct{})
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if cfg.times != nil {
		cfg.times(c)
	}
	c.restoreState()
	c.work.Go(c.run)
	if cfg.Service != nil {
		cfg.Service.add(c)
	}
	return c
}

// Close releases the locks that are left, within a few seconds, and ends the client. After Detach
// it does nothing.
func (c *Client) Close() { c.CloseWithin(c.times.release) }

// CloseWithin is Close with a bound of the time for the release of the locks. The server keeps
// those that are not released until it learns that this client has gone.
func (c *Client) CloseWithin(release time.Duration) {
	if c.isClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), release)
	defer cancel()
	c.releaseAll(ctx)
	c.end((*Service).remove)
}

// end ends all work. leave removes the client from the service.
func (c *Client) end(leave func(*Service, *Client)) {
	c.mu.Lock()
	c.mu.closed = true
	c.mu.Unlock()
	c.cancel()
	c.work.Wait()
	if c.cfg.Service != nil {
		leave(c.cfg.Service, c)
	}
	c.link.close()
	c.cfg.State.close()
}

func (c *Client) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.closed
}

func (c *Client) releaseAll(ctx context.Context) {
	c.mu.Lock()
	var files []*file
	for _, f := range c.mu.files {
		f.users++
		files = append(files, f)
	}
	c.mu.Unlock()
	for _, f := range files {
		if f.acquire(ctx) == nil {
			for _, l := range slices.Concat(f.locks.All(), f.lost.All()) {
				c.releaseLock(ctx, f, &l)
			}
			f.release()
		}
		c.putFile(f)
	}
}

// background runs do in a goroutine that ends before Close returns. After Close it does nothing.
func (c *Client) background(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mu.closed {
		c.work.Go(do)
	}
}

// Reason returns why the last attempt to reach the lock service failed, "" if it succeeded.
func (c *Client) Reason() string { return c.link.reason() }

// acquire waits for the turn of the file. The error is EINTR.
func (f *file) acquire(ctx context.Context) error { return f.turn.queue().wait(ctx) }

func (f *file) release() { f.turn.release() }

func (c *Client) getFile(fh nfs3.FH) *file {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.mu.files[fh]
	if f == nil {
		f = &file{fh: fh, creds: make(map[Owner][]byte)}
		f.waiters.table, f.waiters.graph = &f.locks, &c.graph
		c.mu.files[fh] = f
	}
	f.users++
	return f
}

// putFile ends one use. A file without users and locks leaves the table. Each lock table that is
// not empty counts as a user, so that putFile needs no turn.
func (c *Client) putFile(f *file) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.users--; f.users == 0 {
		delete(c.mu.files, f.fh)
	}
}

// minSVID keeps the svids of this client apart from those of Linux's lockd, which counts from 0. A
// Linux server identifies an owner by the address of its client and the svid alone.
const minSVID = 1 << 30

func (c *Client) getOwner(id Owner) *owner {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.mu.owners[id]
	if o == nil {
		var svid uint32
		for {
			var b [4]byte
			_, _ = rand.Read(b[:]) // never fails
			svid = minSVID | binary.BigEndian.Uint32(b[:])&(minSVID-1)
			if _, used := c.mu.svids[svid]; !used {
				break
			}
		}
		c.mu.svids[svid] = struct{}{}
		o = c.newOwner(svid)
		c.mu.owners[id] = o
	}
	o.users++
	return o
}

func (c *Client) newOwner(svid uint32) *owner {
	return &owner{svid: svid, oh: ownerHandle(c.instance, svid)}
}

func (c *Client) putOwner(id Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.mu.owners[id]
	if o.users--; o.users == 0 {
		delete(c.mu.owners, id)
		delete(c.mu.svids, o.svid)
	}
}

// set records a granted lock, which completes in. The error is EINTR: the client is detached, and
// nothing is recorded. The caller has the turn.
func (c *Client) set(f *file, l Lock, cred []byte, in *intent) error {
	f.creds[l.Owner] = cred
	return c.change(f, &tableChange{id: l.Owner, start: l.Start, end: l.End, releases: !l.Exclusive, cred: cred, in: in,
		do: func() { f.locks.Set(l) }})
}

// clear removes locks of an owner, lost ones too, which completes in. Its error is that of set. The
// caller has the turn.
func (c *Client) clear(f *file, id Owner, start, end uint64, in *intent) error {
	err := c.change(f, &tableChange{id: id, start: start, end: end, releases: true, in: in, do: func() {
		f.locks.Clear(id, start, end)
		f.lost.Clear(id, start, end)
	}})
	if err != nil {
		return err
	}
	if !f.has(id) {
		delete(f.creds, id)
	}
	return nil
}

func (f *file) has(id Owner) bool {
	return f.locks.Has(id) || f.lost.Has(id)
}

func (f *file) empty() bool { return f.locks.Len() == 0 && f.lost.Len() == 0 }

// A tableChange is a change of the locks of one owner of a file, lost ones too, from start to end.
type tableChange struct {
	id         Owner
	start, end uint64
	do         func()
	releases   bool    // it may release or weaken a lock
	cred       []byte  // of a new lock; nil: unchanged
	in         *intent // the request that the change completes; nil for none
	all        bool    // record all locks of the owner again
}

// warn logs for a fair.Limit.
func (c *Client) warn(msg string, args ...any) { c.log.Warn(msg, args...) }

// payer returns the user whose share has the locks of an owner.
func (c *Client) payer(o *owner, cred []byte) (uid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o.held > 0 {
		return o.uid
	}
	return sunrpc.CredUID(cred)
}

// change runs one change of the tables of f, records it in the State, and keeps the counts. The
// error is EINTR: the client is detached, and the change is not recorded. The caller has the turn
// and uses f and the owner.
func (c *Client) change(f *file, ch *tableChange) error {
	id := ch.id
	had, wasEmpty, before, hadLost := f.has(id), f.empty(), f.locks.Len(), f.lost.Len() > 0
	f.waiters.change(ch.do, ch.releases, id, ch.start, ch.end)
	n := f.locks.Len() - before
	c.Counters.Held.Add(int64(n))
	c.mu.Lock()
	o := c.mu.owners[id]
	if o.held == 0 {
		o.uid = sunrpc.CredUID(ch.cred)
	}
	o.held += n
	c.locks.Add(o.uid, n)
	if has := f.has(id); has != had {
		o.users += delta(has)
	}
	if isEmpty := f.empty(); isEmpty != wasEmpty {
		f.users += delta(wasEmpty)
	}
	if hadLost || f.lost.Len() > 0 {
		delete(c.mu.lost, f.fh)
		for _, l := range f.lost.All() {
			c.mu.lost[f.fh] = append(c.mu.lost[f.fh], l.Open)
		}
	}
	c.mu.Unlock()
	recorded, err := c.cfg.State.apply(f, o, ch)
	if !recorded {
		return syscall.EINTR
	}
	_ = c.recordError(err) // only after a lost lock or a restore: set and clear have reserved slots
	return nil
}

func delta(up bool) int {
	if up {
		return 1
	}
	return -1
}
